"""Running each kind of step once before the engine says that it is ready: what compiles on first use has compiled then.

The steps of nobody's requests: they read and write the scratch page. The largest is as large as steps get, so that memory that the
plan did not foresee is missed now, not in the middle of a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

import torch

from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.model import Model
from enginery.contracts.ops import Draws, OpTable

LENGTHS: Final = (2, 32, 256)
_log: Final = logging.getLogger(__name__)


@torch.inference_mode()
def warm_up(model: Model, relay: BackendRelay, *, ops: OpTable, geometry: KVGeometry, device: torch.device, longest: int) -> None:
    """Prefills of several lengths up to `longest` tokens, decoding steps and a mixed one, with sampling."""
    began = time.perf_counter()
    steps: list[tuple[Phase, list[int]]] = [(Phase.PREFILL, [length]) for length in (*LENGTHS, longest) if length <= longest]
    steps += [(Phase.DECODE, [1] * count) for count in (1, 2, 16)]
    steps += [(Phase.MIXED, [1, 1, LENGTHS[0]])]
    for phase, lengths in steps:
        batch = dummy_batch(phase, lengths, geometry=geometry, device=device)
        relay.plan(batch)
        logits = model.logits(model.forward(batch)[: len(lengths)])
        ops.greedy(logits)
        table = torch.tensor([0.5, 2.0, 0.5, 0.1, 0.5], device=device)[:, None].expand(5, len(lengths)).contiguous()
        ops.sample_rows(logits, Draws(table=table, most_kept=2, cut=True))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _log.info(
        "ran %d steps of nobody's requests in %.1f s, compiling what was not compiled", len(steps), time.perf_counter() - began
    )


def dummy_batch(phase: Phase, lengths: Sequence[int], *, geometry: KVGeometry, device: torch.device) -> ForwardBatch:
    """Requests of so many new tokens and no older ones, in the scratch page and the scratch state; unplanned."""
    q_lens = torch.tensor(lengths, dtype=torch.int32)
    ends = q_lens.long().cumsum(0).repeat_interleave(q_lens)
    positions = torch.arange(int(q_lens.sum())) - ends + q_lens.long().repeat_interleave(q_lens)
    slots = geometry.num_pages * geometry.page_size + positions % geometry.page_size
    columns = -(-max(lengths) // geometry.page_size)
    return ForwardBatch(
        phase=phase,
        input_ids=torch.zeros_like(positions).to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        q_lens_cpu=q_lens,
        kv_lens_cpu=q_lens,
        page_table_cpu=torch.full((len(lengths), columns), geometry.num_pages, dtype=torch.int32),
        num_logits_cpu=torch.ones_like(q_lens),
        state_slots_cpu=torch.full_like(q_lens, geometry.num_states),
    )
