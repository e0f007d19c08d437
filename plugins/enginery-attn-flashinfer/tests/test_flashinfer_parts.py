"""What it refuses, leases, page lists, and how much memory is taken."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
from types import ModuleType

import numpy as np
import pytest
import torch
from flashinfer_machines import check_answer, check_what_is_missing

from enginery.api import AttnLayerFacts, AttnNeeds, LatentFacts, LayerKV, Phase
from enginery.kv.shared_prefixes import SharedPrefix
from enginery_attn_flashinfer.cuts import Cut, planned_requests
from enginery_attn_flashinfer.leases import Pool
from enginery_attn_flashinfer.pages import Rows, gather_lists, page_lists
from enginery_attn_flashinfer.plan import split_off
from enginery_attn_flashinfer.spec import FlashInferOptions, make_spec

LLAMA = AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128)
NEEDS = AttnNeeds(device="cuda", dtype="bfloat16", kv_dtype="bfloat16", page_size=16, layers=(LLAMA,), compute_capability=(9, 0))
LATENT = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether FlashInfer is installed must not matter here."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, None),
        ({"kv_dtype": "float8_e4m3fn"}, None),
        ({"layers": (dataclasses.replace(LLAMA, sliding_window=512, softcap=50.0),)}, None),
        ({"kv_dtype": "float16"}, "kv dtype"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "dtype"),
        ({"compute_capability": (7, 5)}, "compute capability"),
        ({"device": "cpu", "compute_capability": None}, "device"),
        ({"layers": (dataclasses.replace(LLAMA, head_dim=80),)}, "head dim"),
        ({"layers": (dataclasses.replace(LLAMA, sinks=True),)}, "attention sinks"),
        ({"layers": (dataclasses.replace(LLAMA, num_kv_heads=1, head_dim=576, latent=LATENT),)}, "MLA"),
        ({"lse": True}, "a log-sum-exp"),
        ({"batch_invariant": True}, "batch invariance"),
    ],
)
def test_needs_are_met_or_refused_with_a_reason(changes, rule, monkeypatch) -> None:
    check_answer(make_spec(), dataclasses.replace(NEEDS, **changes), rule, monkeypatch)


def test_a_machine_without_flashinfer_or_a_compiler_is_told_so(monkeypatch, tmp_path) -> None:
    check_what_is_missing(make_spec(), NEEDS, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("capability", "rank"), [((9, 0), "prefill_priority"), ((8, 0), "priority"), ((10, 0), "priority"), (None, "priority")]
)
def test_it_ranks_before_others_for_prefill_where_there_is_flash_attention_3(capability, rank) -> None:
    spec = make_spec()
    assert spec.prefill_priority > spec.priority
    needs = dataclasses.replace(NEEDS, compute_capability=capability)
    assert spec.priority_for(needs) == spec.priority
    assert spec.priority_for(dataclasses.replace(needs, phases=frozenset({Phase.PREFILL}))) == getattr(spec, rank)


@pytest.mark.parametrize("wrong", [{"workspace_mb": 0}, {"gather_mb": -1}, {"shared_prefix_tokens": -1}])
def test_options_that_mean_nothing_are_errors(wrong) -> None:
    with pytest.raises(ValueError, match="workspace_mb"):
        FlashInferOptions(**wrong)


class Item:
    """Pending until it is told that it is not."""

    def __init__(self) -> None:
        self.pending = False

    def is_pending(self) -> bool:
        return self.pending


def test_an_item_has_one_owner_at_a_time_and_is_free_when_its_lease_is_dropped() -> None:
    made: list[Item] = []

    def make() -> Item:
        made.append(Item())
        return made[-1]

    pool = Pool(make)
    first, second = pool.lease(), pool.lease()
    assert first.item is not second.item
    also_first = [first]
    kept = first.item
    del first
    gc.collect()
    assert pool.lease().item is not kept
    also_first.clear()
    gc.collect()
    assert kept in {lease.item for lease in (pool.lease(), pool.lease())}
    assert len(made) == 3


def test_pending_items_are_left_alone_until_there_are_too_many() -> None:
    made: list[Item] = []

    def make() -> Item:
        made.append(Item())
        return made[-1]

    pool = Pool(make, spare=2)
    for count in (1, 2, 3):
        pool.lease().item.pending = True
        assert len(made) == count
    assert pool.lease().item is made[0]
    made[2].pending = False
    assert pool.lease().item is made[2]


def test_page_lists_are_what_requests_read() -> None:
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    rows = Rows(q_lens=ints(1, 1, 3, 0), kv_lens=ints(16, 33, 17, 0), table=table)
    found = page_lists(rows, page_size=16, pinned=False)
    assert found.q_indptr.tolist() == [0, 1, 2, 5, 5]
    assert found.indptr.tolist() == [0, 1, 4, 6, 6]
    assert found.indices.tolist() == [0, 10, 11, 12, 20, 21]
    assert found.last_lens.tolist() == [16, 1, 1, 0]
    assert found.packed.dtype == torch.int32
    later = page_lists(dataclasses.replace(rows, first_pages=ints(0, 2, 1, 0)), page_size=16, pinned=False)
    assert later.indptr.tolist() == [0, 1, 2, 3, 3]
    assert later.indices.tolist() == [0, 12, 21]
    assert later.last_lens.tolist() == [16, 1, 1, 0]


def test_copied_pages_follow_each_other_without_gaps() -> None:
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    rows = Rows(q_lens=ints(1, 1, 3, 5), kv_lens=ints(16, 33, 17, 5), table=table)
    lists, kv_indptr = gather_lists(page_lists(rows, page_size=16, pinned=False), page_size=16, device=torch.device("cpu"))
    assert lists.pages.tolist() == [0, 10, 11, 12, 20, 21, 30]
    assert lists.starts.tolist() == [0, 16, 32, 48, 49, 65, 66, 71]
    assert kv_indptr.tolist() == [0, 16, 49, 66, 71]


@pytest.fixture
def gather(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Compiled where there is a CUDA device, else interpreted, see `conftest.py` of the repository."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return pytest.importorskip("enginery_attn_flashinfer.gather")


@pytest.mark.parametrize(("page_size", "heads", "dim"), [(16, 2, 64), (1, 3, 128), (3, 1, 256), (64, 2, 128)])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_pages_are_copied_token_by_token_and_nothing_else_is_written(gather, page_size, heads, dim, kv_dtype) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lens = ints(1, 70, 16, 5)
    columns = 70 // page_size + 1
    table = np.random.default_rng(0).permutation(4 * columns).astype(np.int32).reshape(4, columns)
    pools = torch.randn(4 * columns, 2, page_size, heads, dim).to(kv_dtype).to(device)
    pages = page_lists(Rows(q_lens=lens, kv_lens=lens, table=table), page_size=page_size, pinned=device.type == "cuda")
    lists, kv_indptr = gather_lists(pages, page_size=page_size, device=device)
    whole = torch.full((2, 92 + 3, heads, dim), 7.0, dtype=torch.bfloat16, device=device)
    gather.gather_pages(LayerKV(pools[:, 0], pools[:, 1]), lists, LayerKV(whole[0, :92], whole[1, :92]))
    for length, first, row in zip(lens.tolist(), kv_indptr.tolist(), table.tolist(), strict=False):
        stored = pools[row].transpose(0, 1).flatten(1, 2)[:, :length]  # [2, length, K, D]
        assert torch.equal(whole[:, first : first + length], stored.to(torch.bfloat16))
    assert bool((whole[:, 92:] == 7).all())
    with pytest.raises(ValueError, match="one layout"):
        gather.gather_pages(LayerKV(pools[:, 0], pools[:, 1].contiguous()), lists, LayerKV(whole[0, :92], whole[1, :92]))


def test_between_groups_there_is_a_request_without_keys() -> None:
    table = np.arange(90, dtype=np.int32).reshape(9, 10)
    rows = Rows(q_lens=ints(*[1] * 9), kv_lens=ints(*[100] * 9), table=table)
    groups = [SharedPrefix(first=1, count=2, num_pages=3), SharedPrefix(first=5, count=3, num_pages=4)]
    prefix, first_pages = split_off(rows, groups, page_size=16, first=1, last=8)
    assert prefix.q_lens.tolist() == [2, 2, 3]
    assert prefix.kv_lens.tolist() == [48, 0, 64]
    assert prefix.table[:, 0].tolist() == [10, 30, 50]
    assert first_pages.tolist() == [0, 3, 3, 0, 0, 4, 4, 4, 0]
    prefix, first_pages = split_off(rows, groups, page_size=16, first=0, last=9, num_requests=7)
    assert prefix.q_lens.tolist() == [1, 2, 2, 3, 1, 0, 0]
    assert prefix.kv_lens.tolist() == [0, 48, 0, 64, 0, 0, 0]
    nothing, first_pages = split_off(rows, [], page_size=16, first=0, last=9, num_requests=7)
    assert nothing.q_lens.tolist() == [9, 0, 0, 0, 0, 0, 0]
    assert not nothing.kv_lens.any()
    assert not first_pages.any()


def test_a_captured_step_that_verifies_is_planned_with_tiles_for_its_rows() -> None:
    """As `PrefillSplitQOKVIndptr` of FlashInfer 0.6.11 has it: in a graph, a tile is for rows - requests + 1 rows of a request."""
    llama = Cut.of(LLAMA)
    for head_dim, length, tile in ((128, 2, 16), (128, 4, 16), (128, 5, 64), (128, 16, 64), (128, 17, 128), (256, 17, 64)):
        cut = dataclasses.replace(llama, head_dim=head_dim)
        for count in (1, 8, 64):
            planned = planned_requests([cut], num_requests=count, length=length)
            assert planned >= count
            longest = count * length - planned + 1
            assert longest >= length, "its rows fit"
            assert cut.tile(longest) == tile
            tiles = -(-count * length * cut.group // tile) + planned - 1  # as many as there is room for
            assert tiles >= count * -(-length * cut.group // tile)
            assert cut.verify_bytes(num_units=132, num_requests=planned, num_rows=count * length) == (
                4 * 32 * max(33, tiles) * tile * (head_dim + 1) + 256
            )
    assert planned_requests([llama], num_requests=64, length=4) == 253


def test_the_workspace_is_as_large_as_the_plan_of_flashinfer_can_ask_for() -> None:
    llama = Cut.of(LLAMA)
    assert llama.workspace_bytes(num_units=132) == 4 * 32 * 33 * 128 * 129 + 256
    captured = llama.workspace_bytes(num_units=132, captured_requests=512)
    assert captured == 4 * 32 * (128 + 511) * 16 * 129 + 256
    options = FlashInferOptions()
    assert captured <= options.workspace_mb << 20
    assert make_spec().capabilities.workspace_bytes == (options.workspace_mb + options.gather_mb) << 20
    assert Cut.of(dataclasses.replace(LLAMA, sliding_window=1)).window_left == 0
    assert llama.window_left == -1
