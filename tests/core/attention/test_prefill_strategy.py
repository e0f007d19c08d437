"""Which strategy an MLA prefill takes, how it is cut, and that folding the pieces gives the whole."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from core.attention.batches import Planner, make_batch
from hypothesis import given
from hypothesis import strategies as st

from enginery.attention.composite import CompositePlan
from enginery.attention.latent import LatentAttention, LatentSettings, RaggedPart, fold, to_natural_log
from enginery.attention.prefill_strategy import cut_pieces, strategies_to_try
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import AttnLayerFacts, Capabilities, KVGeometry, LatentFacts
from enginery.contracts.batch import FULL, ForwardBatch, Phase
from enginery.contracts.latent import ChunkPlan, Denied, KVPiece, PrefillStrategy
from enginery.contracts.plan import PlanKey
from enginery.errors import PluginError
from enginery.kv.pool import PagedKVPool
from enginery.plugin.hookspecs import hookimpl

ABSORBED, ONE_SHOT, CHUNKED = PrefillStrategy.ABSORBED, PrefillStrategy.ONE_SHOT, PrefillStrategy.CHUNKED
V2 = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
NO_SETS = dict(devices=frozenset[str](), dtypes=frozenset[str](), kv_dtypes=frozenset[str]())
RAGGED = Capabilities(**NO_SETS, mla=True, mla_ragged=True, lse_base="e")
WITHOUT_LSE = Capabilities(**NO_SETS, mla=True, mla_ragged=True)
PAGED_ONLY = Capabilities(**NO_SETS, mla=True)


def order(q_lens: list[int], kv_lens: list[int], capabilities: Capabilities = RAGGED, **changes: object) -> tuple[str, ...]:
    sizes = {"q_lens": torch.tensor(q_lens), "kv_lens": torch.tensor(kv_lens)}
    return strategies_to_try(V2, capabilities, **{"asked": None, "chunk_tokens": 8192, **sizes, **changes})


def test_long_prefills_are_ragged_and_short_ones_over_a_long_prefix_absorbed() -> None:
    assert order([2000], [2000])[0] is ONE_SHOT
    assert order([300], [4000])[0] is ONE_SHOT
    assert order([100], [4000]) == (ABSORBED,)
    assert order([1], [100]) == (ABSORBED,)


def test_what_does_not_fit_at_once_is_chunked() -> None:
    assert order([2000], [9000]) == (CHUNKED, ABSORBED)
    assert order([2000], [9000], chunk_tokens=9000) == (ONE_SHOT, CHUNKED, ABSORBED)


def test_capabilities_decide_and_absorbed_is_always_left() -> None:
    assert order([2000], [2000], PAGED_ONLY) == (ABSORBED,)
    assert order([2000], [9000], WITHOUT_LSE) == (ABSORBED,)
    assert order([1], [100], asked=CHUNKED) == (CHUNKED, ABSORBED)
    assert order([2000], [2000], asked=ABSORBED) == (ABSORBED,)
    assert order([2000], [2000], WITHOUT_LSE, asked=CHUNKED) == (ABSORBED,)


def test_a_one_shot_prefill_that_does_not_fit_is_chunked_even_if_it_is_asked_for() -> None:
    assert order([2000], [9000], asked=ONE_SHOT) == (CHUNKED, ABSORBED)
    assert order([2000], [9000], WITHOUT_LSE, asked=ONE_SHOT) == (ABSORBED,)


LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5)


@given(LENGTHS, st.integers(1, 64), st.sampled_from([ONE_SHOT, CHUNKED]))
def test_the_pieces_are_every_token_once(lengths: list[tuple[int, int]], chunk_tokens: int, strategy: PrefillStrategy) -> None:
    q_lens = torch.tensor([new for _, new in lengths], dtype=torch.int32)
    kv_lens = torch.tensor([cached + new for cached, new in lengths], dtype=torch.int32)
    chunks, own = cut_pieces(q_lens, kv_lens, strategy, chunk_tokens=chunk_tokens)
    pieces = chunks if own is None else (*chunks, own)
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert [piece.causal for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for row, (cached, new) in enumerate(lengths):
        ranges = [(int(piece.starts_cpu[row]), int(piece.lens_cpu[row])) for piece in pieces]
        assert [token for start, count in ranges for token in range(start, start + count)] == list(range(cached + new))
    if strategy is CHUNKED:
        assert all(int(chunk.lens_cpu.sum()) <= max(chunk_tokens, len(lengths)) for chunk in chunks)


def test_folding_parts_gives_attention_over_the_whole() -> None:
    scores, values = torch.randn(5, 3, 11, dtype=torch.float64), torch.randn(5, 3, 11, 4, dtype=torch.float64)

    def attention(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = scores[..., keys]
        return torch.einsum("shl,shlv->shv", part.softmax(-1), values[..., keys, :]), part.logsumexp(-1)

    out, lse = torch.zeros(5, 3, 4, dtype=torch.float64), torch.full((5, 3), -math.inf, dtype=torch.float64)
    for keys in (slice(0, 4), slice(4, 5), slice(5, 11)):
        lse = fold(out, lse, *attention(keys))
    torch.testing.assert_close(out, attention(slice(0, 11))[0])
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_rows_that_see_nothing_fold_to_zero_and_not_to_nan() -> None:
    nothing = torch.zeros(1, 1, 2), torch.full((1, 1), -math.inf)
    some = torch.ones(1, 1, 2), torch.zeros(1, 1)
    for first, second, (out, lse) in ((nothing, nothing, nothing), (nothing, some, some), (some, nothing, some)):
        folded = first[0].clone()
        assert torch.equal(fold(folded, first[1], *second), lse)
        assert torch.equal(folded, out)


def test_a_log_sum_exp_in_base_2_is_converted_at_the_boundary() -> None:
    natural = torch.tensor([[1.5, -2.0]])
    torch.testing.assert_close(to_natural_log(natural / math.log(2), "2"), natural)
    assert torch.equal(to_natural_log(natural.clone(), "e"), natural)


class Ragged(Planner):
    """Plans pieces, or denies the strategies whose `disable_ragged` is in `denied`."""

    def __init__(self, *denied: bool) -> None:
        super().__init__("ragged#0")
        self.denied = denied
        self.asked: list[tuple[int, bool]] = []

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, chunks: tuple[KVPiece, ...], disable_ragged: bool) -> ChunkPlan | Denied:
        self.asked.append((len(chunks), disable_ragged))
        if disable_ragged in self.denied:
            return Denied(f"not with disable_ragged={disable_ragged}")
        return ChunkPlan(key=PlanKey.of(batch, self.backend_id), attend=self.attend)


LAYER = AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=24, latent=LatentFacts(rank=16, rope_dim=8, nope_dim=4, value_dim=4))


def latent(leaf: Planner, strategy: PrefillStrategy | None, *, chunk_tokens: int = 2) -> BackendRelay:
    geometry = KVGeometry(pages={FULL: 8}, page_size=16, layers=(LAYER,), dtype="float32")
    pool = PagedKVPool(geometry, torch.device("cpu"))
    settings = LatentSettings(strategy=strategy, chunk_tokens=chunk_tokens)
    child = BackendRelay(leaf, "a test")
    return BackendRelay(LatentAttention(child, capabilities=RAGGED, geometry=geometry, pool=pool, settings=settings), "a test")


def strategies(batch: ForwardBatch) -> list[str]:
    assert isinstance(batch.plan, CompositePlan)
    return [part.strategy if isinstance(part, RaggedPart) else "absorbed" for part in batch.plan.parts]


@pytest.mark.parametrize(
    ("strategy", "asked", "planned"),
    [
        (ABSORBED, [], ["absorbed"] * 2),
        (ONE_SHOT, [(1, True)], ["absorbed", "one-shot"]),
        (CHUNKED, [(2, False)], ["absorbed", "chunked"]),
    ],
)
def test_the_hook_is_called_once_per_batch_and_only_when_the_strategy_needs_it(
    strategy: PrefillStrategy, asked: list[tuple[int, bool]], planned: list[str]
) -> None:
    leaf = Ragged()
    relay = latent(leaf, strategy, chunk_tokens=2 if strategy is CHUNKED else 64)
    batch = relay.plan(make_batch([1, 1, 4]))
    relay.plan(batch)
    assert leaf.asked == asked
    assert strategies(batch) == planned
    relay.plan(make_batch([1, 1], phase=Phase.DECODE))
    assert leaf.asked == asked


def test_a_denied_strategy_is_followed_by_another_before_anything_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    leaf = Ragged(True)
    relay = latent(leaf, ONE_SHOT, chunk_tokens=64)
    for _ in range(2):
        batch = relay.plan(make_batch([4], phase=Phase.PREFILL))
        assert strategies(batch) == ["absorbed"]
        assert leaf.num_plans
    assert [record.message for record in caplog.records] == [
        "ragged#0 denies MLA prefill one-shot: not with disable_ragged=True; another strategy is taken"
    ]


def test_one_denied_ragged_strategy_leaves_the_other(caplog: pytest.LogCaptureFixture) -> None:
    leaf = Ragged(True)
    batch = make_batch([900], phase=Phase.PREFILL)
    wide = dataclasses.replace(batch.pages, page_table_cpu=torch.zeros(1, 64, dtype=torch.int32))
    batch = latent(leaf, None, chunk_tokens=1024).plan(dataclasses.replace(batch, views={FULL: wide}))
    assert [disable_ragged for _, disable_ragged in leaf.asked] == [True, False]
    assert strategies(batch) == ["chunked"]
    assert "denies MLA prefill one-shot" in caplog.text


def test_a_backend_without_the_hook_denies_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    batch = latent(Planner("plain#0"), CHUNKED).plan(make_batch([4], phase=Phase.PREFILL))
    assert strategies(batch) == ["absorbed"]
    assert "plain#0 denies MLA prefill chunked: it has no init_mha_chunk_metadata" in caplog.text


def test_a_batch_without_requests_is_absorbed() -> None:
    leaf = Ragged()
    batch = latent(leaf, CHUNKED).plan(make_batch([], phase=Phase.PREFILL))
    assert strategies(batch) == ["absorbed"]
    assert leaf.asked == []


@pytest.mark.parametrize("wrong", ["a string", "another batch", "another backend"])
def test_what_planning_of_pieces_returned_is_checked(wrong: str) -> None:
    class Wrong(Ragged):
        @hookimpl
        def init_mha_chunk_metadata(self, batch: ForwardBatch) -> object:
            key = PlanKey.of(make_batch([4], phase=Phase.PREFILL) if wrong == "another batch" else batch, "other#0")
            key = key if wrong == "another backend" else key._replace(backend=self.backend_id)
            return "planned" if wrong == "a string" else ChunkPlan(key=key, attend=self.attend)

    with pytest.raises(PluginError, match="ragged#0 answered init_mha_chunk_metadata with"):
        latent(Wrong(), ONE_SHOT, chunk_tokens=64).plan(make_batch([4], phase=Phase.PREFILL))
