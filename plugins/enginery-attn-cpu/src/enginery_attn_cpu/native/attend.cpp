// Cuts a call into units and shares them out among threads. See attention.h.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "threads.h"

namespace {

const int64_t kThreadWork = 400000;  // products a thread has to have; waking one costs 2 to 5 us, a core makes 10 to 50 in a nanosecond

int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

int64_t chunk_keys(int64_t kv_len) { return kTileKeys * std::max<int64_t>(1, ceil_div(kv_len, kTileKeys * kMaxChunks)); }

struct Call {
    const Layer &layer;
    const Batch &batch;
    const Kernels &kernels;
    const Request *requests;
    std::atomic<int32_t> *missing;  // of each group of units with the same rows: how many are not computed yet
    int64_t units;
    std::atomic<int64_t> next;
};

void compute(const Call &call, const Request &request, int64_t index) {
    const int64_t blocks = request.row_blocks, per_chunk = blocks * call.layer.kv_heads, inside = index % per_chunk;
    const int64_t first = inside % blocks * kUnitRows, rows = request.q_len * (call.layer.heads / call.layer.kv_heads);
    const Unit unit{&call.layer, &call.batch, &request, inside / blocks, first, std::min(kUnitRows, rows - first), index / per_chunk};
    call.kernels.unit(unit);
    if (request.chunks > 1 && call.missing[request.first_group + inside].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        call.kernels.combine(unit);
    }
}

void work(void *data) {
    Call &call = *static_cast<Call *>(data);
    const Request *request = call.requests;
    for (int64_t unit; (unit = call.next.fetch_add(1, std::memory_order_relaxed)) < call.units;) {
        while (unit >= request[1].first_unit) ++request;
        compute(call, *request, unit - request->first_unit);
    }
}

}  // namespace

// Rows of the requests that are cut in chunks, once for each chunk.
int64_t count_partials(int64_t requests, const int32_t *q_lens, const int32_t *kv_lens) {
    int64_t count = 0;
    for (int64_t r = 0; r < requests; ++r) {
        const int64_t chunks = ceil_div(kv_lens[r], chunk_keys(kv_lens[r]));
        if (chunks > 1) count += chunks * q_lens[r];
    }
    return count;
}

void attend(const Layer &layer, const Batch &batch, const Kernels &kernels) {
    const std::unique_ptr<Request[]> requests(new Request[batch.requests + 1]);
    int64_t row = 0, units = 0, groups = 0, partials = 0, products = 0;
    for (int64_t r = 0; r < batch.requests; ++r) {
        Request &request = requests[r];
        const int64_t q_len = batch.q_lens[r], kv_len = batch.kv_lens[r], keys = chunk_keys(kv_len);
        const int64_t reached = layer.window > 0 ? std::max<int64_t>(0, kv_len - q_len - layer.window + 1) : 0;
        const int64_t first = std::min(reached, std::max<int64_t>(0, kv_len - 1)) / keys;
        const int64_t rows = q_len * (layer.heads / layer.kv_heads);
        request = {row, q_len, kv_len, keys, first, std::max<int64_t>(1, ceil_div(kv_len, keys) - first), ceil_div(rows, kUnitRows),
                   units, groups, partials, batch.page_table + r * batch.table_stride};
        const int64_t of_chunk = layer.kv_heads * request.row_blocks;
        row += q_len;
        units += request.chunks * of_chunk;
        if (request.chunks > 1) {
            groups += of_chunk;
            partials += request.chunks * q_len;
        }
        products += (kv_len - reached) * rows * layer.kv_heads * (layer.dim + layer.value_dim);
    }
    requests[batch.requests].first_unit = units;
    const std::unique_ptr<std::atomic<int32_t>[]> missing(new std::atomic<int32_t>[groups]);
    for (int64_t r = 0; r < batch.requests; ++r) {
        if (requests[r].chunks == 1) continue;
        const int64_t first = requests[r].first_group, count = layer.kv_heads * requests[r].row_blocks;
        for (int64_t g = first; g < first + count; ++g) missing[g].store(static_cast<int32_t>(requests[r].chunks));
    }
    Call call{layer, batch, kernels, requests.get(), missing.get(), units, {0}};
    threads::run(std::min({batch.threads, units, products / kThreadWork}), work, &call);
}
