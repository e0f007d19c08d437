// Haswell, Zen and later.
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define ISA avx2
#define WIDTH 8
#define HAS_F16 1
#define HAS_DOT_BF16 0
#include "body.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
