"""Decoding of few requests by the kernel in Gluon: what it computes, and which steps it serves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gluon_by_interpreter import interpreted

from enginery.api import AttnLayerFacts
from enginery_attn_triton import few_requests
from enginery_attn_triton.kernels import decode_few
from enginery_attn_triton.launch import Memory, Scores, run_decode
from enginery_attn_triton.plan import Split
from enginery_attn_triton.splitting import sharing, split_requests
from enginery_attn_triton.tiling import FEW_REQUESTS, Device, LayerCut

PAGE = 16
H200 = Device(num_units=132, shared_bytes=227 << 10, chained=True)
FEW_UNITS = Device(num_units=4, shared_bytes=227 << 10)


class Case(NamedTuple):
    lens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dims: int = 64
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    shared: int = 0


CASES = [
    Case((1,)),
    Case((64,), dims=128),
    Case((200, 65), heads=8),
    Case((700,), heads=6),
    Case((300, 90), heads=16, window=100, sinks=True),
    Case((513, 2), softcap=5.0),
    Case((600, 640), shared=512),
    Case((700, 650), heads=8, shared=512, sinks=True, dims=128),
    Case((333,), heads=16, dims=256),
    Case((333, 40), heads=8, dims=256),
]


def made(case: Case, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, keys and values of pages in any order, and the page table. What no request has is no number."""
    torch.manual_seed(sum(case.lens))
    pages = -(-max(case.lens) // PAGE)
    table = 1 + torch.randperm(len(case.lens) * pages).view(len(case.lens), pages).int()
    table[:, : case.shared // PAGE] = table[0, : case.shared // PAGE]
    shape = len(case.lens) * pages + 1, PAGE, case.kv_heads
    k, v = (torch.full((*shape, case.dims), float("nan"), dtype=dtype) for _ in range(2))
    for number, length in enumerate(case.lens):
        for place in range(case.shared if number else 0, length):
            page, slot = int(table[number, place // PAGE]), place % PAGE
            k[page, slot], v[page, slot] = torch.randn(case.kv_heads, case.dims), torch.randn(case.kv_heads, case.dims)
    q = torch.randn(len(case.lens), case.heads, case.dims).to(dtype)
    return q.to(device), k.to(device), v.to(device), table


def expected(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """In float64, [S, H, D]."""
    rows, group = [], case.heads // case.kv_heads
    for number, (query, seen) in enumerate(zip(q.double(), case.lens, strict=True)):
        first = 0 if case.window is None else max(0, seen - case.window)
        own = [(int(table[number, place // PAGE]), place % PAGE) for place in range(first, seen)]
        keys, values = (torch.stack([each[at] for at in own]).double().repeat_interleave(group, 1) for each in (k, v))
        scores = torch.einsum("hd,nhd->hn", query, keys) * case.dims**-0.5
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if case.sinks:
            scores = torch.cat((scores, sinks.double()[:, None]), 1)
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(1)[:, : len(own)], values))
    return torch.stack(rows)


def decoded(case: Case, dtype: torch.dtype, device: str, cut: LayerCut) -> tuple[torch.Tensor, torch.Tensor]:
    """What is computed and what is expected."""
    q, k, v, table = made(case, dtype, device)
    kv_lens = np.array(case.lens, dtype=np.int32)
    shared = sharing(table.numpy(), kv_lens, page_size=PAGE) if case.shared else ()
    items, splits, _ = split_requests(kv_lens, cut.decode, columns=table.shape[1], page_size=PAGE, shared=shared)
    assert not case.shared or (items[:, 5] > 1).any()
    split = Split(items=torch.from_numpy(items).to(device), splits=torch.from_numpy(splits).to(device), tall=None, merged=True)
    sinks = torch.randn(case.heads)
    out = q.new_full((len(q), case.heads, case.dims), float("nan"))
    run_decode(
        q,
        Memory(k=k, v=v, pages=table.flatten().to(device)),
        out,
        cut=cut,
        split=split,
        parts=torch.full((cut.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device),
        scores=Scores(
            scale=case.dims**-0.5, window=case.window, softcap=case.softcap, sinks=sinks.to(device) if case.sinks else None
        ),
    )
    return out.cpu().double(), expected(case, q.cpu(), k.cpu(), v.cpu(), table, sinks)


def cut_of(case: Case, device: Device) -> LayerCut:
    facts = AttnLayerFacts(
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.dims,
        sliding_window=case.window,
        sinks=case.sinks,
        softcap=case.softcap,
    )
    return LayerCut.of(facts, itemsize=2, device=device)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("interpreter")
def test_what_is_computed_equals_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton in place of Gluon: see gluon_by_interpreter.py."""
    cut = cut_of(case, FEW_UNITS)
    kernels = interpreted(monkeypatch, Path(str(decode_few.__file__)), num_warps=few_requests.num_warps(cut))
    monkeypatch.setattr(few_requests, "kernel_of", lambda cut, num_requests: kernels.decode_few)
    actual, wanted = decoded(case, torch.float32, "cpu", cut)
    assert (actual - wanted).abs().max() < 1e-5


@pytest.mark.usefixtures("interpreter")
def test_what_the_predecessor_writes_is_read_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the query, and the last key and its value."""
    case, written = Case((60,)), []
    q, k, v, table = made(case, torch.float32, "cpu")
    late = [q, k[table[0, 3], 11], v[table[0, 3], 11]]
    kept = [each.clone() for each in late]
    for each in late:
        each.fill_(float("nan"))

    def wait(_: object) -> None:
        for each, values in zip(late, kept, strict=True):
            each.copy_(values)
        written.append(True)

    replaced = {"release_successor": lambda _: None, "wait_for_predecessor": wait}
    kernels = interpreted(monkeypatch, Path(str(decode_few.__file__)), num_warps=few_requests.MOST_WARPS, **replaced)
    monkeypatch.setattr(few_requests, "kernel_of", lambda cut, num_requests: kernels.decode_few)
    items = torch.tensor([[0, 0, 0, 60, -1, 1, 0, 0]], dtype=torch.int32)
    split = Split(items=items, splits=torch.zeros(1, 2, dtype=torch.int32), tall=None, merged=False)
    out = torch.empty_like(q)
    cut = dataclasses.replace(cut_of(case, FEW_UNITS), chained=True)
    parts = torch.empty(cut.workspace_bytes, dtype=torch.uint8)
    run_decode(
        q, Memory(k=k, v=v, pages=table.flatten()), out, cut=cut, split=split, parts=parts, scores=Scores(scale=case.dims**-0.5)
    )
    assert written == [True, True]  # both KV heads
    assert (out.double() - expected(case, q, k, v, table, torch.zeros(4))).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_it_equals_float64(case: Case, dtype: torch.dtype) -> None:
    cut = cut_of(case, Device.of(torch.device("cuda")))
    assert few_requests.kernel_of(cut, len(case.lens)) is not None
    actual, wanted = decoded(case, dtype, "cuda", cut)
    assert (actual - wanted).abs().max() < {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]


@pytest.mark.parametrize(
    ("case", "requests", "served"),
    [
        (Case((1,), heads=16, kv_heads=8), 1, True),
        (Case((1,), heads=16, kv_heads=8), FEW_REQUESTS, True),
        (Case((1,), heads=16, kv_heads=8), FEW_REQUESTS + 1, False),
        (Case((1,), heads=32, kv_heads=8, dims=128), 2, True),
        (Case((1,), heads=64, kv_heads=8), 2, False),  # which may share keys: more rows than columns
        (Case((1,), heads=64, kv_heads=8, window=128), 2, True),  # windows share none
        (Case((1,), heads=32, kv_heads=2), 1, False),  # more heads than columns
        (Case((1,), heads=16, kv_heads=2, dims=256), 1, True),
        (Case((1,), heads=32, kv_heads=8, dims=96), 1, False),
    ],
)
def test_which_steps_it_serves(case: Case, requests: int, served: bool) -> None:
    assert (few_requests.kernel_of(cut_of(case, H200), requests) is not None) == served


def test_all_else_has_the_other_kernel() -> None:
    """Drafts that are verified, other devices, types and versions of Triton."""
    facts = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=64)
    assert few_requests.kernel_of(LayerCut.of(facts, itemsize=2, device=H200), 1) is not None
    assert few_requests.kernel_of(LayerCut.of(facts, itemsize=2, device=H200, length=2), 1) is None
    assert few_requests.kernel_of(LayerCut.of(facts, itemsize=2, device=FEW_UNITS), 1) is None
    assert few_requests.kernel_of(LayerCut.of(facts, itemsize=4, device=H200), 1) is None
    assert few_requests.few_kernels("3.7.1") is few_requests.few_kernels("3.6.0") is not None
    assert few_requests.few_kernels("3.8.0") is None
