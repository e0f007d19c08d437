// Attention over the pages of the KV pool: what a call is about, and how its work is cut. Requests of few rows, which decode or verify:
//
//   request   [ chunk 0 | chunk 1 | chunk 2 | .. ]     128 keys each
//   unit      (chunk, KV head, up to 16 rows of its queries)
//   run       units of one chunk that one thread computes: all of them, where there are chunks enough
//
// Cuts are at the same keys whatever else there is, and the parts of a row are added up in their order: a row is the same to the last
// bit whatever is beside it, whichever thread computes it, and however many there are. Prompts are cut into blocks of rows, each of which
// goes over all of its keys: `prompt.inc`.
#pragma once

#include <stdint.h>

enum Type : int64_t { kFloat32 = 0, kBFloat16 = 1 };

static const int64_t kChunkKeys = 128;
static const int64_t kUnitRows = 16;  // query rows that share what is read of a KV head
static const int64_t kMaxDim = 1024;  // of keys and values: a unit's rows are on the stack
static const int64_t kFewTokens = 16;  // of a request: more are a prompt's
static const int64_t kBlockRows = 96;  // a multiple of the rows that `prompt.inc` sums up at once, 4 or 6

// Keys [pages, page_size, kv_heads, dim] and values [.., value_dim], contiguous. window 0: none. softcap 0: none. sinks: [heads], or
// null.
struct Layer {
    const void *keys, *values;
    int64_t kv_type, pages, page_size, heads, kv_heads, dim, value_dim, window;
    float softcap, scale;
    const float *sinks;
};

// q [rows, heads, dim] and out [rows, heads, value_dim] are of one type; strides of rows and heads are in elements. A request's rows
// follow those of the one before. partials: of requests of several chunks; `attend` takes the memory. trees: of the first num_trees
// requests, N rows each, which of their last N keys each row sees, [num_trees, N, N] of 0 and 1. A row sees no key behind its own, and
// with N up to kChunkKeys - 1 it sees one of every chunk before that.
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
    const uint8_t *trees;
    int64_t num_trees;
};

// One request's work for one layer. first_chunk: the first that a window reaches; chunks: from there on. A prompt has blocks of rows,
// first_block the first of them, and no units. tree: [q_len, q_len], see `Batch`, or null.
struct Request {
    int64_t row, q_len, kv_len, first_chunk, chunks, row_blocks, first_unit, first_group, first_partial, first_block;
    const int32_t *pages;
    const uint8_t *tree;
};

// Rows [first_row, first_row + rows) of a request's queries of one KV head, where row f is token f / group and head f % group, over the
// keys of one chunk; or a block of a prompt's rows over all keys, with `block_bytes` of memory that nobody else has.
struct Unit {
    const Layer *layer;
    const Batch *batch;
    const Request *request;
    int64_t kv_head, first_row, rows, chunk;
    char *memory;
};

// unit: writes the rows to `out`, or what is known of them to the partials if there are more chunks. combine: adds these up. block: writes
// the rows to `out`.
struct Kernels {
    const char *name;
    void (*unit)(const Unit &);
    void (*combine)(const Unit &);
    void (*block)(const Unit &);
};

// Numbers of whole cache lines of floats.
static inline int64_t whole_lines(int64_t numbers) { return (numbers + 15) / 16 * 16; }

// Queries, keys, values, scores, sums and weights, each of 4 bytes.
static inline int64_t block_bytes(const Layer &layer) {
    const int64_t wide = whole_lines(layer.value_dim);
    return 4 * (kBlockRows * (layer.dim + 2 * kChunkKeys + wide) + kChunkKeys * (layer.dim + wide));
}

extern const Kernels kernels_generic, kernels_avx2, kernels_avx512, kernels_avx512_bf16;

// False, with nothing written, where the page table names a page that the layer has not got.
bool attend(const Layer &layer, Batch batch, const Kernels &kernels);
