"""Weights in MXFP4 in the order of kernels/experts_float4.py: made once, when experts are bound.

E experts, N rows, C columns, G groups of 128 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from enginery.api import StoredWeight
from enginery_ops_triton.kernels.launch import rounded_up

GROUP: Final = 128
LANES: Final = 32  # a scale's columns, and a group's words of 16 bits
ROWS_PAIRED: Final = 8
LARGEST_NARROW: Final = 128  # the exponent of 2, with the bias of 127
FEW_EXPERTS: Final = 4  # that are put in order together: of gpt-oss, that takes 0.4 GB besides


@dataclass(frozen=True, eq=False)
class Float4Groups:
    """Four values to a word, whose columns are 32 apart: see kernels/experts_float4.py for their bits.

    words: [E, G, N, 32] int16. exponents: [E, G, N] int32, a byte for each 32 columns of the group, in order: the scale's (E8M0),
    plus 126 if they are narrow. narrow: no scale is above 2, so that a bfloat16 holds scale * 2 ** 126.
    """

    words: torch.Tensor
    exponents: torch.Tensor
    narrow: bool

    @classmethod
    def of(cls, stored: StoredWeight, *, gate_up: bool) -> Float4Groups:
        """A copy of a weight [E, N, C]. gate_up: of N / 2 gates before as many ups, eight of each take turns, zeros at the end."""
        exponents = stored.scales.view(torch.uint8)
        narrow = bool((exponents <= LARGEST_NARROW).all())
        count, rows = stored.values.shape[:2]
        rows = 2 * rounded_up(rows // 2, ROWS_PAIRED) if gate_up else rows
        groups = rounded_up(2 * stored.values.shape[2], GROUP) // GROUP
        device = stored.values.device
        made = cls(
            torch.empty((count, groups, rows, LANES), dtype=torch.int16, device=device),
            torch.empty((count, groups, rows), dtype=torch.int32, device=device),
            narrow,
        )
        for first in range(0, count, FEW_EXPERTS):
            some = slice(first, first + FEW_EXPERTS)
            values, scales = stored.values[some], exponents[some]
            if gate_up:
                values, scales = _by_turns(values), _by_turns(scales)
            made.words[some] = _words(values, groups).transpose(1, 2)
            made.exponents[some] = _bytes_of_groups(scales + 126 if narrow else scales, groups).transpose(1, 2)
        return made


def _by_turns(of_rows: torch.Tensor) -> torch.Tensor:
    """[E, 2I, ..] gates before ups -> [E, 2I or a few more, ..], eight of each in turn."""
    count, rows, size = of_rows.shape
    whole = rounded_up(rows // 2, ROWS_PAIRED)
    halves = F.pad(of_rows.reshape(count, 2, rows // 2, size), (0, 0, 0, whole - rows // 2))  # [E, 2, I, ..]
    return halves.view(count, 2, -1, ROWS_PAIRED, size).transpose(1, 2).reshape(count, 2 * whole, size)


def _words(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """[E, N, C / 2] bytes -> [E, N, G, 32] int16."""
    packed = F.pad(packed, (0, groups * GROUP // 2 - packed.shape[-1]))
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(*packed.shape[:-1], groups, 4, LANES)
    a, b, c, d = codes.to(torch.int16).unbind(-2)  # each [E, N, G, 32]
    words = ((a & 8) * -4096) | ((a & 7) << 6) | ((b & 8) << 9) | ((b & 7) << 3) | ((c & 8) << 6) | (c & 7)
    return words | ((d & 12) << 11) | ((d & 3) << 10)


def _bytes_of_groups(exponents: torch.Tensor, groups: int) -> torch.Tensor:
    """[E, N, C / 32] uint8 -> [E, N, G] int32. What fills up is a scale, whatever it is: its values are zeros."""
    filled = F.pad(exponents, (0, groups * GROUP // LANES - exponents.shape[-1]), value=127)
    return filled.contiguous().view(torch.int32)
