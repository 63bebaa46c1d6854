/*
 * Matrix products with weights in the layout and type of a checkpoint.
 *
 * out[m][n] (+)= sum over k of x[m][k] * weight[n][k], in fp32. Weights are
 * widened a block at a time into a scratch that stays in the second-level
 * cache; nothing is packed beforehand, any byte alignment will do.
 *
 * The order in which one element's terms are added depends on K alone: not on
 * the number of rows or outputs, on threads, strides or the instruction set. So
 * a row's bits are the same alone and in any batch, and a matrix multiplied in
 * pieces gives the bits of the whole.
 *
 * Lifetime: all memory must stay valid and unchanged until the call returns.
 */
#ifndef ZEROINFER_LINEAR_H
#define ZEROINFER_LINEAR_H

#include <stddef.h>
#include <stdint.h>

#include "zeroinfer/team.h"
#include "zeroinfer/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct zi_linear_params {
	int64_t num_rows;	/* M */
	int64_t num_outputs;	/* N */
	int64_t num_columns;	/* K */
	const float *x;		/* M x K, columns contiguous */
	int64_t x_stride;	/* elements between rows */
	const void *weight;	/* N x K */
	int weight_dtype;	/* one of zi_dtype */
	int64_t weight_stride;	/* elements between outputs */
	int64_t weight_column_stride;	/* elements between columns: 1, or N when stored as K x N */
	float *out;		/* M x N, columns contiguous */
	int64_t out_stride;
	int is_accumulated;	/* add to what out holds */
} zi_linear_params;

/* Bytes of scratch that zi_linear needs for up to num_rows rows. */
size_t zi_linear_scratch_bytes(int64_t num_rows, int64_t num_columns);

/*
 * Multiply with the fastest variant this processor has. `scratch` holds
 * scratch_bytes; the blocks of each thread come on top (128 KiB each, kept).
 * Returns 0, -EINVAL for sizes or strides that make no sense, -ENOSPC if the
 * scratch is too small.
 */
int zi_linear(const zi_linear_params *params, void *scratch, size_t scratch_bytes, zi_team *team);

/* The scalar reference: the same bits, a hundred times slower. */
int zi_linear_reference(const zi_linear_params *params);

#ifdef __cplusplus
}
#endif

#endif
