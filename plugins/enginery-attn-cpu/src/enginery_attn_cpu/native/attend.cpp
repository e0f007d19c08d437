// Cuts a call into runs of units and shares them out among threads. See attention.h.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "threads.h"

namespace {

const int64_t kThreadWork = 400000;  // products that a thread has to have: waking one costs 2 to 5 us, a core makes 10 to 50 in a nanosecond
const int64_t kLine = 64;            // bytes

int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

bool is_prompt(int64_t q_len) { return q_len > kFewTokens; }

int64_t chunks_of(int64_t kv_len) { return std::max<int64_t>(1, ceil_div(kv_len, kChunkKeys)); }

struct Call {
    const Layer &layer;
    const Batch &batch;
    const Kernels &kernels;
    const Request *requests;
    std::atomic<int32_t> *missing;  // of each group of units with the same rows: how many are not computed yet
    int64_t units, run, blocks;
    char *memory;  // of each thread `block_bytes`
    std::atomic<int64_t> next, next_block, next_memory;
};

// Reads a number of every line: the processor then fetches ahead by itself, which a prefetch instruction does not start.
void touch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kLine) static_cast<void>(*static_cast<const volatile char *>(from + at));
}

// Brings the keys and values of some heads and one chunk into the cache in the order in which they lie in memory: units read them head
// by head, which is half as fast from memory.
void touch_chunk(const Layer &layer, const Request &request, int64_t chunk, int64_t first_head, int64_t heads) {
    const int64_t number = layer.kv_type == kFloat32 ? 4 : 2, size = layer.page_size;
    const int64_t key = layer.dim * number, value = layer.value_dim * number, end = std::min((chunk + 1) * kChunkKeys, request.kv_len);
    const char *keys = static_cast<const char *>(layer.keys), *values = static_cast<const char *>(layer.values);
    for (int64_t j = chunk * kChunkKeys, stop; j < end; j = stop) {
        stop = heads == layer.kv_heads ? std::min(end, (j / size + 1) * size) : j + 1;
        const int64_t slot = (request.pages[j / size] * size + j % size) * layer.kv_heads + first_head;
        touch(keys + slot * key, (stop - j) * heads * key);
        touch(values + slot * value, (stop - j) * heads * value);
    }
}

void compute(const Call &call, const Request &request, int64_t index) {
    const int64_t blocks = request.row_blocks, per_chunk = blocks * call.layer.kv_heads, inside = index % per_chunk;
    const int64_t first = inside % blocks * kUnitRows, rows = request.q_len * (call.layer.heads / call.layer.kv_heads);
    const Unit unit{&call.layer, &call.batch, &request, inside / blocks, first, std::min(kUnitRows, rows - first), index / per_chunk,
                    nullptr};
    call.kernels.unit(unit);
    if (request.chunks > 1 && call.missing[request.first_group + inside].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        call.kernels.combine(unit);
    }
}

// The blocks with most keys first: a thread that is done early then waits for a short one.
void compute_blocks(Call &call) {
    char *memory = call.memory + call.next_memory.fetch_add(1, std::memory_order_relaxed) * block_bytes(call.layer);
    for (int64_t taken; (taken = call.next_block.fetch_add(1, std::memory_order_relaxed)) < call.blocks;) {
        const int64_t block = call.blocks - 1 - taken;
        const Request *request = call.requests;
        while (block >= request[1].first_block) ++request;
        const int64_t rows = request->q_len * (call.layer.heads / call.layer.kv_heads), of_head = ceil_div(rows, kBlockRows);
        const int64_t index = block - request->first_block, first = index % of_head * kBlockRows;
        call.kernels.block({&call.layer, &call.batch, request, index / of_head, first, std::min(kBlockRows, rows - first), 0, memory});
    }
}

void work(void *data) {
    Call &call = *static_cast<Call *>(data);
    if (call.blocks > 0) compute_blocks(call);
    const Request *request = call.requests;
    for (int64_t unit; (unit = call.next.fetch_add(call.run, std::memory_order_relaxed)) < call.units;) {
        for (const int64_t end = std::min(unit + call.run, call.units); unit < end;) {
            while (unit >= request[1].first_unit) ++request;
            const int64_t blocks = request->row_blocks, per_chunk = blocks * call.layer.kv_heads, index = unit - request->first_unit;
            const int64_t chunk = index / per_chunk, stop = std::min(index + end - unit, (chunk + 1) * per_chunk);
            const int64_t head = index % per_chunk / blocks, last = (stop - 1) % per_chunk / blocks;
            touch_chunk(call.layer, *request, request->first_chunk + chunk, head, last + 1 - head);
            unit += stop - index;
            for (int64_t i = index; i < stop; ++i) compute(call, *request, i);
        }
    }
}

// Room for so many floats, of this thread: it only grows, and is freed when the thread ends.
float *room(int64_t floats) {
    static thread_local std::unique_ptr<float[]> memory;
    static thread_local int64_t size = 0;
    if (size < floats) {
        size = 0;
        memory.reset();
        memory.reset(new float[floats]);
        size = floats;
    }
    return memory.get();
}

}  // namespace

bool attend(const Layer &layer, Batch batch, const Kernels &kernels) {
    const std::unique_ptr<Request[]> requests(new Request[batch.requests + 1]);
    bool known = true;
    const uint8_t *tree = batch.trees;
    int64_t row = 0, units = 0, groups = 0, partials = 0, products = 0, most = 1, all_blocks = 0;
    for (int64_t r = 0; r < batch.requests; ++r) {
        const int64_t q_len = batch.q_lens[r], kv_len = batch.kv_lens[r], rows = q_len * (layer.heads / layer.kv_heads);
        const int64_t reached = layer.window > 0 ? std::max<int64_t>(0, kv_len - q_len - layer.window + 1) : 0;
        const int64_t first = std::min(reached / kChunkKeys, chunks_of(kv_len) - 1), blocks = ceil_div(rows, kUnitRows);
        const int64_t chunks = chunks_of(kv_len) - first, of_chunk = layer.kv_heads * blocks;
        const int32_t *pages = batch.page_table + r * batch.table_stride;
        requests[r] = {row, q_len, kv_len, first, chunks, blocks, units, groups, partials, all_blocks, pages,
                       r < batch.num_trees ? tree : nullptr};
        tree += r < batch.num_trees ? q_len * q_len : 0;
        for (int64_t page = first * kChunkKeys / layer.page_size; q_len > 0 && page * layer.page_size < kv_len; ++page) {
            known &= requests[r].pages[page] >= 0 && requests[r].pages[page] < layer.pages;
        }
        row += q_len;
        products += (kv_len - reached) * rows * layer.kv_heads * (layer.dim + layer.value_dim);
        if (is_prompt(q_len)) {
            all_blocks += layer.kv_heads * ceil_div(rows, kBlockRows);
            continue;
        }
        units += chunks * of_chunk;
        if (chunks > 1) {
            groups += of_chunk;
            partials += chunks * q_len;
        }
        most = std::max(most, of_chunk);
    }
    if (!known) return false;
    batch.partials = room(partials * layer.heads * (layer.value_dim + 2));
    requests[batch.requests].first_unit = units;
    requests[batch.requests].first_block = all_blocks;
    const std::unique_ptr<std::atomic<int32_t>[]> missing(new std::atomic<int32_t>[groups]);
    for (int64_t r = 0; r < batch.requests; ++r) {
        if (requests[r].chunks == 1 || is_prompt(requests[r].q_len)) continue;
        const int64_t first = requests[r].first_group, count = layer.kv_heads * requests[r].row_blocks;
        for (int64_t g = first; g < first + count; ++g) missing[g].store(static_cast<int32_t>(requests[r].chunks));
    }
    const int64_t threads = std::max<int64_t>(1, std::min({batch.threads, units + all_blocks, products / kThreadWork}));
    const int64_t run = threads == 1 ? most : std::max<int64_t>(1, std::min(most, units / (threads * 4)));
    const std::unique_ptr<char[]> memory(new char[all_blocks > 0 ? threads * block_bytes(layer) : 0]);
    Call call{layer, batch, kernels, requests.get(), missing.get(), units, run, all_blocks, memory.get(), {0}, {0}, {0}};
    threads::run(threads, work, &call);
    return true;
}
