"""Padding, slicing and splitting of a batch, generated from the axis that each of its fields states.

    tokens    [ request 0 ....... | request 1 | request 2 .. | padding ]        num_tokens
    requests  [ 0 | 1 | 2 | padding ]                                          num_requests

What is cut or padded has no plan: plans are made last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from enginery.contracts.batch import AXES, Axis, ForwardBatch


def slice_requests(batch: ForwardBatch, first: int, last: int) -> ForwardBatch:
    """Requests [first, last) with their tokens, as views; unplanned."""
    ends = batch.q_lens_cpu.long().cumsum(0)
    start = int(ends[first - 1]) if first else 0
    stop = int(ends[last - 1]) if last else 0
    ranges = {Axis.TOKEN: slice(start, stop), Axis.REQUEST: slice(first, last)}
    kept: dict[str, Any] = {name: getattr(batch, name)[ranges[axis]] for name, axis in AXES.items() if axis in ranges}
    return ForwardBatch(phase=batch.phase, **kept)


def split_requests(batch: ForwardBatch, *sizes: int) -> list[ForwardBatch]:
    """Consecutive parts of so many requests each, together the whole batch; unplanned."""
    if sum(sizes) != batch.num_requests:
        raise ValueError(f"parts of {sizes} requests are not the {batch.num_requests} of the batch")
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [slice_requests(batch, first, first + size) for first, size in zip(firsts, sizes, strict=True)]


def pad(batch: ForwardBatch, *, num_requests: int, num_tokens: int, scratch_page: int, page_size: int) -> ForwardBatch:
    """The batch with more rows, which write to the scratch page and whose results nobody reads; unplanned.

    With as many new tokens as new requests, each of those decodes one token (graphs of fixed batch size); otherwise the new
    requests are empty and the new tokens belong to none. Raises ValueError for fewer rows than there are.
    """
    more_requests, more_tokens = num_requests - batch.num_requests, num_tokens - batch.num_tokens
    if more_requests < 0 or more_tokens < 0:
        raise ValueError(
            f"{num_requests=} and {num_tokens=} are less than the {batch.num_requests} and {batch.num_tokens} there are"
        )
    length = 1 if more_tokens == more_requests else 0
    fill = {"slots": scratch_page * page_size, "page_table_cpu": scratch_page, "q_lens_cpu": length, "kv_lens_cpu": length}
    more = {Axis.TOKEN: more_tokens, Axis.REQUEST: more_requests}
    padded: dict[str, Any] = {
        name: _grow(getattr(batch, name), more[axis], fill.get(name, 0)) for name, axis in AXES.items() if axis in more
    }
    return ForwardBatch(phase=batch.phase, **padded)


def _grow(values: torch.Tensor, count: int, fill: int) -> torch.Tensor:
    """`count` more entries along the first dimension."""
    return F.pad(values, [0, 0] * (values.dim() - 1) + [0, count], value=fill) if count else values
