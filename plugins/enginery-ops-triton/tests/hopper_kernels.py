"""Compiles kernels for compute capability 9.0, for which no GPU is needed: of experts in MXFP4 with the blocks of gpt-oss-120b, and
of routers whose logits are in bfloat16."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from enginery_ops_triton.expert_blocks import ExpertSizes, Float4Blocks, ProductBlock, float4_blocks_for
from enginery_ops_triton.kernels import experts_float4 as kernels
from enginery_ops_triton.kernels import routing

TYPES = {"x": "*bf16", "words": "*i16", "exponents": "*i32", "bias": "*bf16", "out": "*bf16"}
TYPES |= {"order": "*i32", "tiles": "*i32", "x_stride": "i32", "partial": "*fp32", "arrived": "*i32"}
SIZES = ExpertSizes(num_experts=128, columns=2880, inner=2880, dtype=torch.bfloat16, weight_dtype=torch.uint8)


def compiled(kernel: triton.JITFunction, blocks: Float4Blocks, block: ProductBlock) -> str:
    """Its PTX."""
    constants = dict(INNER=SIZES.inner, COLUMNS=SIZES.columns, TOP_K=4, BLOCK_M=blocks.m, BLOCK_N=block.n, GROUP=block.group)
    constants |= dict(STAGES=block.stages, SPLIT=block.split, NARROW=True, ALONE=blocks.alone, BIASED=True, CHAINED=True)
    constants |= dict(KIND="clamped_swiglu", ALPHA=1.702, LIMIT=7.0)
    return compiled_with(kernel, constants, TYPES, num_warps=block.num_warps)


def compiled_with(kernel: triton.JITFunction, constants: dict[str, object], types: dict[str, str], *, num_warps: int) -> str:
    """Its PTX. Tensors begin at multiples of 16 bytes."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in types}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=num_warps, launch_pdl=True))
    assert made.asm["cubin"]
    assert made.metadata.shared <= 227 * 1024
    return made.asm["ptx"]


def compile_routers() -> None:
    types = {"logits": "*bf16", "bias": "*fp32", "ids": "*i32", "weights": "*fp32", "row_stride": "i32", "scale": "fp32"}
    sizes = dict(NUM_EXPERTS=64, TOP_K=3, NUM_COLUMNS=4, BLOCK_TOP=4, RENORMALISE=True, BIAS=True, CHAINED=True)
    groups = dict(NUM_GROUPS=4, TOP_GROUPS=2, TOP2=True, BLOCK_GROUPS=4, BLOCK_MEMBERS=16)
    for sigmoid in (False, True):
        compiled_with(routing.route, {**sizes, **groups, "SIGMOID": sigmoid}, types, num_warps=1)


def main() -> None:
    compile_routers()
    for num_tokens in (1, 32, 8192):
        blocks = float4_blocks_for(4 * num_tokens, 4, SIZES)
        for kernel, block in ((kernels.gate_up_of_float4, blocks.gate_up), (kernels.down_of_float4, blocks.down)):
            text = compiled(kernel, blocks, block)
            assert "0x81C081C0" in text, "values are taken from words two at a time"
            assert "mma" in text


if __name__ == "__main__":
    main()
