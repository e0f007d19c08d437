"""Products of one row, with the add and the norm before them or without: a kernel that reads the weight once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from enginery_ops_triton.kernels import linear, linear_normed
from enginery_ops_triton.kernels.launch import next_power_of_2

MATVEC_ROWS: Final = 1
MOST_NORMED_COLUMNS: Final = 4096  # with so many a thread has 128 of the weight's numbers
MOST_ROUTED: Final = 1024  # outputs, as of routers


@dataclass(frozen=True, kw_only=True)
class MatvecShape:
    """Outputs and columns that a program of so many warps takes at once. ahead: how many such blocks are on their way early."""

    block_n: int
    block_k: int
    num_warps: int
    ahead: int = 1


def matvec_shape(columns: int) -> MatvecShape:
    """From the sweep of docs/benchmarks/kernels_triton_ops.py: whole rows in flight at once, 32 or 64 numbers a thread."""
    if columns > 4096:
        return MatvecShape(block_n=2, block_k=2048, num_warps=4)
    block_k = next_power_of_2(columns)
    if columns % 256 == 0 and columns > 1024 and 4 * columns <= 3 * block_k:  # a quarter of a block's registers would be idle
        return MatvecShape(block_n=8, block_k=256, num_warps=8, ahead=columns // 256)
    if block_k <= 1024:
        return MatvecShape(block_n=4096 // block_k, block_k=block_k, num_warps=2)
    return MatvecShape(block_n=8192 // block_k, block_k=block_k, num_warps=8)


def normed_shape(outputs: int, columns: int) -> MatvecShape | None:
    """Of one row and the norm before it, as whole engines are fastest: docs/log.md. None: the norm is a kernel of its own.

    Every program reads the row, the residual stream and the norm's weight too, so it has more outputs than others, and no more
    threads than it takes: with as many as `matvec` has, Llama-3.1-8B is slower by a twentieth than with norms apart.
    """
    if columns > MOST_NORMED_COLUMNS:
        return None
    block_k = next_power_of_2(columns)
    if block_k < 2048 or outputs < MOST_ROUTED:
        return matvec_shape(columns)
    return MatvecShape(block_n=4, block_k=block_k, num_warps=16384 // block_k)


class Matvec:
    """For one row; for a few if a program takes all columns at once. A variant is compiled for each power of two of rows."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shape: MatvecShape,
        *,
        dtype: torch.dtype | None = None,
        dependent_launch: bool,
    ) -> None:
        """dtype: of what it returns; None: x's."""
        self.weight = weight
        self.bias = bias
        self.shape = shape
        self.dtype = dtype
        self.dependent_launch = dependent_launch

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        weight, shape = self.weight, self.shape
        outputs, columns = weight.shape
        num_rows = x.shape[0]
        out = torch.empty((num_rows, outputs), dtype=self.dtype or x.dtype, device=x.device)
        linear.matvec[(-(-outputs // shape.block_n),)](
            x,
            weight,
            weight if self.bias is None else self.bias,
            out,
            num_rows,
            x.stride(0),
            weight.stride(0),
            outputs,
            COLUMNS=columns,
            ROWS=next_power_of_2(num_rows),
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            AHEAD=shape.ahead,
            BIAS=self.bias is not None,
            CHAINED=self.dependent_launch,
            num_warps=shape.num_warps,
            launch_pdl=self.dependent_launch,
        )
        return out


def row_is_taken(weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor) -> bool:
    """Whether x and residual are one row of the weight's columns, and all of its type."""
    given, size = (x, residual, norm_weight), (MATVEC_ROWS, weight.shape[1])
    return x.shape == residual.shape == size and all(each.dtype == weight.dtype and each.stride(-1) == 1 for each in given)


class OfNorm(Protocol):
    """A product of one row and of the norm before it."""

    def takes(self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor) -> bool: ...

    def with_gate(self) -> OfNorm: ...

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, eq=False)
class NormedRow:
    """For one row, which is added to the residual stream and normed within the product. product: cut by `normed_shape`.

    gated: its outputs are gates and then ups, and what is made is silu(gate) * up.
    """

    product: Matvec
    gated: bool = False

    def takes(self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor) -> bool:
        """Whether it is one row, all of the weight's type."""
        return row_is_taken(self.product.weight, x, residual, norm_weight)

    def with_gate(self) -> NormedRow:
        """The same with a gate behind it."""
        return replace(self, gated=True)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, residual: [1, C]. The sum and its norm, [1, C] each, and the product [1, out] of that, or [1, out / 2]."""
        weight, bias, shape, chained = self.product.weight, self.product.bias, self.product.shape, self.product.dependent_launch
        outputs, columns = weight.shape
        made = outputs // 2 if self.gated else outputs
        out, summed, normed = x.new_empty((1, made), dtype=self.product.dtype), torch.empty_like(x), torch.empty_like(x)
        linear_normed.normed_matvec[(1 + -(-outputs // shape.block_n),)](
            x,
            residual,
            norm_weight,
            weight,
            weight if bias is None else bias,
            out,
            summed,
            normed,
            weight.stride(0),
            outputs,
            eps,
            COLUMNS=columns,
            BLOCK=next_power_of_2(columns),
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            AHEAD=shape.ahead,
            BIAS=bias is not None,
            GATED=self.gated,
            CHAINED=chained,
            num_warps=shape.num_warps,
            launch_pdl=chained,
        )
        return summed, normed, out


def bind_normed(
    weight: torch.Tensor, bias: torch.Tensor | None, *, dtype: torch.dtype | None = None, dependent_launch: bool
) -> NormedRow | None:
    """dtype: of the product; None: x's. None: the norm is a kernel of its own."""
    shape = normed_shape(*weight.shape)
    return None if shape is None else NormedRow(Matvec(weight, bias, shape, dtype=dtype, dependent_launch=dependent_launch))


class Norming:
    """Implements `NormingLinear` for products of a weight [out, in], for one row; where there is no kernel for that, for none."""

    def __init__(self, of_norm: OfNorm | None) -> None:
        self.of_norm = of_norm
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None  # a norm, and the product of it

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        """Of one row: its product is made too, and kept until the next call."""
        if self.of_norm is None or not self.of_norm.takes(x, residual, weight):
            return None
        summed, normed, made = self.of_norm(x, residual, weight, eps)
        residual.set_(summed.untyped_storage(), 0, summed.shape, summed.stride())
        self._made = normed, made
        return normed

    def _made_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """The product of x, if it was made with it; it is handed out once."""
        made, self._made = self._made, None
        return made[1] if made is not None and made[0] is x else None
