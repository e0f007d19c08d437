"""Compiles the kernels of experts in MXFP4 for compute capability 9.0, with the blocks of gpt-oss-120b: no GPU is needed for it."""

from __future__ import annotations

from dataclasses import replace

import compile_only
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from enginery_ops_triton.expert_blocks import ExpertSizes, Float4Blocks, ProductBlock, float4_blocks_for
from enginery_ops_triton.kernels import experts_float4 as kernels
from enginery_ops_triton.kernels import experts_float4_few as few

TYPES = {"x": "*bf16", "words": "*i16", "exponents": "*i32", "bias": "*bf16", "out": "*bf16"}
TYPES |= {"order": "*i32", "tiles": "*i32", "x_stride": "i32", "partial": "*fp32", "arrived": "*i32"}
SIZES = ExpertSizes(num_experts=128, columns=2880, inner=2880, dtype=torch.bfloat16, weight_dtype=torch.uint8)
DIRECT = replace(SIZES, has_direct=True)


def compiled(kernel: triton.JITFunction, blocks: Float4Blocks, block: ProductBlock) -> triton.compiler.CompiledKernel:
    """Tensors begin at multiples of 16 bytes."""
    constants = dict(INNER=SIZES.inner, COLUMNS=SIZES.columns, TOP_K=4, BLOCK_M=blocks.m, BLOCK_N=block.n, GROUP=block.group)
    constants |= dict(FEW=blocks.few)
    constants |= dict(STAGES=block.stages, SPLIT=block.split, NARROW=True, ALONE=blocks.alone, BIASED=True, CHAINED=True)
    constants |= dict(KIND="clamped_swiglu", ALPHA=1.702, LIMIT=7.0)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in TYPES}
    source = (GluonASTSource if blocks.direct else ASTSource)(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=block.num_warps, maxnreg=block.registers, launch_pdl=True)
    )
    assert made.asm["cubin"]
    assert made.metadata.shared <= 227 * 1024
    return made


def main() -> None:
    compile_only.install(reads_code=True)
    # What 32 tokens run is in the kernels of more: a tile of fewer rows beside the one of many.
    for sizes, num_tokens in ((SIZES, 1), (SIZES, 8192), (DIRECT, 1), (DIRECT, 256)):
        blocks = float4_blocks_for(4 * num_tokens, 4, sizes)
        assert blocks.direct == sizes.has_direct
        of = (few.gate_up_of_few, few.down_of_few) if blocks.direct else (kernels.gate_up_of_float4, kernels.down_of_float4)
        for kernel, block in zip(of, (blocks.gate_up, blocks.down), strict=True):
            made = compiled(kernel, blocks, block)
            assert "0x81C081C0" in made.asm["ptx"], "values are taken from words two at a time"
            assert "mma" in made.asm["ptx"]
            if blocks.direct:
                ring, sums = block.stages * blocks.m * 128 * 2, blocks.m * block.n * 4
                assert made.metadata.shared <= max(ring, sums) + 1024, "only x is in shared memory, and sums at the end"
                if blocks.alone:
                    assert "ld.global" not in made.asm["ptx"].rsplit("mma", 1)[1], "biases are there before the last product"
                ahead = made.asm["ptx"].split("griddepcontrol.wait")[0]
                early = blocks.alone and kernel is few.down_of_few
                assert ("ld.global.cg.v4" in ahead) == early, "the first groups are on their way before x is, of known experts"


if __name__ == "__main__":
    main()
