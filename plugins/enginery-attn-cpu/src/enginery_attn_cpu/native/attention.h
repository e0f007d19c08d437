// Attention of decoding rows over the pages of the KV pool: what a call is about, and how its work is cut.
//
//   request   [ chunk 0 | chunk 1 | chunk 2 | .. ]     128 keys each
//   unit      (chunk, KV head, up to 16 rows of its queries)
//   run       units of one chunk that one thread computes: all of them, where there are chunks enough
//
// Cuts are at the same keys whatever else there is, and the parts of a row are added up in their order: a row is the same to the last
// bit whatever is beside it, whichever thread computes it, and however many there are.
#pragma once

#include <stdint.h>

enum Type : int64_t { kFloat32 = 0, kBFloat16 = 1 };

static const int64_t kChunkKeys = 128;
static const int64_t kUnitRows = 16;  // query rows that share what is read of a KV head
static const int64_t kMaxDim = 1024;  // of keys and values: a unit's rows are on the stack

// Keys [pages, page_size, kv_heads, dim] and values [.., value_dim], contiguous. window 0: none. softcap 0: none. sinks: [heads], or
// null.
struct Layer {
    const void *keys, *values;
    int64_t kv_type, pages, page_size, heads, kv_heads, dim, value_dim, window;
    float softcap, scale;
    const float *sinks;
};

// q [rows, heads, dim] and out [rows, heads, value_dim] are of one type; strides of rows and heads are in elements. A request's rows
// follow those of the one before. partials: `count_partials` times heads times (value_dim + 2) floats.
struct Batch {
    int64_t requests;
    const int32_t *q_lens, *kv_lens, *page_table;
    int64_t table_stride;
    float *partials;
    int64_t threads, type;
    const void *q;
    int64_t q_row, q_head;
    void *out;
    int64_t out_row, out_head;
};

// One request's work for one layer. first_chunk: the first that a window reaches; chunks: from there on.
struct Request {
    int64_t row, q_len, kv_len, first_chunk, chunks, row_blocks, first_unit, first_group, first_partial;
    const int32_t *pages;
};

// Rows [first_row, first_row + rows) of a request's queries of one KV head, where row f is token f / group and head f % group, over the
// keys of one chunk.
struct Unit {
    const Layer *layer;
    const Batch *batch;
    const Request *request;
    int64_t kv_head, first_row, rows, chunk;
};

// unit: writes the rows to `out`, or what is known of them to the partials if there are more chunks. combine: adds these up.
struct Kernels {
    const char *name;
    void (*unit)(const Unit &);
    void (*combine)(const Unit &);
};

extern const Kernels kernels_generic, kernels_avx2, kernels_avx512, kernels_avx512_bf16;

int64_t count_partials(int64_t requests, const int32_t *q_lens, const int32_t *kv_lens);

// False, with nothing written, where the page table names a page that the layer has not got.
bool attend(const Layer &layer, const Batch &batch, const Kernels &kernels);
