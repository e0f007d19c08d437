"""Two ranks whose rows leave early, each a process in the interpreter, over shared memory.

Sums of several sizes, of which some are never taken, are compared with float64 and with the other rank bit by bit. The second rank
is late now and then, where it would read what was overwritten if places were not kept long enough.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import torch
import torch.multiprocessing as mp

from enginery.api import PeerMemory
from enginery_ops_triton import sent_rows
from enginery_ops_triton.kernels import sums
from enginery_ops_triton.sent_rows import EarlyProduct, SentRows
from enginery_ops_triton.small_linear import Product

MOST_BYTES, EPS = 1 << 16, 1e-5
LATE_S, LATE_PART = 0.02, 0.2
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
CALLS = [  # rows, columns, dtype, whether it is taken
    (16, 64, torch.float32, True),
    (9, 72, torch.bfloat16, True),
    (16, 64, torch.float32, True),
    (16, 64, torch.float32, False),
    (16, 64, torch.float32, True),
    (1, 64, torch.bfloat16, True),
    (33, 24, torch.float32, True),
    (64, 64, torch.bfloat16, False),
    (64, 64, torch.bfloat16, False),
    (30, 64, torch.bfloat16, True),
] * 3


def given(call: int) -> tuple[list[torch.Tensor], list[Product], torch.Tensor, torch.Tensor]:
    """The inputs and products of both ranks, the residual and the weight."""
    rows, columns, dtype, _ = CALLS[call]
    torch.manual_seed(call)
    xs, products = ([torch.randn(size, 8).to(dtype) for _ in range(2)] for size in (rows, columns))
    return xs, [Product(each, None, {}) for each in products], torch.randn(rows, columns).to(dtype), torch.randn(columns).to(dtype)


def run(rank: int, parts: tuple[torch.Tensor, ...], results: list[list[torch.Tensor]]) -> None:
    torch.set_num_threads(1)
    sent_rows._PIECE_ROWS, sent_rows._BLOCK = 4, 128  # type: ignore[misc]
    often, waits = random.Random(rank), sums._await

    def late(*values: Any) -> None:
        waits(*values)
        if rank and often.random() < LATE_PART:
            time.sleep(LATE_S)

    sums._await = late
    sent = SentRows(PeerMemory(rank=rank, parts=parts), begin=64, dependent_launch=False, least_bytes=0, most_bytes=MOST_BYTES)
    sent._turn = 2**32 - 9 - len(CALLS)  # it overflows on the way
    for part in parts[rank : rank + 1]:
        part[4 * sent_rows.FLAG :][:4].view(torch.uint32)[0] = sent._turn
    time.sleep(0.1)
    for call, (_, _, _, is_taken) in enumerate(CALLS):
        xs, products, residual, weight = given(call)
        partial = EarlyProduct(products[rank], len(products[rank].weight), sent)(xs[rank])
        assert torch.equal(partial, products[rank](xs[rank]))
        if is_taken:
            assert sent.add_rms_norm(partial[:1], residual[:1].clone(), weight, EPS) is None
            normed = sent.add_rms_norm(partial, residual, weight, EPS)
            assert normed is not None
            results[call][rank].copy_(torch.stack((residual, normed)))
        assert sent.add_rms_norm(partial.clone(), residual.clone(), weight, EPS) is None


def compare() -> None:
    """What both ranks give."""
    parts = tuple(torch.zeros(64 + 2 * MOST_BYTES, dtype=torch.uint8).share_memory_() for _ in range(2))
    results = [[torch.zeros(2, rows, columns, dtype=dtype).share_memory_() for _ in parts] for rows, columns, dtype, _ in CALLS]
    mp.start_processes(run, (parts, results), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
    for call, found in enumerate(results):
        if not CALLS[call][-1]:
            continue
        xs, products, residual, weight = given(call)
        assert torch.equal(found[0], found[1]), f"ranks differ in call {call}"
        partials = (product(x).double() for product, x in zip(products, xs, strict=True))
        summed = residual.double() + sum(partials)
        normed = summed * (summed.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight.double()
        tolerance = 4 * TOLERANCES[residual.dtype]
        torch.testing.assert_close(found[0].double(), torch.stack((summed, normed)), atol=tolerance, rtol=tolerance)


def end_one_that_waits() -> None:
    """The other rank never comes."""
    parts = tuple(torch.zeros(64 + 2 * MOST_BYTES, dtype=torch.uint8) for _ in range(2))
    sent = SentRows(PeerMemory(rank=0, parts=parts), begin=64, dependent_launch=False, least_bytes=0, most_bytes=MOST_BYTES)
    xs, products, residual, weight = given(0)
    partial = EarlyProduct(products[0], 64, sent)(xs[0])
    waiting = threading.Thread(target=sent.add_rms_norm, args=(partial, residual, weight, EPS), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "it waits for the other rank"
    parts[0].view(torch.int32)[0] = 1
    waiting.join(30)
    assert not waiting.is_alive(), "it waits still"


def main() -> None:
    compare()
    end_one_that_waits()
