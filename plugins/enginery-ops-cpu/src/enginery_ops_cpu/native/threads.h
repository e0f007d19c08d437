// Threads of the OpenMP runtime that torch has loaded, found by name when they are first needed. Nothing is linked.
//
// A runtime of our own would be a second pool beside torch's: twice as many threads as cores, each spinning for the others. torch
// loads its own with RTLD_GLOBAL, so its functions are found by name; Intel's and LLVM's have the same entry points. Without one,
// everything runs in the thread that calls.
#pragma once

#include <dlfcn.h>
#include <stdint.h>

namespace threads {

typedef void (*Part)(void *data, int index, int count);

struct Runtime {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel
    int (*max_threads)(void);
    int (*thread_num)(void);
    int (*num_threads)(void);
    int (*in_parallel)(void);
    bool found;
};

template <class Function>
static bool look_up(Function &function, const char *name) {
    function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    return function != nullptr;
}

static const Runtime &runtime() {
    static const Runtime found = [] {
        Runtime r = {};
        r.found = look_up(r.parallel, "GOMP_parallel") & look_up(r.max_threads, "omp_get_max_threads") &
                  look_up(r.thread_num, "omp_get_thread_num") & look_up(r.num_threads, "omp_get_num_threads") &
                  look_up(r.in_parallel, "omp_in_parallel");
        return r;
    }();
    return found;
}

// How many threads may be used here: as many as torch would, one inside of a parallel region.
static inline int most() {
    const Runtime &r = runtime();
    return r.found && !r.in_parallel() ? r.max_threads() : 1;
}

// Call part(data, index, count) once for each index below count, on as many threads.
static inline void run(int count, Part part, void *data) {
    if (count <= 1) {
        part(data, 0, 1);
        return;
    }
    struct Region {
        Part part;
        void *data;
    } region = {part, data};
    runtime().parallel(
        [](void *given) {
            const Region *of = static_cast<const Region *>(given);
            of->part(of->data, runtime().thread_num(), runtime().num_threads());
        },
        &region, static_cast<unsigned>(count), 0);
}

// As `run` over [0, total) in pieces of `piece`, which threads take as they become free: one that the system holds up delays only
// the piece that it is in. work(data, begin, end).
struct Pieces {
    void (*work)(void *data, int64_t begin, int64_t end);
    void *data;
    int64_t total, piece, next;
};

static inline void run_pieces(int count, int64_t total, int64_t piece, void (*work)(void *, int64_t, int64_t), void *data) {
    if (count <= 1 || total <= piece) {
        if (total > 0) work(data, 0, total);
        return;
    }
    Pieces pieces = {work, data, total, piece, 0};
    run(
        count,
        [](void *given, int, int) {
            Pieces *of = static_cast<Pieces *>(given);
            for (;;) {
                const int64_t begin = __atomic_fetch_add(&of->next, of->piece, __ATOMIC_RELAXED);
                if (begin >= of->total) return;
                of->work(of->data, begin, begin + of->piece < of->total ? begin + of->piece : of->total);
            }
        },
        &pieces);
}

}  // namespace threads
