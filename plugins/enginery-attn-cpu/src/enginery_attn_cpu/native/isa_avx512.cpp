#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
#define ISA avx512
#define WIDTH 16
#include "body.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
