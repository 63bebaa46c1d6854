/* The vector variant and the reference must agree in every bit, whatever is around a row. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zeroinfer/linear.h"

static uint32_t state = 1;

static uint32_t next_random(void)
{
	state = state * 1664525u + 1013904223u;
	return state >> 8;
}

/* Finite values of all three types around one. */
static void fill_weights(uint8_t *bytes, int64_t count, zi_dtype dtype)
{
	for (int64_t idx = 0; idx < count; idx++) {
		float value = (float)(int32_t)(next_random() % 2001) / 1000.0f - 1.0f;
		uint16_t half = (uint16_t)((next_random() & 0x83FF) | 14u << 10);
		uint32_t bits;

		memcpy(&bits, &value, 4);
		if (dtype == ZI_F32)
			memcpy(bytes + 4 * idx, &value, 4);
		else if (dtype == ZI_BF16)
			memcpy(bytes + 2 * idx, (uint8_t *)&bits + 2, 2);
		else
			memcpy(bytes + 2 * idx, &half, 2);
	}
}

static int compare(int64_t rows, int64_t outputs, int64_t columns, zi_dtype dtype, int transposed,
		   int accumulated, int num_threads)
{
	size_t weight_bytes = (size_t)(outputs * columns) * 4;
	size_t scratch_bytes = zi_linear_scratch_bytes(rows, columns);
	float *x = malloc((size_t)(rows * columns) * sizeof(*x));
	uint8_t *weight = malloc(weight_bytes + 1);
	float *fast = malloc((size_t)(rows * outputs) * sizeof(*fast));
	float *slow = malloc((size_t)(rows * outputs) * sizeof(*slow));
	void *scratch = malloc(scratch_bytes);
	zi_linear_params params = {
		.num_rows = rows, .num_outputs = outputs, .num_columns = columns,
		.x = x, .x_stride = columns,
		/* An odd address: nothing may assume aligned weights. */
		.weight = weight + 1, .weight_dtype = dtype,
		.weight_stride = transposed ? 1 : columns,
		.weight_column_stride = transposed ? outputs : 1,
		.out = fast, .out_stride = outputs, .is_accumulated = accumulated,
	};
	int failed;

	for (int64_t idx = 0; idx < rows * columns; idx++)
		x[idx] = (float)(int32_t)(next_random() % 2001) / 500.0f - 2.0f;
	for (int64_t idx = 0; idx < rows * outputs; idx++)
		fast[idx] = slow[idx] = (float)idx;
	fill_weights(weight + 1, outputs * columns, dtype);
	failed = zi_linear(&params, scratch, scratch_bytes, zi_team_shared(num_threads));
	params.out = slow;
	failed |= zi_linear_reference(&params);
	failed |= memcmp(fast, slow, (size_t)(rows * outputs) * sizeof(*fast));
	if (failed)
		fprintf(stderr, "%ld x %ld x %ld, dtype %d, transposed %d, threads %d differ\n",
			(long)rows, (long)outputs, (long)columns, (int)dtype, transposed,
			num_threads);
	free(scratch);
	free(slow);
	free(fast);
	free(weight);
	free(x);
	return failed != 0;
}

static int test_bits(void)
{
	static const int64_t shapes[][3] = {
		{1, 1, 1}, {1, 33, 512}, {2, 5, 513}, {3, 64, 1030}, {4, 7, 9}, {49, 66, 520},
		{100, 65, 31}, {385, 9, 17},
	};
	int failed = 0;

	for (size_t idx = 0; idx < sizeof(shapes) / sizeof(shapes[0]); idx++)
		for (int variant = 0; variant < 24; variant++)
			failed |= compare(shapes[idx][0], shapes[idx][1], shapes[idx][2],
					  (zi_dtype)(variant % 3), variant / 3 % 2, variant / 6 % 2,
					  1 + variant / 12);
	return failed;
}

static int test_refusals(void)
{
	float value = 1;
	zi_linear_params params = {
		.num_rows = 1, .num_outputs = 1, .num_columns = 1, .x = &value, .x_stride = 1,
		.weight = &value, .weight_dtype = ZI_F32, .weight_stride = 1,
		.weight_column_stride = 1, .out = &value, .out_stride = 1,
	};
	zi_team *team = zi_team_shared(1);
	int failed = zi_linear(&params, &value, 0, team) == 0;

	failed |= zi_team_shared(0) != NULL;
	failed |= zi_linear(NULL, &value, 32, team) == 0;
	params.weight_dtype = 7;
	failed |= zi_linear(&params, &value, 32, team) == 0;
	params.weight_dtype = ZI_F32;
	params.num_columns = 0;
	failed |= zi_linear(&params, &value, 32, team) == 0;
	if (failed)
		fprintf(stderr, "a bad call was not refused\n");
	return failed;
}

int main(void)
{
	return test_bits() | test_refusals();
}
