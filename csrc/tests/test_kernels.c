/*
 * Vector variants beside their references on buffers of exactly the size they
 * need, so that the address sanitizer sees a read or write beyond the end.
 */
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "check.h"
#include "zeroinfer/attention.h"
#include "zeroinfer/kernels.h"

static uint32_t state = 1;

static float next_random(void)
{
	state = state * 1664525u + 1013904223u;
	return (float)(int32_t)(state >> 8) / 8388608.0f - 1.0f;
}

static size_t size_of(zi_dtype dtype)
{
	return dtype == ZI_F32 ? 4 : 2;
}

/* Finite values of any type; bf16 has the upper half of a float's bits. */
static void *random_values(int64_t count, zi_dtype dtype)
{
	size_t size = size_of(dtype);
	uint8_t *values = malloc((size_t)count * size + (count == 0));
	int64_t idx;

	CHECK(values != NULL);
	for (idx = 0; idx < count; idx++) {
		float value = next_random();
		uint16_t half = (uint16_t)((uint32_t)(int32_t)(value * 1023.0f) & 0xBBFF);
		uint32_t bits;

		memcpy(&bits, &value, 4);
		if (dtype == ZI_BF16)
			half = (uint16_t)(bits >> 16);
		memcpy(values + (size_t)idx * size,
		       dtype == ZI_F32 ? (void *)&value : (void *)&half, size);
	}
	return values;
}

static void *copy_of(const void *values, int64_t count, zi_dtype dtype)
{
	size_t num_bytes = (size_t)count * size_of(dtype);
	void *copy = malloc(num_bytes + (num_bytes == 0));

	CHECK(copy != NULL);
	memcpy(copy, values, num_bytes);
	return copy;
}

static float value_at(const void *values, int64_t idx, zi_dtype dtype)
{
	uint32_t bits = 0;
	float value;

	if (dtype == ZI_F32)
		memcpy(&bits, (const uint8_t *)values + 4 * idx, 4);
	else
		memcpy((uint8_t *)&bits + 2, (const uint8_t *)values + 2 * idx, 2);
	memcpy(&value, &bits, 4);
	return value;
}

static void check_near(const void *fast, const void *slow, int64_t count, zi_dtype dtype)
{
	float tolerance = dtype == ZI_F32 ? 1e-5f : 0.01f;
	int64_t idx;

	for (idx = 0; idx < count; idx++) {
		float want = value_at(slow, idx, dtype);
		float error = fabsf(value_at(fast, idx, dtype) - want);

		CHECK(error <= tolerance * fmaxf(1.0f, fabsf(want)));
	}
}

static const zi_dtype activations[] = { ZI_F32, ZI_BF16 };
static const zi_dtype weights[] = { ZI_F32, ZI_BF16, ZI_F16 };
static const int64_t widths[] = { 1, 7, 8, 33, 70 };

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static void test_norm(int64_t width, zi_dtype dtype, zi_dtype weight_dtype)
{
	const int64_t num_rows = 3, count = num_rows * width;
	void *x = random_values(count, dtype), *other = copy_of(x, count, dtype);
	void *residual = random_values(count, dtype);
	void *weight = random_values(width, weight_dtype);
	void *bias = random_values(width, weight_dtype);
	void *fast = copy_of(x, count, dtype), *slow = copy_of(x, count, dtype);
	zi_norm_params params = {
		.num_rows = num_rows, .num_columns = width, .dtype = dtype, .x = x,
		.x_stride = width, .residual = residual, .residual_stride = width,
		.out = fast, .out_stride = width, .weight_dtype = weight_dtype,
		.weight = weight, .bias = bias, .eps = 0.1f,
	};

	for (params.is_rms = 0; params.is_rms < 2; params.is_rms++) {
		params.x = x;
		params.out = fast;
		CHECK(zi_norm(&params, NULL) == 0);
		params.x = other;
		params.out = slow;
		CHECK(zi_norm_reference(&params) == 0);
		check_near(x, other, count, dtype);
		check_near(fast, slow, count, dtype);
	}
	params.num_columns = 0;
	CHECK(zi_norm(&params, NULL) == -EINVAL);
	CHECK(zi_norm(NULL, NULL) == -EINVAL);
	free(slow);
	free(fast);
	free(bias);
	free(weight);
	free(residual);
	free(other);
	free(x);
}

static zi_rotation rotation_of(int64_t num_rows, int64_t num_pairs, zi_dtype dtype)
{
	zi_rotation rotation = {
		.rotary_dim = 2 * num_pairs, .table_dtype = dtype, .table_stride = num_pairs,
	};

	rotation.cos = random_values(num_rows * num_pairs, dtype);
	rotation.sin = random_values(num_rows * num_pairs, dtype);
	return rotation;
}

static void free_rotation(zi_rotation *rotation)
{
	free((void *)rotation->cos);
	free((void *)rotation->sin);
}

static void test_rotary(int64_t num_pairs, zi_dtype dtype)
{
	const int64_t num_rows = 2, num_heads = 3;
	const int64_t count = num_rows * num_heads * 2 * num_pairs;
	void *fast = random_values(count, dtype), *slow = copy_of(fast, count, dtype);
	zi_rotary_params params = {
		.num_rows = num_rows, .num_heads = num_heads, .dtype = dtype,
		.row_stride = num_heads * 2 * num_pairs, .head_stride = 2 * num_pairs,
		.rotation = rotation_of(num_rows, num_pairs, dtype),
	};
	int *is_interleaved = &params.rotation.is_interleaved;

	for (*is_interleaved = 0; *is_interleaved < 2; ++*is_interleaved) {
		params.x = fast;
		CHECK(zi_rotary(&params, NULL) == 0);
		params.x = slow;
		CHECK(zi_rotary_reference(&params) == 0);
		check_near(fast, slow, count, dtype);
	}
	params.rotation.rotary_dim = 3;
	CHECK(zi_rotary(&params, NULL) == -EINVAL);
	params.rotation.rotary_dim = 2;
	params.rotation.table_dtype = 7;
	CHECK(zi_rotary(&params, NULL) == -EINVAL);
	free_rotation(&params.rotation);
	free(slow);
	free(fast);
}

static void test_activation(int64_t width, zi_dtype dtype, zi_dtype bias_dtype)
{
	const int64_t num_rows = 3, count = num_rows * width;
	void *x = random_values(count, dtype), *up = random_values(count, dtype);
	void *bias = random_values(width, bias_dtype);
	void *fast = copy_of(x, count, dtype), *slow = copy_of(x, count, dtype);
	zi_activation_params params = {
		.num_rows = num_rows, .num_columns = width, .dtype = dtype, .x = x,
		.x_stride = width, .bias_dtype = bias_dtype, .bias = bias, .up = up,
		.up_stride = width, .out_stride = width,
	};
	int kind;

	for (kind = ZI_RELU; kind <= ZI_GELU_TANH; kind++) {
		params.activation = kind;
		params.out = fast;
		CHECK(zi_activate(&params, NULL) == 0);
		params.out = slow;
		CHECK(zi_activate_reference(&params) == 0);
		check_near(fast, slow, count, dtype);
	}
	params.activation = kind;
	CHECK(zi_activate(&params, NULL) == -EINVAL);
	free(slow);
	free(fast);
	free(bias);
	free(up);
	free(x);
}

static zi_kv_plane plane_of(int64_t head_dim, zi_dtype dtype)
{
	zi_kv_plane plane = {
		.dtype = dtype, .num_blocks = 5, .num_heads = 2, .block_size = 9,
		.head_dim = head_dim,
	};

	plane.data = random_values(5 * 2 * 9 * head_dim, dtype);
	return plane;
}

static const int64_t slots[] = { 44, -1, 0, 9 };

static void test_kv_write(int64_t head_dim, zi_dtype dtype, zi_dtype kv_dtype)
{
	zi_kv_plane fast = plane_of(head_dim, kv_dtype), slow = fast;
	const int64_t count = 5 * 2 * 9 * head_dim;
	void *values = random_values(4 * 2 * head_dim, dtype);
	zi_kv_write_params params = {
		.num_rows = 4, .dtype = dtype, .values = values, .row_stride = 2 * head_dim,
		.head_stride = head_dim, .slots = slots, .plane = fast,
	};

	slow.data = copy_of(fast.data, count, kv_dtype);
	CHECK(zi_kv_write(&params, NULL) == 0);
	params.plane = slow;
	CHECK(zi_kv_write_reference(&params) == 0);
	CHECK(memcmp(fast.data, slow.data, (size_t)count * size_of(kv_dtype)) == 0);
	params.plane.num_blocks = 4;
	CHECK(zi_kv_write(&params, NULL) == -EINVAL);
	free(values);
	free(slow.data);
	free(fast.data);
}

/* Both variants give the bits of a rotation in place and a store. */
static void test_rotated_kv_write(int64_t head_dim, zi_dtype dtype, zi_dtype kv_dtype)
{
	zi_kv_plane once = plane_of(head_dim, kv_dtype), twice = once;
	const int64_t count = 5 * 2 * 9 * head_dim;
	void *values = random_values(4 * 2 * head_dim, dtype);
	void *rotated = copy_of(values, 4 * 2 * head_dim, dtype);
	zi_rotary_params rotary = {
		.num_rows = 4, .num_heads = 2, .dtype = dtype, .x = rotated,
		.row_stride = 2 * head_dim, .head_stride = head_dim,
		.rotation = rotation_of(4, head_dim / 3, ZI_F32),
	};
	zi_kv_write_params params = {
		.num_rows = 4, .dtype = dtype, .row_stride = 2 * head_dim,
		.head_stride = head_dim, .slots = slots,
	};
	int variant, is_reference;

	twice.data = copy_of(once.data, count, kv_dtype);
	for (variant = 0; variant < 4; variant++) {
		is_reference = variant % 2;
		rotary.rotation.is_interleaved = variant / 2;
		memcpy(rotated, values, (size_t)(4 * 2 * head_dim) * size_of(dtype));
		CHECK((is_reference ? zi_rotary_reference(&rotary) : zi_rotary(&rotary, NULL)) == 0);
		params.values = rotated;
		params.plane = twice;
		params.rotation = (zi_rotation){ 0 };
		CHECK(zi_kv_write_reference(&params) == 0);
		params.values = values;
		params.plane = once;
		params.rotation = rotary.rotation;
		CHECK((is_reference ? zi_kv_write_reference(&params)
				    : zi_kv_write(&params, NULL)) == 0);
		CHECK(memcmp(once.data, twice.data, (size_t)count * size_of(kv_dtype)) == 0);
	}
	params.rotation.rotary_dim = 2 * head_dim + 2;
	CHECK(zi_kv_write(&params, NULL) == -EINVAL);
	free_rotation(&rotary.rotation);
	free(rotated);
	free(values);
	free(twice.data);
	free(once.data);
}

static void test_attention(int64_t head_dim, zi_dtype dtype, zi_dtype kv_dtype, int64_t window)
{
	static const zi_sequence_rows sequences[] = { { 0, 1, 43 }, { 1, 20, 0 } };
	static const int64_t tables[] = { 4, 0, 1, 2, 3, 3, 1, 0, 2, 4 };
	const int64_t num_rows = 21, num_heads = 6;
	const int64_t count = num_rows * num_heads * head_dim;
	void *query = random_values(count, dtype);
	void *fast = copy_of(query, count, dtype), *slow = copy_of(query, count, dtype);
	float *bias = random_values(num_heads * 44, ZI_F32);
	zi_attention_params params = {
		.num_rows = num_rows, .num_heads = num_heads, .dtype = dtype, .query = query,
		.query_stride = num_heads * head_dim, .out = fast,
		.out_stride = num_heads * head_dim, .key = plane_of(head_dim, kv_dtype),
		.value = plane_of(head_dim, kv_dtype), .num_sequences = 2,
		.sequences = sequences, .tables = tables, .table_width = 5, .scale = 0.5f,
		.bias = bias, .bias_width = 44, .window = window,
	};

	CHECK(zi_attention(&params, NULL) == 0);
	params.out = slow;
	CHECK(zi_attention_reference(&params) == 0);
	check_near(fast, slow, count, dtype);
	params.bias_width = 43;
	CHECK(zi_attention(&params, NULL) == -EINVAL);
	free(params.value.data);
	free(params.key.data);
	free(bias);
	free(slow);
	free(fast);
	free(query);
}

static void test_half_to_bf16(int64_t count)
{
	void *halves = random_values(count, ZI_F16);
	void *fast = copy_of(halves, count, ZI_F16), *slow = copy_of(halves, count, ZI_F16);

	CHECK(zi_half_to_bf16(fast, fast, count, NULL) == 0);
	CHECK(zi_half_to_bf16_reference(halves, slow, count) == 0);
	CHECK(memcmp(fast, slow, (size_t)count * 2) == 0);
	CHECK(zi_half_to_bf16(fast, fast, -1, NULL) == -EINVAL);
	free(slow);
	free(fast);
	free(halves);
}

/* Enough rows for many chunks give the bits of one thread. */
static void test_threads(void)
{
	const int64_t num_rows = 500, width = 331, count = num_rows * width;
	void *x = random_values(count, ZI_F32), *weight = random_values(width, ZI_F32);
	void *alone = copy_of(x, count, ZI_F32), *shared = copy_of(x, count, ZI_F32);
	zi_norm_params params = {
		.num_rows = num_rows, .num_columns = width, .dtype = ZI_F32, .x = x,
		.x_stride = width, .out = alone, .out_stride = width, .weight_dtype = ZI_F32,
		.weight = weight, .eps = 1e-5f, .is_rms = 1,
	};

	CHECK(zi_norm(&params, NULL) == 0);
	params.out = shared;
	CHECK(zi_norm(&params, zi_team_shared(3)) == 0);
	CHECK(memcmp(alone, shared, (size_t)count * 4) == 0);
	free(shared);
	free(alone);
	free(weight);
	free(x);
}

int main(void)
{
	int width, a, b;

	for (width = 0; width < COUNT(widths); width++) {
		test_half_to_bf16(widths[width]);
		for (a = 0; a < COUNT(activations); a++) {
			test_rotary(widths[width], activations[a]);
			for (b = 0; b < COUNT(weights); b++) {
				test_norm(widths[width], activations[a], weights[b]);
				test_activation(widths[width], activations[a], weights[b]);
			}
			for (b = 0; b < COUNT(activations); b++) {
				test_kv_write(widths[width], activations[a], activations[b]);
				test_rotated_kv_write(widths[width], activations[a], activations[b]);
				test_attention(widths[width], activations[a], activations[b], 0);
				test_attention(widths[width], activations[a], activations[b], 5);
			}
		}
	}
	test_half_to_bf16(0);
	test_threads();
	return 0;
}
