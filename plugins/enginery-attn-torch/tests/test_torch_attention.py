"""Numbers against the formula in float64, over heads, pages, windows, soft caps and sinks, in every phase."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from enginery.api import (
    AttnLayerFacts,
    BackendContext,
    ForwardBatch,
    GlobalLayerId,
    KVGeometry,
    LayerSpec,
    LocalLayerId,
    Phase,
    StalePlan,
)
from enginery.memory.arena import DeviceArena
from enginery.memory.pool import PagedKVPool
from enginery_attn_torch.backend import TorchAttention

CPU = torch.device("cpu")
NUM_PAGES = 64


@dataclass(frozen=True)
class Case:
    """One layer's facts and the (tokens before, tokens now) of each request."""

    requests: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    page_size: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scattered: bool = True
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """q: [S, H, D] against k, v: [L, K, D], one request, one head at a time, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    offset = k.shape[0] - q.shape[0]
    group = layer.facts.num_heads // layer.facts.num_kv_heads
    for row, head in itertools.product(range(q.shape[0]), range(layer.facts.num_heads)):
        position = offset + row
        first = 0 if layer.facts.sliding_window is None else max(0, position - layer.facts.sliding_window + 1)
        keys = k[first : position + 1, head // group].double()
        scores = keys @ q[row, head].double() * layer.scale
        if layer.facts.softcap is not None:
            scores = layer.facts.softcap * torch.tanh(scores / layer.facts.softcap)
        weights = scores.exp()
        total = weights.sum() + (layer.sinks[head].double().exp().cpu() if layer.sinks is not None else 0)
        out[row, head] = (weights / total) @ v[first : position + 1, head // group].double()
    return out


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the backend gave, what the formula gives), each [T, H, D], host."""
    torch.manual_seed(0)
    device = torch.device(case.device)
    num_heads, num_kv_heads = case.heads
    facts = AttnLayerFacts(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=case.head_dim,
        sliding_window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    layer = LayerSpec(
        global_id=GlobalLayerId(5),
        local_id=LocalLayerId(0),
        facts=facts,
        scale=case.head_dim**-0.5 * 1.3,
        sinks=torch.randn(num_heads, device=device) if case.sinks else None,
    )
    name = str(case.dtype).removeprefix("torch.")
    geometry = KVGeometry(num_pages=NUM_PAGES, page_size=case.page_size, layers=(facts,), dtype=name)
    pool = PagedKVPool(geometry, device)
    for part in pool.layer(LocalLayerId(0)):
        part.normal_()  # what does not belong to a request must not be seen
    backend = TorchAttention(
        BackendContext(instance="torch#0", geometry=geometry, pool=pool, device=device, dtype=case.dtype, arena=DeviceArena(device))
    )
    batch, keys, values = fill(case, pool)
    q = torch.randn(batch.num_tokens, num_heads, case.head_dim).to(device, case.dtype)
    batch.mark_planned(backend.plan_forward_metadata(batch, capture=False))
    out = torch.full_like(q, float("nan"))
    newest = torch.zeros(batch.num_tokens, num_kv_heads, case.head_dim, dtype=case.dtype, device=device)
    backend.attend(q, newest, newest, layer, batch, out)
    expected, row = [], 0
    for (_, now), k, v in zip(case.requests, keys, values, strict=True):
        expected.append(reference(q[row : row + now].cpu(), k, v, layer))
        row += now
    return out.cpu(), torch.cat(expected)


def fill(case: Case, pool: PagedKVPool) -> tuple[ForwardBatch, list[torch.Tensor], list[torch.Tensor]]:
    """Give each request pages, in order or shuffled, and write random keys and values for all of its tokens."""
    free = torch.randperm(NUM_PAGES).tolist() if case.scattered else list(range(NUM_PAGES))
    num_columns = max(-(-(before + now) // case.page_size) for before, now in case.requests)
    table = torch.zeros(len(case.requests), num_columns, dtype=torch.int32)
    keys, values, slots, positions = [], [], [], []
    for index, (before, now) in enumerate(case.requests):
        length = before + now
        count = -(-length // case.page_size)
        pages, free = free[:count], free[count:]
        table[index, :count] = torch.tensor(pages)
        where = torch.tensor([pages[place // case.page_size] * case.page_size + place % case.page_size for place in range(length)])
        k, v = (torch.randn(length, case.heads[1], case.head_dim).to(case.dtype) for _ in range(2))
        pool.write(LocalLayerId(0), *(part.to(case.device) for part in (k, v, where)))
        keys.append(k)
        values.append(v)
        slots.append(where[before:])
        positions.append(torch.arange(before, length))
    q_lens = [now for _, now in case.requests]
    batch = ForwardBatch(
        phase=Phase.MIXED,
        input_ids=torch.zeros(sum(q_lens), dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        q_lens_cpu=torch.tensor(q_lens, dtype=torch.int32),
        kv_lens_cpu=torch.tensor([before + now for before, now in case.requests], dtype=torch.int32),
        page_table_cpu=table,
        num_logits_cpu=torch.ones(len(q_lens), dtype=torch.int32),
    )
    return batch, keys, values


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCHES = {
    "decode": ((7, 1), (0, 1), (30, 1)),
    "one decode": ((21, 1),),
    "prefill": ((0, 9), (0, 1), (0, 17)),
    "chunk": ((8, 5), (3, 9)),
    "mixed": ((12, 1), (5, 1), (0, 6), (9, 4)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("window", [None, 6, 1])
@pytest.mark.parametrize("extra", [{}, {"softcap": 0.7}, {"sinks": True}, {"softcap": 2.0, "sinks": True}], ids=str)
def test_numbers_equal_the_formula(
    requests: tuple[tuple[int, int], ...], heads: tuple[int, int], window: int | None, extra: dict[str, object], device: str
) -> None:
    out, expected = run(Case(requests, heads=heads, window=window, device=device, **extra))
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("head_dim", [8, 40, 128])
def test_any_page_size_and_head_dim_serves(page_size: int, scattered: bool, head_dim: int) -> None:
    requests = ((2, 1), (9, 1), (0, 5), (4, 3)) if page_size == 1 else BATCHES["mixed"]
    out, expected = run(Case(requests, page_size=page_size, scattered=scattered, head_dim=head_dim))
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
@pytest.mark.parametrize("extra", [{}, {"softcap": 0.7, "sinks": True}], ids=str)
def test_half_precision_is_as_close_as_its_mantissa(
    dtype: torch.dtype, tolerance: float, extra: dict[str, object], device: str
) -> None:
    out, expected = run(Case(BATCHES["mixed"], dtype=dtype, device=device, **extra))
    assert (out.double() - expected).norm() / expected.norm() < tolerance


def test_a_batch_without_its_plan_is_refused() -> None:
    case = Case(BATCHES["mixed"])
    facts = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=16)
    geometry = KVGeometry(num_pages=NUM_PAGES, page_size=4, layers=(facts,), dtype="float32")
    pool = PagedKVPool(geometry, CPU)

    def backend(name: str) -> TorchAttention:
        return TorchAttention(
            BackendContext(instance=name, geometry=geometry, pool=pool, device=CPU, dtype=torch.float32, arena=DeviceArena(CPU))
        )

    layer = LayerSpec(global_id=GlobalLayerId(0), local_id=LocalLayerId(0), facts=facts, scale=1.0)
    mine, other = backend("torch#0"), backend("torch#1")
    batch, _, _ = fill(case, pool)
    q = torch.randn(batch.num_tokens, 4, 16)
    with pytest.raises(StalePlan, match="no plan"):
        mine.attend(q, q, q, layer, batch, q)
    batch.mark_planned(other.plan_forward_metadata(batch, capture=False))
    with pytest.raises(StalePlan, match="torch#1"):
        mine.attend(q, q, q, layer, batch, q)
    assert batch.needs_plan("torch#0")
    batch.mark_planned(mine.plan_forward_metadata(batch, capture=False))
    assert not batch.needs_plan("torch#0")
    batch.input_ids = batch.input_ids[:-1]
    with pytest.raises(StalePlan, match="num_tokens"):
        mine.attend(q, q, q, layer, batch, q)
