// What every CPU has: SSE2 on x86, NEON on ARM.
#include <stdint.h>

#define ISA generic
#define WIDTH 4
#define HAS_F16 0
#define HAS_DOT_BF16 0
#include "body.inc"
