"""Compiles the kernel of routers for compute capability 9.0, without a GPU: the interpreter takes what the compiler does not."""

from __future__ import annotations

import compile_only
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from enginery_ops_triton.kernels.routing import route

TYPES = {"bias": "*fp32", "ids": "*i32", "weights": "*fp32", "row_stride": "i32", "scale": "fp32"}
SIZES = dict(NUM_EXPERTS=64, TOP_K=3, NUM_COLUMNS=4, BLOCK_TOP=4, CHAINED=True)
ALL = dict(NUM_GROUPS=1, TOP_GROUPS=1, BLOCK_GROUPS=1, BLOCK_MEMBERS=64)
GROUPS = dict(NUM_GROUPS=4, TOP_GROUPS=2, BLOCK_GROUPS=4, BLOCK_MEMBERS=16)
KINDS = (
    {**ALL, "TOP2": False, "SIGMOID": False, "RENORMALISE": True, "BIAS": False, "GATED": True},  # Qwen3-Next
    {**ALL, "TOP2": True, "SIGMOID": True, "RENORMALISE": True, "BIAS": True, "GATED": False},  # GLM-4.5
    {**GROUPS, "TOP2": False, "SIGMOID": False, "RENORMALISE": False, "BIAS": False, "GATED": False},  # DeepSeek-V2
    {**GROUPS, "TOP2": True, "SIGMOID": True, "RENORMALISE": True, "BIAS": True, "GATED": False},  # DeepSeek-V3
)


def main() -> None:
    compile_only.install()
    for kind in KINDS:
        for logits in ("*bf16", "*fp32") if kind["GATED"] else ("*bf16",):  # they are float32 from then on
            packed = logits == "*bf16" and not kind["BIAS"] and kind["NUM_GROUPS"] == 1
            types, constants = {"logits": logits, **TYPES}, {**SIZES, **kind, "PACKED": packed}
            signature = {name: types.get(name, "constexpr") for name in route.arg_names}
            source = ASTSource(fn=route, signature=signature, constexprs=constants)
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=1, launch_pdl=True))
            assert made.asm["cubin"]


if __name__ == "__main__":
    main()
