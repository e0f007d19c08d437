"""Mixture-of-experts layers with weights in MXFP4, which stay packed in memory.

T tokens, K experts of each, E experts, C columns, I an expert's inner size.
"""

from __future__ import annotations

from typing import Final

import torch

from enginery.api import Activation, ExpertBiases, Routed, StoredWeight
from enginery_ops_triton.expert_blocks import ExpertSizes, Float4Blocks, ProductBlock, float4_blocks_for
from enginery_ops_triton.expert_pairs import SortedPairs, add_up, sort_by_expert
from enginery_ops_triton.float4_groups import GROUP, Float4Groups
from enginery_ops_triton.gluon_kernels import gluon_kernels
from enginery_ops_triton.kernels import experts_float4 as kernels
from enginery_ops_triton.kernels.precision import INTERPRETED

MOST_SPLIT_PROGRAMS: Final = 16384  # tiles and blocks of rows
LEAST_DIRECT: Final = 4 * GROUP + 1  # columns, so that four programs that share them have two groups each
ALIGNED: Final = 16  # bytes of rows of x, which are copied to shared memory so many at a time


class Float4Experts:
    """Implements `enginery.api.ExpertsFn`. Values are widened in registers to x's type, as the reference does it in memory.

    Owns the counters of its split, so one stream may run it at a time.
    """

    def __init__(
        self,
        gate_up: StoredWeight,
        down: StoredWeight,
        *,
        activation: Activation,
        biases: ExpertBiases | None = None,
        dependent_launch: bool,
    ) -> None:
        """gate_up: [E, 2I, C], down: [E, C, I], both of `spec.FLOAT4_BLOCKS`. They are copied, an expert's bytes at a time."""
        self.num_experts, self.columns = down.values.shape[:2]
        self.inner = gate_up.values.shape[1] // 2
        self.gate_up, self.down = Float4Groups.of(gate_up, gate_up=True), Float4Groups.of(down, gate_up=False)
        self.activation, self.biased, self.dependent_launch = activation, biases is not None, dependent_launch
        self.gate_up_bias = self.gate_up.words if biases is None else biases.gate_up.contiguous()
        self.down_bias = self.down.words if biases is None else biases.down.contiguous()
        self.arrived = torch.zeros(MOST_SPLIT_PROGRAMS, dtype=torch.int32, device=down.values.device)
        compiled = down.values.is_cuda and not INTERPRETED.value
        able = compiled and self.gate_up.narrow and self.down.narrow and fits_direct(self.columns, self.inner)
        self.direct_kernels = gluon_kernels("experts_float4_few") if able else None

    def __call__(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """x [T, C], routed [T, K] -> [T, C]."""
        sizes = ExpertSizes(
            num_experts=self.num_experts,
            columns=self.columns,
            inner=self.inner,
            dtype=x.dtype,
            weight_dtype=torch.uint8,
            has_direct=self.direct_kernels is not None and is_aligned(x),
        )
        return self.of_blocks(x, routed, float4_blocks_for(routed.ids.numel(), routed.ids.shape[1], sizes))

    def of_blocks(self, x: torch.Tensor, routed: Routed, blocks: Float4Blocks) -> torch.Tensor:
        """Up to blocks.m pairs of an expert share one reading of its weights; with blocks.alone, each pair reads them.

        With blocks.direct, x is bfloat16 and `is_aligned`, and there are direct_kernels.
        """
        assert not blocks.direct or self.direct_kernels
        num_tokens, top_k = routed.ids.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty((num_tokens, self.columns), dtype=x.dtype, device=x.device)
        if num_tokens == 0:
            return out
        ids = routed.ids.contiguous()
        pairs, num_tiles = SortedPairs(ids, ids), ids.numel()
        if not blocks.alone:
            pairs = sort_by_expert(ids, self.num_experts, block_m=blocks.m, dependent_launch=self.dependent_launch)
            num_tiles = len(pairs.tiles)
        inner = self._gate_up(x, pairs, num_tiles, blocks, top_k=top_k)
        parts = self._down(inner, pairs, num_tiles, blocks)
        add_up(parts, routed.weights, out, dependent_launch=self.dependent_launch)
        return out

    def _gate_up(self, x: torch.Tensor, pairs: SortedPairs, num_tiles: int, blocks: Float4Blocks, *, top_k: int) -> torch.Tensor:
        """[T, C] -> [T K, I], by expert; with blocks.alone, by token."""
        rows, block = self.gate_up.words.shape[2], blocks.gate_up
        inner = torch.empty((pairs.order.numel(), self.inner), dtype=x.dtype, device=x.device)
        partial, programs = inner, num_tiles * -(-rows // block.n)
        if block.split > 1:
            assert programs <= MOST_SPLIT_PROGRAMS, "only few pairs have their columns split"
            partial = torch.empty((len(inner), block.split, rows), dtype=torch.float32, device=x.device)
        kernel = self.direct_kernels.gate_up_of_few if self.direct_kernels and blocks.direct else kernels.gate_up_of_float4
        kernel[(programs, block.split)](
            x,
            self.gate_up.words,
            self.gate_up.exponents,
            self.gate_up_bias,
            pairs.order,
            pairs.tiles,
            inner,
            partial,
            self.arrived,
            x.stride(0),
            INNER=self.inner,
            COLUMNS=self.columns,
            TOP_K=top_k,
            BLOCK_M=blocks.m,
            FEW=blocks.few,
            BLOCK_N=block.n,
            GROUP=block.group,
            STAGES=_stages(block, self.columns) if blocks.direct else block.stages,
            SPLIT=block.split,
            NARROW=self.gate_up.narrow,
            ALONE=blocks.alone,
            BIASED=self.biased,
            KIND=self.activation.kind,
            ALPHA=self.activation.alpha,
            LIMIT=self.activation.limit,
            CHAINED=self.dependent_launch,
            num_warps=block.num_warps,
            maxnreg=block.registers,
            launch_pdl=self.dependent_launch,
        )
        return inner

    def _down(self, inner: torch.Tensor, pairs: SortedPairs, num_tiles: int, blocks: Float4Blocks) -> torch.Tensor:
        """[T K, I] as `_gate_up` orders them -> [T K, parts, C], by token."""
        block = blocks.down
        dtype = inner.dtype if block.split == 1 else torch.float32
        parts = torch.empty((len(inner), block.split, self.columns), dtype=dtype, device=inner.device)
        kernel = self.direct_kernels.down_of_few if self.direct_kernels and blocks.direct else kernels.down_of_float4
        kernel[(num_tiles * -(-self.columns // block.n), block.split)](
            inner,
            self.down.words,
            self.down.exponents,
            self.down_bias,
            pairs.order,
            pairs.tiles,
            parts,
            INNER=self.inner,
            COLUMNS=self.columns,
            BLOCK_M=blocks.m,
            FEW=blocks.few,
            BLOCK_N=block.n,
            GROUP=block.group,
            STAGES=_stages(block, self.inner) if blocks.direct else block.stages,
            SPLIT=block.split,
            NARROW=self.down.narrow,
            ALONE=blocks.alone,
            BIASED=self.biased,
            CHAINED=self.dependent_launch,
            num_warps=block.num_warps,
            maxnreg=block.registers,
            launch_pdl=self.dependent_launch,
        )
        return parts


def fits_direct(columns: int, inner: int) -> bool:
    """Whether products of so many columns can be direct."""
    return min(columns, inner) >= LEAST_DIRECT and columns % 8 == inner % 8 == 0


def is_aligned(x: torch.Tensor) -> bool:
    """Whether rows begin at multiples of `ALIGNED` bytes, and have adjacent columns."""
    return x.stride(-1) == 1 and (x.data_ptr() | x.stride(0) * x.element_size()) % ALIGNED == 0


def _stages(block: ProductBlock, columns: int) -> int:
    """No more than a program has groups of columns."""
    num_groups = -(-columns // GROUP)
    stages = min(block.stages, -(-num_groups // block.split))
    assert stages >= 2, "x is fetched a group ahead"
    return stages
