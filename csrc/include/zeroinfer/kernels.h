/*
 * Kernels of a transformer step beside its products: norms, rotary positions,
 * activations, writes into the KV cache, landed fp16 weights to bf16.
 *
 * Sums and functions are fp32 whatever the activations are; a result is rounded
 * once, to nearest even, unless said otherwise. Every row is computed by one
 * thread in one order: its bits depend neither on the other rows nor on threads.
 *
 * Each kernel has a scalar reference, zi_<kernel>_reference, which computes by
 * definition, mostly in double precision; both agree within rounding. Small
 * work runs on the calling thread alone, and all of it if the team is NULL.
 *
 * Lifetime: all memory must stay valid until the call returns. Inputs and
 * outputs may be the same memory where "in place" is said, else they must not
 * overlap. Strides count elements; the elements of a row are contiguous.
 *
 * All return 0, or -EINVAL for types, sizes or pointers that make no sense, in
 * which case nothing was written.
 */
#ifndef ZEROINFER_KERNELS_H
#define ZEROINFER_KERNELS_H

#include <stdint.h>

#include "zeroinfer/team.h"
#include "zeroinfer/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the kernels have fast variants here (AVX2, FMA and F16C). */
int zi_kernels_are_fast(void);

/*
 * RMS norm (out = x / rms(x) * weight) or layer norm, after x += residual. A sum
 * that ends in a product needs no residual: zi_linear adds as it stores.
 */
typedef struct zi_norm_params {
	int64_t num_rows;
	int64_t num_columns;
	int dtype;		/* of x, residual and out: ZI_F32 or ZI_BF16 */
	void *x;		/* written only if there is a residual */
	int64_t x_stride;
	const void *residual;	/* or NULL */
	int64_t residual_stride;
	void *out;		/* in place: may be x without a residual */
	int64_t out_stride;
	int weight_dtype;	/* of weight and bias: one of zi_dtype */
	const void *weight;	/* num_columns, any byte alignment */
	const void *bias;	/* likewise, or NULL */
	float eps;
	int is_rms;		/* rounds to dtype before the weight, as Hugging Face does */
} zi_norm_params;

int zi_norm(const zi_norm_params *params, zi_team *team);
int zi_norm_reference(const zi_norm_params *params);

/*
 * Angles of rows: in every head element i rotates against i + rotary_dim / 2, or
 * 2i against 2i + 1 if interleaved; elements from rotary_dim on stay.
 */
typedef struct zi_rotation {
	int64_t rotary_dim;	/* even; 0: nothing rotates */
	int table_dtype;	/* ZI_F32 or ZI_BF16 */
	const void *cos;	/* num_rows x rotary_dim / 2 */
	const void *sin;
	int64_t table_stride;
	int is_interleaved;
} zi_rotation;

/* Rotate every head in place. */
typedef struct zi_rotary_params {
	int64_t num_rows;
	int64_t num_heads;
	int dtype;		/* of x: ZI_F32 or ZI_BF16 */
	void *x;		/* heads of at least rotary_dim elements */
	int64_t row_stride;
	int64_t head_stride;
	zi_rotation rotation;
} zi_rotary_params;

int zi_rotary(const zi_rotary_params *params, zi_team *team);
int zi_rotary_reference(const zi_rotary_params *params);

typedef enum zi_activation {
	ZI_RELU = 0,
	ZI_SILU = 1,
	ZI_GELU = 2,		/* with erf */
	ZI_GELU_TANH = 3,
} zi_activation;

/* out = activation(x + bias) * up; bias and up may be left out. */
typedef struct zi_activation_params {
	int64_t num_rows;
	int64_t num_columns;
	int activation;		/* one of zi_activation */
	int dtype;		/* of x, up and out: ZI_F32 or ZI_BF16 */
	const void *x;
	int64_t x_stride;
	int bias_dtype;		/* one of zi_dtype */
	const void *bias;	/* num_columns, any byte alignment, or NULL */
	const void *up;		/* or NULL */
	int64_t up_stride;
	void *out;		/* in place: may be x */
	int64_t out_stride;
} zi_activation_params;

int zi_activate(const zi_activation_params *params, zi_team *team);
int zi_activate_reference(const zi_activation_params *params);

/* One plane of the KV cache in one layer, laid out as its sizes are listed. */
typedef struct zi_kv_plane {
	void *data;
	int dtype;		/* ZI_F32 or ZI_BF16 */
	int64_t num_blocks;
	int64_t num_heads;
	int64_t block_size;	/* tokens */
	int64_t head_dim;
} zi_kv_plane;

/*
 * Store rows of keys or values at their slots, converted to the plane's type
 * and rotated on the way, with the bits of zi_rotary followed by a store.
 */
typedef struct zi_kv_write_params {
	int64_t num_rows;
	int dtype;		/* of values: ZI_F32 or ZI_BF16 */
	const void *values;	/* rows x plane.num_heads x plane.head_dim */
	int64_t row_stride;
	int64_t head_stride;
	zi_rotation rotation;	/* rotary_dim up to plane.head_dim */
	const int64_t *slots;	/* block * block_size + offset; below 0: left out */
	zi_kv_plane plane;
} zi_kv_write_params;

int zi_kv_write(const zi_kv_write_params *params, zi_team *team);
int zi_kv_write_reference(const zi_kv_write_params *params);

/*
 * fp16 to bf16, in place (target == source) or between separate arrays. bf16
 * has the wider range: nothing overflows, infinities stay, NaNs stay NaNs. Three
 * bits of the significand are rounded away.
 */
int zi_half_to_bf16(const void *source, void *target, int64_t num_elements, zi_team *team);
int zi_half_to_bf16_reference(const void *source, void *target, int64_t num_elements);

#ifdef __cplusplus
}
#endif

#endif
