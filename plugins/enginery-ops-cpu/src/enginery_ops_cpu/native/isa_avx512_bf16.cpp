// Zen 4, Cooper Lake, Sapphire Rapids and later: products of bfloat16 pairs.
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16")
#endif
#define ISA avx512_bf16
#define WIDTH 16
#define HAS_F16 1
#define HAS_DOT_BF16 1
#include "body.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
