// Four floats at a time, which every compiler has instructions for: SSE2, NEON.
#include <stdint.h>

#define ISA generic
#define WIDTH 4
#include "body.inc"
