"""Running each kind of step once before the engine says that it is ready: what compiles on first use has compiled then.

The steps of nobody's requests: they read and write the scratch page, so that they also seem to share a prefix. The largest are as
large as steps get, so that memory that the plan did not foresee is missed now, not in the middle of a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

import torch

from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, STATE, WINDOW, ForwardBatch, MemoryKind, Phase, StateView, View
from enginery.contracts.ops import SamplingTensors
from enginery.worker.paths.results import StepParts

LENGTHS: Final = tuple(1 << power for power in range(1, 12))  # of prompts: kernels for experts differ by the power of two
COUNTS: Final = (1, 2, 16, 32, 64)  # of decoding requests
CACHED: Final = 1024  # tokens before a step's: enough for any backend to split a request, or to read a prefix once for several
_log: Final = logging.getLogger(__name__)


@torch.inference_mode()
def warm_up(parts: StepParts, *, longest: int) -> None:
    """Prefills of up to `longest` tokens, decoding steps, a mixed one, each without and with cached tokens; and sampling.

    All stages of an engine run the same steps, and the last one samples.
    """
    relay, model, ops, results, named = parts.relay, parts.model, parts.ops, parts.results, parts.feed.named
    geometry, device = parts.pool.geometry, parts.feed.device
    began = time.perf_counter()
    steps = steps_to_run(longest, max_requests=geometry.num_seats)
    for phase, q_lens, cached in steps:
        kv_lens = [min(cached + length, longest) for length in q_lens]
        batch = dummy_batch(phase, q_lens=q_lens, kv_lens=kv_lens, geometry=geometry, device=device)
        batch = relay.plan(named.placed(named.with_inputs(batch)))
        hidden = results.hidden(model.forward(batch), batch)[: len(q_lens)]
        if not results.vocab_size:
            continue
        logits = parts.logits(hidden).contiguous()  # on a rank that samples nothing they have no memory
        table = torch.tensor([0.5, 2.0, 0.5, 0.1, 0.5], device=device)[:, None].expand(5, len(q_lens)).contiguous()
        for values in (logits, logits.float()):  # rows with penalties are sampled in float32
            ops.greedy(values)
            ops.draw_rows(values, SamplingTensors(table=table, most_kept=2, cut=True))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _log.debug(
        "ran %d steps of nobody's requests in %.1f s, compiling what was not compiled", len(steps), time.perf_counter() - began
    )


def steps_to_run(longest: int, *, max_requests: int) -> list[tuple[Phase, list[int], int]]:
    """Phase, new tokens of each request, and cached tokens of each: one step for every kernel that a batch may need."""
    kinds = [(Phase.PREFILL, [length]) for length in LENGTHS if length < longest]
    kinds += [(Phase.DECODE, [1] * count) for count in sorted({*(min(count, max_requests) for count in COUNTS), max_requests})]
    kinds += [(Phase.MIXED, [1, 1, LENGTHS[0]])]
    return [(Phase.PREFILL, [longest], 0), *((*kind, cached) for kind in kinds for cached in (0, CACHED))]


def dummy_batch(
    phase: Phase, *, q_lens: Sequence[int], kv_lens: Sequence[int], geometry: KVGeometry, device: torch.device
) -> ForwardBatch:
    """Requests of so many new tokens and so many in all, in the scratch page and the scratch state; unplanned."""
    new, every = torch.tensor(q_lens, dtype=torch.int32), torch.tensor(kv_lens, dtype=torch.int32)
    positions = torch.cat([torch.arange(kv_len - q_len, kv_len) for q_len, kv_len in zip(q_lens, kv_lens, strict=True)])
    paged = [kind for kind in (FULL, WINDOW) if kind == FULL or kind in geometry.pages]
    scratch = {kind: geometry.scratch_page(kind) for kind in paged}
    slots = [page * geometry.page_size + positions % geometry.page_size for page in scratch.values()]
    columns = -(-max(kv_lens) // geometry.page_size)
    packed = torch.stack([torch.zeros_like(positions), positions, *slots]).to(device)  # aligned as in `TokenFeed`
    views: dict[MemoryKind, View | StateView] = {
        kind: View(
            slots=packed[2 + place],
            page_table_cpu=torch.full((len(q_lens), columns), scratch[kind], dtype=torch.int32),
            starts_cpu=None if kind == FULL else torch.zeros_like(new),
        )
        for place, kind in enumerate(paged)
    }
    state = torch.full_like(new, geometry.scratch_page(STATE))
    views[STATE] = StateView(reads_cpu=state, writes_cpu=state)
    return ForwardBatch(
        phase=phase,
        input_ids=packed[0],
        positions=packed[1],
        q_lens_cpu=new,
        kv_lens_cpu=every,
        num_logits_cpu=torch.ones_like(new),
        seats_cpu=torch.full_like(new, geometry.num_seats),
        views=views,
    )
