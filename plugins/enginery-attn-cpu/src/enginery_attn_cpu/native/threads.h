// The OpenMP threads that torch has started: found in the process, nothing is linked, so there is never a second pool.
#pragma once

#include <dlfcn.h>

namespace threads {

struct OpenMP {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*in_parallel)();

    OpenMP()
        : parallel(reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"))),
          in_parallel(reinterpret_cast<decltype(in_parallel)>(dlsym(RTLD_DEFAULT, "omp_in_parallel"))) {}
};

// Looked up when it is first asked for: torch is loaded by then. Without it there is one thread.
inline const OpenMP &openmp() {
    static const OpenMP found;
    return found;
}

inline bool available() { return openmp().parallel != nullptr && openmp().in_parallel != nullptr; }

// Calls work(data) on `count` threads; on this one alone within a parallel region.
inline void run(int64_t count, void (*work)(void *), void *data) {
    if (count > 1 && available() && !openmp().in_parallel()) {
        openmp().parallel(work, data, static_cast<unsigned>(count), 0);
    } else {
        work(data);
    }
}

}  // namespace threads
