"""Ranks that take sums within norms and find best tokens, each a process in the interpreter, over shared memory.

What each gave is compared with float64, and with the other ranks bit by bit. All but the first are late now and then, where they
would read what was overwritten if it were not kept long enough.
"""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from enginery.api import PeerMemory
from enginery_ops_triton.kernels import sums
from enginery_ops_triton.peer_ops import Blocks, TritonPeerOps

CALLS = [  # rows, columns, dtype: in turns of all kinds, so that places are written again soon after they were read
    (3, 64, torch.float32),
    (1, 64, torch.float32),
    (1, 64, torch.float32),
    (1, 64, torch.float32),
    (1, 24, torch.bfloat16),
    (6, 64, torch.float32),
    (3, 64, torch.float32),
    (2, 12288, torch.bfloat16),
    (2, 8000, torch.float32),
    (6, 520, torch.float32),
    (17, 72, torch.bfloat16),  # more than few of four ranks
    (1, 64, torch.float16),
    (5, 64, torch.bfloat16),
    (1, 8192, torch.bfloat16),
    (3, 8192, torch.bfloat16),
    (1, 24, torch.bfloat16),
    (22, 64, torch.float32),  # of three ranks
    (23, 72, torch.bfloat16),
    (3, 64, torch.float32),
    (1, 64, torch.bfloat16),
    (66, 64, torch.bfloat16),  # 17 blocks: a program has more of them than places
    (1, 4096, torch.float32),
    (20, 24, torch.bfloat16),
    (1, 4096, torch.float32),
    (22, 520, torch.bfloat16),
    *([(6, 64, torch.float32), (6, 64, torch.float32), (1, 1024, torch.float32)] * 4),  # a row where other programs' rows were
]
BEST = [  # rows, vocabulary, dtype; the last rank may have no column
    (3, 64, torch.float32),
    (1, 9000, torch.bfloat16),
    (9, 4, torch.float32),
    (3, 64, torch.bfloat16),
]
EPS = 1e-5
# So small that few rows are several blocks of a program.
BLOCKS = Blocks(size=512, most_programs=2)
SUMS_FOR_A_BEST = 5  # a best token is one that ranks meet in: rarely, so that sums follow each other
LATE_S, LATE_PART, LATE_READ_PART, POLL_S = 0.02, 0.1, 0.05, 0.003
INTERPRETER = importlib.import_module("triton.runtime.interpreter")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def given(call: int, num_ranks: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The partial sums of all ranks, the residual and the weight."""
    rows, columns, dtype = CALLS[call]
    torch.manual_seed(call)
    partials = [torch.randn(rows, columns).to(dtype) for _ in range(num_ranks)]
    return partials, torch.randn(rows, columns).to(dtype), torch.randn(columns).to(dtype)


def logits_of(call: int) -> torch.Tensor:
    """[N, V], with equal largest ones, and rows of minus infinity and with a NaN."""
    rows, vocab, dtype = BEST[call]
    torch.manual_seed(call)
    logits = torch.randint(-4, 4, (rows, vocab)).to(dtype)
    logits[1:2] = -torch.inf
    logits[2:3, vocab // 2] = torch.nan
    return logits


def wanted_tokens(logits: torch.Tensor) -> torch.Tensor:
    """[N] int64: float64's, the first of equal ones, -1 where there is a NaN."""
    wide = logits.double()
    best = (wide == wide.nan_to_num(torch.inf, neginf=-torch.inf).amax(-1, keepdim=True)).int().argmax(-1)
    return torch.where(wide.isnan().any(-1), -1, best)


def late(often: random.Random, then: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
    """A function that sleeps at times, before or after."""

    def slower(*values: Any) -> Any:
        if first and often.random() < LATE_PART:
            time.sleep(LATE_S)
        given = then(*values)
        if not first and often.random() < LATE_PART:
            time.sleep(LATE_S)
        return given

    return slower


def wait_patiently(builder: Any, often: random.Random, *, is_late: bool) -> None:
    """Whoever reads what others write lets them run before, as there are fewer cores than ranks, or is late."""
    load = builder.create_masked_load

    def patient(self: Any, pointers: Any, mask: Any, other: Any, cache: Any, eviction: Any, is_volatile: bool) -> Any:
        if is_volatile:
            time.sleep(LATE_S if is_late and often.random() < LATE_READ_PART else POLL_S)
        return load(self, pointers, mask, other, cache, eviction, is_volatile)

    builder.create_masked_load = patient


def run(
    rank: int, blocks: Blocks, parts: tuple[torch.Tensor, ...], results: list[list[torch.Tensor]], tokens: list[list[torch.Tensor]]
) -> None:
    torch.set_num_threads(1)
    often = random.Random(rank)
    wait_patiently(INTERPRETER.InterpreterBuilder, often, is_late=rank > 0)
    if rank:
        sums._rows = late(often, sums._rows, first=True)
        for name in ("_await", "_await_all", "_raise_all"):
            setattr(sums, name, late(often, getattr(sums, name), first=False))
    bound = TritonPeerOps(PeerMemory(rank=rank, parts=parts), dependent_launch=False, blocks=blocks)
    for call in range(len(CALLS)):
        partials, residual, weight = given(call, len(parts))
        wider = torch.full((len(residual), residual.shape[1] + 16), 7.0, dtype=residual.dtype)
        wider[:, : residual.shape[1]] = residual
        kept = wider[:, : residual.shape[1]]
        assert bound.takes_sum(partials[rank], kept, weight)
        normed = bound.add_rms_norm(partials[rank], kept, weight, EPS)
        results[call][rank].copy_(torch.stack((kept, normed)))
        if call % SUMS_FOR_A_BEST == 0:
            logits = logits_of(place := call // SUMS_FOR_A_BEST % len(BEST))
            width = -(-logits.shape[1] // len(parts))
            own = logits[:, rank * width : (rank + 1) * width]
            assert bound.takes_best(own)
            tokens[place][rank].copy_(bound.best(own, rank * width))


def compare(num_ranks: int, blocks: Blocks) -> None:
    """What all ranks give."""
    parts = tuple(torch.zeros(blocks.part_bytes, dtype=torch.uint8).share_memory_() for _ in range(num_ranks))
    results = [[torch.zeros(2, rows, columns, dtype=dtype).share_memory_() for _ in parts] for rows, columns, dtype in CALLS]
    tokens = [[torch.full((rows,), -2).share_memory_() for _ in parts] for rows, _, _ in BEST]
    given_all = (blocks, parts, results, tokens)
    mp.start_processes(run, given_all, nprocs=num_ranks, start_method="fork")  # type: ignore[no-untyped-call]
    for call, found in enumerate(results):
        partials, residual, weight = given(call, num_ranks)
        assert all(torch.equal(each, found[0]) for each in found), f"ranks differ in call {call}"
        summed = residual.double() + sum(partial.double() for partial in partials)
        normed = summed * (summed.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight.double()
        tolerance = TOLERANCES[residual.dtype]
        torch.testing.assert_close(found[0].double(), torch.stack((summed, normed)), atol=tolerance, rtol=tolerance)
    for call, told in enumerate(tokens):
        wanted = wanted_tokens(logits_of(call))
        assert all(torch.equal(each, wanted) for each in told), f"best tokens of {BEST[call]}: {told}, not {wanted}"


def end_one_that_waits(num_ranks: int, rows: int) -> None:
    """The other ranks never come."""
    parts = tuple(torch.zeros(BLOCKS.part_bytes, dtype=torch.uint8) for _ in range(num_ranks))
    bound = TritonPeerOps(PeerMemory(rank=0, parts=parts), dependent_launch=False, blocks=BLOCKS)
    x = torch.zeros(rows, 64)
    waiting = threading.Thread(target=bound.add_rms_norm, args=(x, x.clone(), torch.ones(64), EPS), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "it waits for the other ranks"
    bound.end()
    waiting.join(30)
    assert not waiting.is_alive(), f"{rows} rows of {num_ranks} ranks: it waits still"


def main(num_ranks: int, ahead: int) -> None:
    compare(num_ranks, BLOCKS._replace(ahead=ahead))
    for rows in (1, 61):
        end_one_that_waits(num_ranks, rows)
