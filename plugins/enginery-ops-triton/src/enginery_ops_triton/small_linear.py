"""Linear layers for decoding: below a measured number of rows, kernels that read the weight once at the memory's speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from enginery.api import LinearFn
from enginery_ops_triton.kernels import linear
from enginery_ops_triton.kernels.launch import next_power_of_2

MATVEC_ROWS: Final = 1
FEW_ROWS: Final = 16
FEW_ROWS_OUTPUTS: Final = 4096  # beyond, cuBLAS keeps the memory as busy
LEAST_COLUMNS, MOST_COLUMNS = 16, 32768


@dataclass(frozen=True, kw_only=True)
class MatvecShape:
    """Outputs and columns that a program of so many warps takes at once."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, kw_only=True)
class FewRowsShape:
    """Outputs and columns of a program's block, programs that share the columns, blocks in flight, warps."""

    block_n: int
    block_k: int
    split: int
    stages: int
    num_warps: int = 4


def matvec_shape(columns: int) -> MatvecShape:
    """From the sweep of docs/benchmarks/kernels_triton_ops.py: whole rows in flight at once, 32 or 64 numbers a thread."""
    if columns > 4096:
        return MatvecShape(block_n=2, block_k=2048, num_warps=4)
    block_k = next_power_of_2(columns)
    if block_k <= 1024:
        return MatvecShape(block_n=4096 // block_k, block_k=block_k, num_warps=2)
    return MatvecShape(block_n=8192 // block_k, block_k=block_k, num_warps=8)


def few_rows_shape(columns: int) -> FewRowsShape:
    """From the same sweep. Up to 3072 columns a program has one block, which is on its way before x is there."""
    if columns <= 3072:
        block_k = min(512, next_power_of_2(columns))
        return FewRowsShape(block_n=32, block_k=block_k, split=-(-columns // block_k), stages=3)
    return FewRowsShape(block_n=32, block_k=256, split=4, stages=3)


def bind_small_linear(weight: torch.Tensor, bias: torch.Tensor | None, *, dependent_launch: bool) -> LinearFn:
    """y = x W^T + b. weight [out, in] keeps its layout, and must not change while kernels run: it is read ahead of its turn."""
    outputs, columns = weight.shape
    if weight.is_meta or weight.stride(1) != 1 or not LEAST_COLUMNS <= columns <= MOST_COLUMNS or outputs == 0:
        return _plain(weight, bias)
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16) or (bias is not None and bias.dtype != weight.dtype):
        return _plain(weight, bias)
    few_rows_up_to = MATVEC_ROWS if weight.dtype is torch.float32 or outputs > FEW_ROWS_OUTPUTS else FEW_ROWS
    matvec = Matvec(weight, bias, matvec_shape(columns), dependent_launch=dependent_launch)
    few_rows = FewRows(weight, bias, few_rows_shape(columns), dependent_launch=dependent_launch)

    def bound(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if x.dim() != 2 or x.stride(1) != 1 or x.dtype != weight.dtype or not 0 < num_rows <= few_rows_up_to:
            return F.linear(x, weight, bias)
        return matvec(x) if num_rows <= MATVEC_ROWS else few_rows(x)

    return bound


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFn:
    def bound(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return bound


class Matvec:
    """For one row; for a few if a program takes all columns at once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, shape: MatvecShape, *, dependent_launch: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.shape = shape
        self.dependent_launch = dependent_launch

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        weight, shape = self.weight, self.shape
        outputs, columns = weight.shape
        out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
        linear.matvec[(-(-outputs // shape.block_n),)](
            x,
            weight,
            weight if self.bias is None else self.bias,
            out,
            x.stride(0),
            weight.stride(0),
            outputs,
            COLUMNS=columns,
            ROWS=x.shape[0],
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            BIAS=self.bias is not None,
            CHAINED=self.dependent_launch,
            num_warps=shape.num_warps,
            launch_pdl=self.dependent_launch,
        )
        return out


class FewRows:
    """For up to FEW_ROWS rows. Owns the counters of its split, so one stream may run it at a time."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, shape: FewRowsShape, *, dependent_launch: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.shape = shape
        self.dependent_launch = dependent_launch
        self.arrived = torch.zeros(-(-weight.shape[0] // shape.block_n), dtype=torch.int32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        weight, shape, num_rows = self.weight, self.shape, x.shape[0]
        outputs, columns = weight.shape
        out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
        partial = out
        if shape.split > 1:
            partial = torch.empty((shape.split, num_rows, outputs), dtype=torch.float32, device=x.device)
        linear.few_rows[(len(self.arrived), shape.split)](
            x,
            weight,
            weight if self.bias is None else self.bias,
            out,
            partial,
            self.arrived,
            num_rows,
            x.stride(0),
            weight.stride(0),
            outputs,
            COLUMNS=columns,
            BLOCK_M=max(FEW_ROWS, next_power_of_2(num_rows)),
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            SPLIT=shape.split,
            STAGES=shape.stages,
            BIAS=self.bias is not None,
            CHAINED=self.dependent_launch,
            num_warps=shape.num_warps,
            launch_pdl=self.dependent_launch,
        )
        return out
