"""Compiles the kernels of every rule for compute capability 9.0, of prompts and of decoding steps: no GPU is needed for it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import compile_only
import torch

from enginery_attn_delta.kernels import recurrence
from enginery_attn_delta.launch import Conv, Gating, Heads, Rows, convolve, linear_chunks, recur, scan

HEADS = Heads(num_keys=1, num_values=2, key_dim=128, value_dim=128, q_at=0, k_at=128, v_at=256)
RULES = (
    Gating(decay="head", delta=True, a_log=torch.zeros(2), dt_bias=torch.zeros(2)),
    Gating(decay="channel", delta=True, a_log=torch.zeros(2), dt_bias=torch.zeros(2, 128), floor=-5.0),
    Gating(decay="constant", delta=False, log_decay=torch.zeros(2)),
    Gating(decay="head", delta=False, a_log=torch.zeros(2), dt_bias=torch.zeros(2), skip=torch.ones(2), steps=True),
)


# The rules take what the convolution gives or what is in x, of the same type: each has one of its widths. 2: no input is kept.
WIDTHS = (4, 3, 0, 2)


def variants_of(kernel: Any) -> int:
    """How many have been compiled."""
    return len(kernel.device_caches[0][0])


def main() -> None:
    compile_only.install()
    x, (page, odd) = torch.zeros(1, 512, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int32)  # odd: 4 bytes behind
    weight, gates = torch.zeros(512, 4, dtype=torch.bfloat16), torch.zeros(1, 512 + 32, dtype=torch.bfloat16)
    for tiles in (None, torch.zeros(1, 2, dtype=torch.int32)):
        rows = Rows(first_rows=page, stop_rows=page + 1, reads=page, writes=page, tiles=tiles, longest=1, chained=True)
        convolve(x, weight, weight[:, 0], states=torch.zeros(1, 3, 512, dtype=torch.bfloat16), rows=rows, out=torch.empty_like(x))
        for gating, width in zip(RULES, WIDTHS if tiles is None else (0, 0, 0, 0), strict=True):
            states, out = torch.zeros(1, 2, 128, 128), torch.zeros(1, 2, 128, dtype=torch.bfloat16)
            given: dict[str, Any] = dict(heads=HEADS, gating=gating, scale=1.0, out=out)
            variants = variants_of(recurrence.recur) + 1
            for part in (page, odd):
                if width:
                    inputs, bias = torch.zeros(1, width - 1, 512, dtype=torch.bfloat16), None if width == 4 else weight[:, 0]
                    given["conv"] = Conv(weight=weight[:, :width], bias=bias, states=inputs, activates=width != 3, arrived=part)
                recur(x, gates, states=states, rows=dataclasses.replace(rows, reads=part), **given)
                assert variants_of(recurrence.recur) == variants, "one for a plan's part and counters of any alignment"
        for gating, (dim, value_dim) in itertools.product(RULES[2:], ((128, 64), (64, 64), (256, 128))):
            heads = Heads(num_keys=1, num_values=2, key_dim=dim, value_dim=value_dim, q_at=0, k_at=dim, v_at=2 * dim)
            states, out = torch.zeros(1, 2, value_dim, dim), torch.zeros(1, 2, value_dim, dtype=torch.bfloat16)
            linear_chunks(x, gates, states=states, rows=rows, heads=heads, gating=gating, scale=1.0, out=out)
        states, a_log, skip = torch.zeros(1, 512, 16), torch.zeros(512, 16), torch.ones(512)
        scan(x, gates, a_log=a_log, skip=skip, states=states, rows=rows, scale=1.0, out=torch.empty_like(x))


if __name__ == "__main__":
    main()
