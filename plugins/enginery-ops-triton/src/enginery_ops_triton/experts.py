"""Mixture-of-experts layers: the experts of each token, weighted and added, without the host and so inside of CUDA graphs.

T tokens, K experts of each, E experts, C columns, I an expert's inner size.
"""

from __future__ import annotations

from typing import Any, Final, TypeGuard

import torch
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery.api import SILU, Activation, ExpertBiases, ExpertsFn, ExpertsShape, Routed, StoredWeight
from enginery.nn import reference_experts
from enginery_ops_triton.expert_blocks import PARTS, ExpertSizes, PairBlocks, ProductBlock, TileBlocks, blocks_for
from enginery_ops_triton.expert_pairs import SortedPairs, add_up, sort_by_expert
from enginery_ops_triton.experts_float4 import Float4Experts
from enginery_ops_triton.kernels import expert_tiles, experts_float8
from enginery_ops_triton.kernels import experts as kernels
from enginery_ops_triton.kernels.launch import next_power_of_2
from enginery_ops_triton.shared_memory import shared_bytes
from enginery_ops_triton.spec import FLOAT4_BLOCKS, FLOAT8_BLOCKS

WIDE_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8_SINCE: Final = (8, 9)  # compute capability that converts it
DESCRIBED_SINCE: Final = (9, 0)  # that loads blocks by tensor descriptors
SPLIT_BLOCKS = 16  # of 128 columns, that a program splits


def bind_experts(
    gate_up: torch.Tensor | StoredWeight,
    down: torch.Tensor | StoredWeight,
    shape: ExpertsShape,
    biases: ExpertBiases | None = None,
    *,
    dependent_launch: bool,
) -> ExpertsFn:
    """gate_up: [E, 2I, C], down: [E, C, I], which must not change while kernels run. What they cannot take, the reference does."""
    activation = shape.activation
    alike = isinstance(gate_up, StoredWeight) == isinstance(down, StoredWeight) and _values(gate_up).dtype == _values(down).dtype
    if not (alike and _takes(gate_up) and _takes(down)):
        return reference_experts.bind_experts(gate_up, down, shape, biases)
    if is_float4(gate_up) and is_float4(down):
        return Float4Experts(gate_up, down, activation=activation, biases=biases, dependent_launch=dependent_launch)
    joined = shape.joined
    return Experts(gate_up, down, activation=activation, biases=biases, joined=joined, dependent_launch=dependent_launch)


def bind_squared_experts(up: torch.Tensor, down: torch.Tensor, *, dependent_launch: bool) -> ExpertsFn:
    """up: [E, I, C], down: [E, C, I]. The same kernels without a gate."""
    if not (up.dtype == down.dtype and _takes(up) and _takes(down)):
        return reference_experts.bind_squared_experts(up, down)
    return Experts(up, down, activation=None, dependent_launch=dependent_launch)


def is_float4(weight: torch.Tensor | StoredWeight) -> TypeGuard[StoredWeight]:
    """Whether it is stored in MXFP4."""
    return isinstance(weight, StoredWeight) and weight.scheme == FLOAT4_BLOCKS


def _values(weight: torch.Tensor | StoredWeight) -> torch.Tensor:
    return weight.values if isinstance(weight, StoredWeight) else weight


def _takes(weight: torch.Tensor | StoredWeight) -> bool:
    """Whether there are kernels for it here."""
    values = _values(weight)
    if values.is_meta:
        return False
    if not isinstance(weight, StoredWeight):
        return values.dtype in WIDE_TYPES
    able = not values.is_cuda or torch.cuda.get_device_capability(values.device) >= FLOAT8_SINCE
    return is_float4(weight) or (weight.scheme == FLOAT8_BLOCKS and able)


class Experts:
    """Float8 weights are widened in the kernels where x is float32, or where each pair reads its own; else x is split in float8."""

    def __init__(
        self,
        gate_up: torch.Tensor | StoredWeight,
        down: torch.Tensor | StoredWeight,
        *,
        activation: Activation | None = SILU,
        biases: ExpertBiases | None = None,
        joined: int = 0,
        dependent_launch: bool,
    ) -> None:
        """activation: None without a gate, where `gate_up` is [E, I, C].

        joined: how many of the last experts every token is expected to have, in order, behind its own.
        """
        self.joined = joined
        self.gate_up, self.down = _values(gate_up).contiguous(), _values(down).contiguous()
        self.scaled = isinstance(gate_up, StoredWeight)
        self.gate_up_scale = gate_up.scales.contiguous() if isinstance(gate_up, StoredWeight) else self.gate_up
        self.down_scale = down.scales.contiguous() if isinstance(down, StoredWeight) else self.down
        self.kind = "squared" if activation is None else activation.kind
        self.alpha, self.limit = (0.0, 0.0) if activation is None else (activation.alpha, activation.limit)
        self.biased, self.dependent_launch = biases is not None, dependent_launch
        self.gate_up_bias = self.gate_up if biases is None else biases.gate_up.contiguous()
        self.down_bias = self.down if biases is None else biases.down.contiguous()
        self.num_experts, self.columns, self.inner = self.down.shape
        self.has_descriptors = _has_descriptors(self.gate_up) and _has_descriptors(self.down)
        self.available = shared_bytes(self.down.device)

    def __call__(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """x [T, C], routed [T, K] -> [T, C]."""
        sizes = ExpertSizes(
            num_experts=self.num_experts,
            columns=self.columns,
            inner=self.inner,
            dtype=x.dtype,
            weight_dtype=self.gate_up.dtype,
            has_descriptors=self.has_descriptors,
            available=self.available,
        )
        return self.of_blocks(x, routed, blocks_for(routed.ids.numel(), routed.ids.shape[1], sizes))

    def of_blocks(self, x: torch.Tensor, routed: Routed, blocks: PairBlocks | TileBlocks) -> torch.Tensor:
        """The same in blocks of these sizes."""
        return self.of_pairs(x, routed, blocks) if isinstance(blocks, PairBlocks) else self.of_tiles(x, routed, blocks)

    def of_pairs(self, x: torch.Tensor, routed: Routed, blocks: PairBlocks) -> torch.Tensor:
        """Each pair of a token and an expert reads the expert's weights."""
        num_tokens, top_k = routed.ids.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        ids, weights = routed.ids.contiguous(), routed.weights.contiguous()
        out = torch.empty((num_tokens, self.columns), dtype=x.dtype, device=x.device)
        if num_tokens == 0:
            return out
        inner = torch.empty((num_tokens * top_k, self.inner), dtype=x.dtype, device=x.device)
        kernels.gate_up_of_pairs[(num_tokens, -(-self.inner // blocks.gate_up.n), top_k)](
            x,
            self.gate_up,
            self.gate_up_scale,
            self.gate_up_bias,
            ids,
            inner,
            x.stride(0),
            NUM_EXPERTS=self.num_experts,
            INNER=self.inner,
            COLUMNS=self.columns,
            TOP_K=top_k,
            JOINED=min(self.joined, top_k),
            BLOCK_N=blocks.gate_up.n,
            BLOCK_K=blocks.gate_up.k,
            AHEAD=blocks.gate_up.ahead,
            SCALED=self.scaled,
            BIASED=self.biased,
            KIND=self.kind,
            ALPHA=self.alpha,
            LIMIT=self.limit,
            CHAINED=self.dependent_launch,
            num_warps=blocks.gate_up.num_warps,
            launch_pdl=self.dependent_launch,
        )
        kernels.down_of_pairs[(num_tokens, -(-self.columns // blocks.down.n))](
            inner,
            self.down,
            self.down_scale,
            self.down_bias,
            ids,
            weights,
            out,
            INNER=self.inner,
            COLUMNS=self.columns,
            TOP_K=top_k,
            BLOCK_N=blocks.down.n,
            BLOCK_K=blocks.down.k,
            AHEAD=blocks.down.ahead,
            SCALED=self.scaled,
            BIASED=self.biased,
            CHAINED=self.dependent_launch,
            num_warps=blocks.down.num_warps,
            launch_pdl=self.dependent_launch,
        )
        return out

    def of_tiles(self, x: torch.Tensor, routed: Routed, blocks: TileBlocks) -> torch.Tensor:
        """Pairs are sorted by expert, and up to blocks.m of them share one reading of its weights."""
        num_tokens, top_k = routed.ids.shape
        out = torch.empty((num_tokens, self.columns), dtype=x.dtype, device=x.device)
        if num_tokens == 0:
            return out
        x = x if x.stride(-1) == 1 else x.contiguous()
        ids = routed.ids.contiguous()
        pairs = sort_by_expert(ids, self.num_experts, block_m=blocks.m, dependent_launch=self.dependent_launch)
        inner = torch.empty((ids.numel(), self.inner), dtype=x.dtype, device=x.device)
        outputs = torch.empty((ids.numel(), self.columns), dtype=x.dtype, device=x.device)
        multiply = self._multiply_parts if self.scaled and x.dtype in PARTS else self._multiply
        multiply(x, pairs, inner, outputs, blocks, top_k)
        add_up(outputs, routed.weights, out, dependent_launch=self.dependent_launch)
        return out

    def _multiply(
        self, x: torch.Tensor, pairs: SortedPairs, inner: torch.Tensor, outputs: torch.Tensor, blocks: TileBlocks, top_k: int
    ) -> None:
        described, block = blocks.described, blocks.gate_up
        expert_tiles.gate_up_of_tiles[(len(pairs.tiles) * -(-self.inner // block.n),)](
            x,
            _described(self.gate_up.flatten(0, 1), block.n, block.k) if described else self.gate_up,
            self.gate_up_scale,
            self.gate_up_bias,
            *pairs,
            inner,
            x.stride(0),
            TOP_K=top_k,
            BLOCK_K=block.k,
            SCALED=self.scaled,
            DESCRIBED=described,
            **self._gate(),
            **self._launch(blocks, block),
        )
        block = blocks.down
        expert_tiles.down_of_tiles[(len(pairs.tiles) * -(-self.columns // block.n),)](
            *(_described(inner, m, block.k) if described else inner for m in (blocks.m, blocks.few or blocks.m)),
            _described(self.down.flatten(0, 1), block.n, block.k) if described else self.down,
            self.down_scale,
            self.down_bias,
            *pairs,
            outputs,
            BLOCK_K=block.k,
            SCALED=self.scaled,
            DESCRIBED=described,
            **self._launch(blocks, block),
        )

    def _multiply_parts(
        self, x: torch.Tensor, pairs: SortedPairs, inner: torch.Tensor, outputs: torch.Tensor, blocks: TileBlocks, top_k: int
    ) -> None:
        """The same with float8 weights and x in 16 bits."""
        block, num_parts = blocks.gate_up, PARTS[x.dtype]
        experts_float8.gate_up_of_parts[(len(pairs.tiles) * -(-self.inner // block.n),)](
            *self.split(x),
            self.gate_up,
            self.gate_up_scale,
            self.gate_up_bias,
            *pairs,
            inner,
            TOP_K=top_k,
            PARTS=num_parts,
            **self._gate(),
            **self._launch(blocks, block),
        )
        block = blocks.down
        experts_float8.down_of_parts[(len(pairs.tiles) * -(-self.columns // block.n),)](
            *self.split(inner),
            self.down,
            self.down_scale,
            self.down_bias,
            *pairs,
            outputs,
            PARTS=num_parts,
            **self._launch(blocks, block),
        )

    def _gate(self) -> dict[str, Any]:
        return {"KIND": self.kind, "ALPHA": self.alpha, "LIMIT": self.limit}

    def _launch(self, blocks: TileBlocks, block: ProductBlock) -> dict[str, Any]:
        """What all kernels of tiles are told."""
        return {
            "INNER": self.inner,
            "COLUMNS": self.columns,
            "BLOCK_M": blocks.m,
            "FEW": blocks.few,
            "BLOCK_N": block.n,
            "GROUP": block.group,
            "STAGES": block.stages,
            "BIASED": self.biased,
            "CHAINED": self.dependent_launch,
            "num_warps": block.num_warps,
            "launch_pdl": self.dependent_launch,
        }

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, columns] as parts [rows, P, columns] in float8, and their scales [rows, blocks of 128 columns]."""
        (rows, columns), num_parts = x.shape, PARTS[x.dtype]
        num_blocks = -(-columns // 128)
        parts = torch.empty((rows, num_parts, columns), dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty((rows, num_blocks), dtype=torch.float32, device=x.device)
        blocks = min(SPLIT_BLOCKS, next_power_of_2(num_blocks))
        experts_float8.split_rows[(rows, -(-num_blocks // blocks))](
            x,
            parts,
            scales,
            x.stride(0),
            COLUMNS=columns,
            PARTS=num_parts,
            BLOCKS=blocks,
            CHAINED=self.dependent_launch,
            num_warps=4,
            launch_pdl=self.dependent_launch,
        )
        return parts, scales


def _has_descriptors(weight: torch.Tensor) -> bool:
    """Rows have to begin at multiples of 16 bytes."""
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < DESCRIBED_SINCE:
        return False
    return weight.data_ptr() % 16 == 0 and weight.shape[-1] * weight.element_size() % 16 == 0


def _described(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of blocks of so many rows and columns. What lies outside of the matrix is loaded as zero."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])
