"""Products of one row and the norm before it by the matrix units, on Hopper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Final

import torch

from enginery_ops_triton.gluon_kernels import hopper_kernels
from enginery_ops_triton.kernels.launch import next_power_of_2
from enginery_ops_triton.matvec import row_is_taken

FEWEST_COLUMNS, MOST_COLUMNS = 1024, 2048
LEAST_OUTPUTS: Final = 1024
BLOCK_N: Final = 16
NUM_WARPS: Final = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitRow:
    """As `NormedRow`. kernels: `kernels.linear_normed_row`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    kernels: ModuleType
    gated: bool = False

    def takes(self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor) -> bool:
        """Whether it is one row, all of the weight's type."""
        return row_is_taken(self.weight, x, residual, norm_weight)

    def with_gate(self) -> UnitRow:
        """The same with a gate behind it."""
        return replace(self, gated=True)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `NormedRow`."""
        outputs, columns = self.weight.shape
        out = x.new_empty((1, outputs // 2 if self.gated else outputs))
        summed, normed = torch.empty_like(x), torch.empty_like(x)
        self.kernels.normed_row[(-(-outputs // BLOCK_N),)](
            x,
            residual,
            norm_weight,
            self.weight,
            self.weight if self.bias is None else self.bias,
            out,
            summed,
            normed,
            self.weight.stride(0),
            outputs,
            eps,
            COLUMNS=columns,
            BLOCK=next_power_of_2(columns),
            BLOCK_N=BLOCK_N,
            BIAS=self.bias is not None,
            GATED=self.gated,
            CHAINED=True,
            num_warps=NUM_WARPS,
            launch_pdl=True,
        )
        return summed, normed, out


def bind_unit_row(weight: torch.Tensor, bias: torch.Tensor | None) -> UnitRow | None:
    """None: others are faster, or it cannot be: on other devices than Hopper's, and with other versions of Triton.

    In float16 a row times the norm's weight, which is divided by its size behind the product, may be too large a number.
    """
    outputs, columns = weight.shape
    if not FEWEST_COLUMNS <= columns <= MOST_COLUMNS or columns % 8 or weight.stride(0) % 8 or outputs < LEAST_OUTPUTS:
        return None
    kernels = None if weight.dtype is not torch.bfloat16 else hopper_kernels("linear_normed_row", weight)
    return UnitRow(weight=weight, bias=bias, kernels=kernels) if kernels else None
