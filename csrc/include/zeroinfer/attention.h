/*
 * Attention over the KV cache, straight from its blocks, for all sequences of a
 * step in one call: rows of prompts and generated tokens alike.
 *
 * A row at position p attends to the positions up to and including p, or to the
 * last `window` of them. Scores, softmax and sums are fp32; keys are taken in
 * tiles of fixed positions, so that a row's bits depend on its own sequence
 * alone: not on the other rows, how prompts are cut, block size or threads.
 *
 * The keys and values of all positions up to the last row's must have been
 * written. Lifetime: all memory must stay valid until the call returns.
 */
#ifndef ZEROINFER_ATTENTION_H
#define ZEROINFER_ATTENTION_H

#include <stdint.h>

#include "zeroinfer/kernels.h"
#include "zeroinfer/team.h"
#include "zeroinfer/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements of a head that the kernel can take. */
#define ZI_ATTENTION_MAX_HEAD_DIM 512

/* The rows of one sequence: consecutive in the step and in the sequence. */
typedef struct zi_sequence_rows {
	int64_t first_row;
	int64_t num_rows;
	int64_t first_position;
} zi_sequence_rows;

typedef struct zi_attention_params {
	int64_t num_rows;	/* of query and out; rows of no sequence are left alone */
	int64_t num_heads;	/* a multiple of key.num_heads */
	int dtype;		/* of query and out: ZI_F32 or ZI_BF16 */
	const void *query;	/* rows x num_heads x head_dim, heads contiguous */
	int64_t query_stride;	/* elements between rows */
	void *out;		/* the same shape; may be query */
	int64_t out_stride;
	zi_kv_plane key;
	zi_kv_plane value;	/* the sizes and type of key */
	int64_t num_sequences;
	const zi_sequence_rows *sequences;
	const int64_t *tables;	/* num_sequences x table_width block numbers */
	int64_t table_width;
	float scale;		/* factor on the products of query and key */
	const float *bias;	/* num_heads x bias_width: added by head and key position; or NULL */
	int64_t bias_width;	/* no smaller than the longest sequence */
	int64_t window;		/* positions a row sees, its own included; 0: all */
} zi_attention_params;

/* Return 0, -EINVAL for sizes or tables that make no sense, or -ENOMEM. */
int zi_attention(const zi_attention_params *params, zi_team *team);
int zi_attention_reference(const zi_attention_params *params);

#ifdef __cplusplus
}
#endif

#endif
