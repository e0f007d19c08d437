"""Compiles products of one row, and of up to 8, for compute capability 9.0, without a GPU, and counts what a program waits for."""

from __future__ import annotations

import compile_only
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource

from enginery_ops_triton.expert_blocks import ExpertSizes, PairBlocks, blocks_for
from enginery_ops_triton.kernels import linear_normed_row, linear_persistent
from enginery_ops_triton.kernels.experts import down_of_pairs, gate_up_of_pairs
from enginery_ops_triton.kernels.launch import next_power_of_2
from enginery_ops_triton.kernels.linear import matvec
from enginery_ops_triton.kernels.linear_few import linear_of_few
from enginery_ops_triton.kernels.linear_normed import normed_matvec
from enginery_ops_triton.matvec import matvec_shape, normed_shape
from enginery_ops_triton.persistent_rows import AHEAD, BLOCK_K, BLOCK_N, NUM_WARPS, PersistentRows
from enginery_ops_triton.small_linear import direct_shape
from enginery_ops_triton.unit_rows import UnitRow

TYPES = {"ids": "*i32", "weights": "*fp32", "x_stride": "i32", "weight_stride": "i32", "num_outputs": "i32"}
TYPES |= dict.fromkeys(("x", "weight", "scale", "bias", "out", "residual", "norm_weight", "summed", "normed"), "*bf16")
PLAIN = dict(KIND="silu", ALPHA=1.0, LIMIT=None, CHAINED=True, ROWS=1, JOINED=1)
PLAIN |= dict.fromkeys(("SCALED", "BIASED", "BIAS", "GATED"), False)
QWEN3_NEXT = ExpertSizes(num_experts=513, columns=2048, inner=512, dtype=torch.bfloat16, weight_dtype=torch.bfloat16)
KIMI_LINEAR = ExpertSizes(num_experts=257, columns=2304, inner=1024, dtype=torch.bfloat16, weight_dtype=torch.bfloat16)


def compiled(kernel: triton.JITFunction, num_warps: int, *, registers: int | None = None, **constants: object) -> CompiledKernel:
    """Tensors begin at multiples of 16 bytes, and strides are multiples of 16 values. Weights with scales are of float8."""
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    signature |= {"weight": "*fp8e4nv", "scale": "*fp32"} if constants.get("SCALED") else {}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in TYPES}
    signature |= {name: of for name, of in (("num_rows", "i32"), ("eps", "fp32")) if name in signature}
    chosen = {name: value for name, value in {**PLAIN, **constants}.items() if signature.get(name) == "constexpr"}
    source = (GluonASTSource if kernel is linear_of_few else ASTSource)(
        fn=kernel, signature=signature, constexprs=chosen, attrs=aligned
    )
    options = dict(num_warps=num_warps, maxnreg=registers, launch_pdl=True)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    return made


def check_few_by_matvec(columns: int) -> None:
    """A router's, of 8 rows."""
    shape = matvec_shape(columns)
    sizes = dict(COLUMNS=columns, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, AHEAD=shape.ahead, ROWS=8)
    made = compiled(matvec, shape.num_warps, **sizes)
    ahead, behind = made.asm["ptx"].split("griddepcontrol.wait")
    assert "L1::evict_first" in ahead
    assert "L1::evict_first" not in behind, "the weight is read once for all rows"
    assert compile_only.stack_bytes(made.asm["cubin"]) == 0, "all of it is in registers"


def check_float8_pairs(sizes: ExpertSizes, top_k: int) -> None:
    """Rows of a warp share what is made of x and scales: with a row each, there are 9 to 12 instructions for a weight."""
    blocks = blocks_for(top_k, top_k, sizes)
    assert isinstance(blocks, PairBlocks)
    common = dict(NUM_EXPERTS=sizes.num_experts, INNER=sizes.inner, COLUMNS=sizes.columns, TOP_K=top_k, JOINED=0, SCALED=True)
    for kernel, block, weights in (
        (gate_up_of_pairs, blocks.gate_up, 2 * sizes.columns),
        (down_of_pairs, blocks.down, top_k * sizes.inner),
    ):
        made = compiled(kernel, block.num_warps, **common, BLOCK_N=block.n, BLOCK_K=block.k, AHEAD=block.ahead)
        assert compile_only.stack_bytes(made.asm["cubin"]) == 0, "all of it is in registers"
        assert made.asm["ptx"].count(";") * 32 * block.num_warps < 8 * block.n * weights


def check_normed(outputs: int, columns: int, *, gated: bool = False) -> None:
    """One program is for the norm, the others are for outputs; each waits once."""
    shape = normed_shape(outputs, columns)
    assert shape is not None
    sizes = dict(COLUMNS=columns, BLOCK=next_power_of_2(columns), BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, AHEAD=shape.ahead)
    made = compiled(normed_matvec, shape.num_warps, GATED=gated, **sizes)
    ahead, *behind = made.asm["ptx"].split("griddepcontrol.wait")
    assert len(behind) == 2
    lanes, taken = 8 * 32 * shape.num_warps, shape.block_k * shape.ahead  # a lane loads 8 values at once
    of_weight, of_norm = shape.block_n * taken // lanes, (shape.block_n if shape.ahead > 1 else 1) * taken // lanes
    assert ahead.count("ld.global.L1::evict_first") == of_weight
    assert ahead.count("ld.global") == of_weight + of_norm, "nothing that others write is read ahead"
    assert "L1::evict_first" not in "".join(behind), "all of the weight is on its way before the row is there"
    assert compile_only.stack_bytes(made.asm["cubin"]) == 0, "all of it is in registers"


def check_direct(outputs: int, columns: int, *, biased: bool) -> None:
    shape = direct_shape(outputs, columns, 8, multiprocessors=132)
    assert shape is not None
    sizes = dict(
        COLUMNS=columns, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, AHEAD=shape.ahead, X_AHEAD=shape.x_ahead, BIAS=biased
    )
    made = compiled(linear_of_few, shape.num_warps, registers=shape.registers, **sizes)
    of_weight, of_x = shape.block_n * shape.block_k // 256, 8 * shape.block_k // 256  # loads of a block, 8 values a lane
    ahead, behind = made.asm["ptx"].split("griddepcontrol.wait")
    early, late = behind.split("mma.sync", 1)
    assert ahead.count("ld.global.L1::evict_first.L2::cache_hint.v4") == of_weight * shape.ahead
    assert early.count("ld.global.v4") == of_x * shape.x_ahead
    steps = -(-columns // (shape.num_warps * shape.block_k))
    assert late.count("ld.global.L1::evict_first.L2::cache_hint.v4") == of_weight * (steps - shape.ahead)
    assert "shared" not in (early + late).rsplit("mma.sync", 1)[0], "weights and x go from memory to the matrix units"
    assert late.count("bar.sync") == 1, "the sums of all warps are exchanged once"
    assert compile_only.stack_bytes(made.asm["cubin"]) == 0, "all of it is in registers"


def check_unit_row(outputs: int, columns: int, *, gated: bool) -> None:
    """By the matrix units; the row alone goes through shared memory."""
    weight, row = torch.zeros(outputs, columns, dtype=torch.bfloat16), torch.zeros(1, columns, dtype=torch.bfloat16)
    linear_normed_row.normed_row.device_caches.clear()
    UnitRow(weight=weight, bias=weight[0], kernels=linear_normed_row, gated=gated)(row, row.clone(), row[0], 1e-5)
    ((cache, *_),) = linear_normed_row.normed_row.device_caches.values()
    (made,) = cache.values()
    ahead, behind = made.asm["ptx"].split("griddepcontrol.wait")
    assert ahead.count("ld.global.L1::evict_first.L2::cache_hint.v4") == 16 * columns // (8 * 32 * made.metadata.num_warps)
    assert "L1::evict_first" not in behind, "all of the weight is on its way before the row is there"
    assert behind.split("st.global")[0].count("bar.sync") == 4
    assert compile_only.stack_bytes(made.asm["cubin"]) == 0, "all of it is in registers"


def check_persistent(columns: int, *, biased: bool) -> None:
    weight = torch.zeros(6144, columns, dtype=torch.bfloat16)
    product = PersistentRows(weight, weight[0] if biased else None, kernels=linear_persistent, programs=132)
    product(torch.zeros(4, columns, dtype=torch.bfloat16))
    ((cache, *_),) = linear_persistent.persistent_linear.device_caches.values()
    *_, made = cache.values()
    ahead, behind = made.asm["ptx"].split("griddepcontrol.wait")
    copies = BLOCK_N * BLOCK_K // 256  # of a block, 8 values a lane
    assert ahead.count("cp.async.cg") == copies * AHEAD, "of W a ring, but for one block, is on its way before x is waited for"
    assert "ld.global" not in ahead, "and none of x"
    early, late = behind.split("mma.sync", 1)
    assert early.count("ld.global.v4") == -(-columns // (NUM_WARPS * BLOCK_K)) * 8 * BLOCK_K // 256
    assert "ld.global.v4" not in late, "x is read once"
    assert compile_only.SHARED_BYTES / 2 < made.metadata.shared < compile_only.SHARED_BYTES - (48 << 10), "one a multiprocessor"
    assert compile_only.stack_bytes(made.asm["cubin"]) == 0, "all of x is in registers"


def main() -> None:
    compile_only.install(reads_code=True)
    for columns in (2048, 2304, 4096):
        shape = matvec_shape(columns)
        sizes = dict(COLUMNS=columns, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, AHEAD=shape.ahead)
        before_sums = compiled(matvec, shape.num_warps, **sizes).asm["ptx"].split("shfl")[0]
        assert "bar.sync" not in before_sums, "x goes from memory to the threads that multiply it"
        check_few_by_matvec(columns)
    check_few_by_matvec(2880)
    for outputs, columns in ((5120, 2880), (12352, 2048), (28672, 4096), (128, 2880), (520, 2048), (256, 2304)):
        check_normed(outputs, columns)
    check_normed(28672, 4096, gated=True)
    for outputs, columns in ((6144, 1024), (12288, 2048)):
        check_unit_row(outputs, columns, gated=True)
        check_unit_row(outputs, columns, gated=False)
    for outputs, columns in ((2048, 4096), (2304, 4096), (4096, 4096), (4096, 14336), (12288, 2048), (21888, 2048)):
        check_direct(outputs, columns, biased=False)
    check_direct(5120, 2880, biased=True)
    for columns in (1024, 2880, 4096, 5376):
        check_persistent(columns, biased=columns != 4096)
    for experts, columns, inner, top_k in ((128, 2048, 768, 8), (8, 4096, 14336, 2), (256, 7168, 2048, 8)):
        check_float8_pairs(
            ExpertSizes(num_experts=experts, columns=columns, inner=inner, dtype=torch.bfloat16, weight_dtype=torch.float8_e4m3fn),
            top_k,
        )
    for sizes, top_k in ((QWEN3_NEXT, 11), (KIMI_LINEAR, 9)):
        blocks = blocks_for(top_k, top_k, sizes)
        assert isinstance(blocks, PairBlocks)
        common = dict(NUM_EXPERTS=sizes.num_experts, INNER=sizes.inner, COLUMNS=sizes.columns, TOP_K=top_k)
        for kernel, block in ((gate_up_of_pairs, blocks.gate_up), (down_of_pairs, blocks.down)):
            ptx = compiled(kernel, block.num_warps, **common, BLOCK_N=block.n, BLOCK_K=block.k, AHEAD=block.ahead).asm["ptx"]
            assert "bar.sync" not in ptx.split("shfl")[0]
        ahead = ptx.split("griddepcontrol.wait")[0]
        assert ahead.count("ld.global.cg") == 2, "all ids are read at once, and so are all weights"
        assert ahead.count("ld.global.L1::evict_first") == block.n * block.k * block.ahead // (8 * 32 * block.num_warps)


if __name__ == "__main__":
    main()
