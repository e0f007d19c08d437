"""From what the scheduler chose to the tensors of one forward."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from enginery.contracts.batch import ForwardBatch, Phase
from enginery.schedule.step import ScheduledItem, ScheduledStep


def build_batch(step: ScheduledStep, *, page_size: int, device: torch.device) -> ForwardBatch:
    """Lay the step's requests out one after the other: decoding ones first, as scheduled."""
    items = step.items
    starts = np.fromiter((item.start for item in items), np.int64, len(items))
    q_lens = np.fromiter((item.num_tokens for item in items), np.int64, len(items))
    kv_lens = starts + q_lens
    page_table = _page_table([item.request.pages for item in items], -(-int(kv_lens.max()) // page_size))
    row_of = np.repeat(np.arange(len(items)), q_lens)  # [T]
    first_of = np.cumsum(q_lens) - q_lens
    positions = np.arange(len(row_of)) - first_of[row_of] + starts[row_of]
    slots = page_table[row_of, positions // page_size].astype(np.int64) * page_size + positions % page_size
    return ForwardBatch(
        phase=_phase(step),
        input_ids=_to_device(_input_ids(items), device),
        positions=_to_device(positions, device),
        slots=_to_device(slots, device),
        q_lens_cpu=torch.from_numpy(q_lens.astype(np.int32)),
        kv_lens_cpu=torch.from_numpy(kv_lens.astype(np.int32)),
        page_table_cpu=torch.from_numpy(page_table),
        num_logits_cpu=torch.tensor([item.num_logits for item in items], dtype=torch.int32),
        state_slots_cpu=torch.tensor([item.request.state_slot for item in items], dtype=torch.int32),
    )


def _phase(step: ScheduledStep) -> Phase:
    if step.num_decode == len(step.items):
        return Phase.DECODE
    return Phase.MIXED if step.num_decode else Phase.PREFILL


def _input_ids(items: Sequence[ScheduledItem]) -> np.ndarray:
    ids = array("i")
    for item in items:
        tokens = item.request.token_ids
        if item.num_tokens == 1:
            ids.append(tokens[item.start])
        else:
            ids.extend(tokens[item.start : item.start + item.num_tokens])
    return np.frombuffer(ids, dtype=np.int32).astype(np.int64)


def _page_table(pages: Sequence[Sequence[int]], num_columns: int) -> np.ndarray:
    """[B, P] int32; a request's pages past the last one it needs now are left out."""
    table = np.zeros((len(pages), num_columns), dtype=np.int32)
    for row, owned in enumerate(pages):
        needed = owned[:num_columns]
        table[row, : len(needed)] = needed
    return table


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def logits_rows(batch: ForwardBatch) -> torch.Tensor:
    """Which rows of [T] need logits: the last `num_logits` of each request. [N] int64, host."""
    ends = batch.q_lens_cpu.long().cumsum(0)  # [B]
    counts = batch.num_logits_cpu.long()
    ends_of = ends.repeat_interleave(counts)  # [N]
    first_of = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return ends_of - counts.repeat_interleave(counts) + torch.arange(len(ends_of)) - first_of
