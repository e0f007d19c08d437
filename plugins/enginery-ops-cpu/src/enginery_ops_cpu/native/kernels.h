// What each instruction set has: the same functions. Work is on a range of rows or outputs, so that threads can share it.
//
// Arrays have adjacent numbers in their last dimension; strides count numbers, not bytes. M rows, N outputs, K columns, C channels.
#pragma once

#include <stdint.h>

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, NUM_DTYPES = 3 };

struct Pack {  // x [M, K] in the order in which products read it
    const void *x;
    void *out;
    int64_t M, K, x_stride;
};

struct Linear {  // out [M, N] = x [M, K] w [N, K]^T + bias [N]
    const void *packed, *w, *bias;
    void *out;
    int64_t M, N, K;
};

struct Norm {  // out [M, C]; residual: x is added to it first, and the sum is normed
    const void *x;
    void *residual;
    const void *weight;
    void *out;
    int64_t C, x_stride, residual_stride, num_weights;  // num_weights: row r has weight r % num_weights
    float eps;
};

struct Rotate {  // heads [T, H, D] in place; the first `rotated` are normed and rotated
    void *heads;
    const void *weight;  // [rotated, D] or null
    const void *cos_sin;  // [T, R]
    void *keys, *values;  // [S, kv, D] or null: what is behind the queries goes there
    const int64_t *slots;  // [T]
    int64_t rotated, kv, D, R, token_stride, head_stride, weight_stride, angle_stride, slot_stride, slot_head_stride;
    float eps;
};

struct Gate {  // out [M, C] = silu(x[:, :C]) * x[:, C:]
    const void *x;
    void *out;
    int64_t C, x_stride;
};

struct Greedy {  // ids [M]: the first largest of each row of logits [M, N]; a row with NaN gives its first NaN
    const void *logits;
    int64_t *ids;
    int64_t N, stride;
};

struct Kernels {
    const char *name;
    int64_t tile_rows;
    int64_t (*packed_bytes[NUM_DTYPES])(int64_t M, int64_t K);
    void (*pack[NUM_DTYPES])(const Pack &, int64_t begin, int64_t end);  // rows, in multiples of tile_rows
    void (*linear[NUM_DTYPES])(const Linear &, int64_t begin, int64_t end);  // outputs
    void (*norm[NUM_DTYPES])(const Norm &, int64_t begin, int64_t end);  // rows
    void (*rotate[NUM_DTYPES][NUM_DTYPES])(const Rotate &, int64_t begin, int64_t end);  // tokens; by dtype of keys and values too
    void (*gate[NUM_DTYPES])(const Gate &, int64_t begin, int64_t end);  // rows
    void (*greedy[NUM_DTYPES])(const Greedy &, int64_t begin, int64_t end);  // rows
};
