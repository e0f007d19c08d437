"""Numbers against the recurrence in float64, one token after the other, in every phase and over steps that follow each other."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from enginery.api import (
    FULL,
    STATE,
    AttnLayerFacts,
    AttnNeeds,
    BackendContext,
    ForwardBatch,
    GlobalLayerId,
    KVGeometry,
    LayerSpec,
    LocalLayerId,
    Phase,
    RecurrentFacts,
    RecurrentWeights,
    StalePlan,
    StateView,
    View,
)
from enginery.kv.arena import DeviceArena
from enginery.kv.pool import PagedKVPool
from enginery.kv.states import RecurrentStatePool
from enginery.testing import reference
from enginery_attn_linear.backend import CHUNK_TOKENS, LinearAttention
from enginery_attn_linear.spec import LINEAR

NUM_STATES = 8
SCRATCH = NUM_STATES
SCALE = 0.7
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Rows = tuple[torch.Tensor, torch.Tensor]  # mixed [T, C], gates [T, H]


@dataclass
class Setting:
    """One layer and its backend. Nothing is zero at the start: what a request reads of others must show."""

    heads: int = 3
    head_dim: int = 8
    value_dim: int = 12
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    decay: float = 1.0
    stream: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def facts(self) -> AttnLayerFacts:
        recurrent = RecurrentFacts(
            rule="linear",
            decay="head",
            key_heads=self.heads,
            value_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.value_dim,
        )
        return AttnLayerFacts(num_heads=self.heads, num_kv_heads=self.heads, head_dim=self.head_dim, recurrent=recurrent)

    @property
    def layer(self) -> LayerSpec:
        slope = torch.full((self.heads,), self.decay, device=self.device).log()
        return LayerSpec(
            global_id=GlobalLayerId(5),
            local_id=LocalLayerId(1),
            facts=self.facts,
            scale=SCALE,
            recurrent=RecurrentWeights(a_log=slope),
        )

    @property
    def geometry(self) -> KVGeometry:
        softmax = AttnLayerFacts(num_heads=1, num_kv_heads=1, head_dim=4)
        name = str(self.dtype).removeprefix("torch.")
        return KVGeometry(pages={FULL: 1, STATE: NUM_STATES}, page_size=4, layers=(softmax, self.facts), dtype=name)

    def backend(self, instance: str = "linear#0") -> LinearAttention:
        device = torch.device(self.device)
        states = RecurrentStatePool(self.geometry, device)
        states.layer(LocalLayerId(1))["matrix"].fill_(float("nan"))
        return LinearAttention(
            BackendContext(
                instance=instance,
                geometry=self.geometry,
                pool=PagedKVPool(self.geometry, device),
                states=states,
                device=device,
                dtype=self.dtype,
                arena=DeviceArena(device),
            )
        )

    def rows(self, count: int) -> Rows:
        """Of so many tokens, the next of an endless stream."""
        width = self.facts.recurrent.mixed_width
        mixed, gates = (torch.randn(count, size, generator=self.stream) for size in (width, self.heads))
        return mixed.to(self.device, self.dtype), gates.to(self.device, self.dtype)


def batch_of(
    requests: list[tuple[int, int, int]],
    *,
    more_tokens: int = 0,
    phase: Phase = Phase.MIXED,
    device: str = "cpu",
    writes: list[int] | None = None,
) -> ForwardBatch:
    """(tokens before, tokens now, page) of each request. more_tokens: rows at the end that belong to none. writes: other pages."""
    before, now, slots = torch.tensor(requests, dtype=torch.int32).view(-1, 3).unbind(1)
    tokens = torch.zeros(int(now.sum()) + more_tokens, dtype=torch.int64, device=device)
    return ForwardBatch(
        phase=phase,
        input_ids=tokens,
        positions=tokens,
        q_lens_cpu=now,
        kv_lens_cpu=before + now,
        num_logits_cpu=torch.ones(len(requests), dtype=torch.int32),
        seats_cpu=slots,
        views={
            FULL: View(slots=tokens, page_table_cpu=torch.zeros(len(requests), 1, dtype=torch.int32)),
            STATE: StateView(reads_cpu=slots, writes_cpu=slots if writes is None else torch.tensor(writes, dtype=torch.int32)),
        },
    )


def advance(backend: LinearAttention, setting: Setting, batch: ForwardBatch, rows: Rows) -> torch.Tensor:
    """Plan unless that is done, advance, and return [T, H, V], host."""
    plan = batch.plan or backend.plan_forward_metadata(batch, capture=False)
    out = torch.full((batch.num_tokens, setting.heads, setting.value_dim), float("nan"), dtype=setting.dtype, device=setting.device)
    backend.advance(*rows, setting.layer, batch, plan, out)
    return out.cpu()


def recurrence(rows: Rows, setting: Setting) -> torch.Tensor:
    """All tokens of one request, from its first on: [T, H, V] float64."""
    heads, dim = setting.heads, setting.head_dim
    widths = [heads * dim, heads * dim, heads * setting.value_dim]
    mixed, gates = (tensor.cpu().double() for tensor in rows)
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in mixed.split(widths, dim=-1))
    decay = (-setting.decay * F.softplus(gates)).nan_to_num(nan=0.0).exp()  # no decay at all, of an endless gate
    state = torch.zeros(heads, dim, setting.value_dim, dtype=torch.float64)
    out = torch.empty(v.shape, dtype=torch.float64)
    for token in range(len(q)):
        state = decay[token][:, None, None] * state + k[token, :, :, None] * v[token, :, None]
        out[token] = SCALE * torch.einsum("hd,hdv->hv", q[token], state)
    return out


def joined(parts: list[Rows]) -> Rows:
    mixed, gates = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return mixed, gates


def run_steps(setting: Setting, steps: list[list[tuple[str, int]]], slots: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each step is [(request, tokens)]. Returns what the backend gave for all steps, and what the recurrence gives."""
    backend = setting.backend()
    seen: dict[str, list[Rows]] = defaultdict(list)
    given: dict[str, list[torch.Tensor]] = defaultdict(list)
    for step in steps:
        rows = [setting.rows(count) for _, count in step]
        before = [sum(len(mixed) for mixed, _ in seen[name]) for name, _ in step]
        requests = [(start, count, slots[name]) for start, (name, count) in zip(before, step, strict=True)]
        out = advance(backend, setting, batch_of(requests, device=setting.device), joined(rows))
        for (name, _), own, part in zip(step, rows, out.split([count for _, count in step]), strict=True):
            seen[name].append(own)
            given[name].append(part)
    expected = torch.cat([recurrence(joined(parts), setting) for parts in seen.values()])
    return torch.cat([part for parts in given.values() for part in parts]), expected


STEPS: dict[str, list[list[tuple[str, int]]]] = {
    "prefill then decode": [[("a", 9)], [("a", 1)], [("a", 1)], [("a", 1)]],
    "decode from the first token": [[("a", 1), ("b", 1)], [("a", 1), ("b", 1)], [("b", 1)]],
    "several chunks": [[("a", 3 * CHUNK_TOKENS + 5), ("b", CHUNK_TOKENS), ("c", CHUNK_TOKENS + 1)], [("a", 1), ("b", 1), ("c", 1)]],
    "a prompt in pieces": [[("a", 70)], [("a", 1)], [("a", 64), ("b", 2)], [("a", 3)]],
    "mixed": [
        [("a", 5), ("b", 7)],
        [("a", 1), ("b", 1), ("c", 70)],
        [("b", 1), ("a", 1), ("c", 3), ("d", 2)],
        [("d", 1), ("a", 1)],
    ],
    "one token behind longer ones": [[("a", 4)], [("b", 6), ("a", 1), ("c", 1)], [("c", 1), ("a", 2)]],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("sizes", [(3, 8, 12), (1, 16, 16), (4, 5, 1)], ids=str)
def test_numbers_equal_the_recurrence(steps: list[list[tuple[str, int]]], sizes: tuple[int, int, int], device: str) -> None:
    heads, head_dim, value_dim = sizes
    setting = Setting(heads=heads, head_dim=head_dim, value_dim=value_dim, device=device, decay=0.3)
    out, expected = run_steps(setting, steps, {"a": 4, "b": 0, "c": 7, "d": 2})
    torch.testing.assert_close(out.double(), expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.004), (torch.float16, 0.0005)])
def test_half_precision_is_as_close_as_its_mantissa(dtype: torch.dtype, tolerance: float, device: str) -> None:
    out, expected = run_steps(Setting(dtype=dtype, device=device), STEPS["several chunks"], {"a": 4, "b": 0, "c": 7})
    assert (out.double() - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize("gate", [-200.0, -9.0, 50.0, 1e4, float("inf")])
def test_no_decay_is_too_weak_or_too_strong(gate: float) -> None:
    """After strong decays, weak ones still count: the sums inside a chunk must not swallow them."""
    setting = Setting()
    mixed, gates = setting.rows(100)
    weak = torch.arange(100) % 3 > 0
    gates[:] = torch.where(weak[:, None], -4.6, gate)
    expected = recurrence((mixed, gates), setting)
    assert expected.isfinite().all()
    out = advance(setting.backend(), setting, batch_of([(0, 100, 3)]), (mixed, gates))
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 70])
def test_a_state_is_read_from_one_page_and_written_to_another(count: int) -> None:
    setting = Setting()
    backend = setting.backend()
    first, then = setting.rows(9), setting.rows(count)
    advance(backend, setting, batch_of([(0, 9, 2)]), first)
    kept = backend.states.layer(LocalLayerId(1))["matrix"][2].clone()
    for write in (5, 6):
        out = advance(backend, setting, batch_of([(9, count, 2)], writes=[write]), then)
        torch.testing.assert_close(out.double(), recurrence(joined([first, then]), setting)[9:], atol=5e-5, rtol=1e-5)
    states = backend.states.layer(LocalLayerId(1))["matrix"]
    assert torch.equal(states[2], kept)
    assert torch.equal(states[5], states[6])


@pytest.mark.parametrize("counts", [[70], [69, 1], [1]], ids=str)
def test_a_state_is_kept_by_head_value_and_key(counts: list[int]) -> None:
    """The order that the contract states, which other backends of the same engine read, and checkpoints of states."""
    setting = Setting()
    backend, parts = setting.backend(), [setting.rows(count) for count in counts]
    for before, rows in zip([0, *itertools.accumulate(counts)], parts, strict=False):
        advance(backend, setting, batch_of([(before, len(rows[0]), 3)]), rows)
    mixed, gates = joined(parts)
    _, expected = reference.recurrence(mixed, gates, facts=setting.facts.recurrent, weights=setting.layer.recurrent, scale=SCALE)
    expected = expected["matrix"]
    assert expected.shape == (setting.heads, setting.value_dim, setting.head_dim)
    torch.testing.assert_close(backend.states.layer(LocalLayerId(1))["matrix"][3].double(), expected, atol=5e-5, rtol=1e-5)


def test_a_constant_decay_is_the_layer_s_and_needs_no_gates() -> None:
    setting = Setting()
    mixed, _ = setting.rows(70)
    facts = dataclasses.replace(setting.facts, recurrent=dataclasses.replace(setting.facts.recurrent, decay="constant"))
    decay = torch.tensor([-0.1, -0.5, -0.01])
    layer = dataclasses.replace(setting.layer, facts=facts, recurrent=RecurrentWeights(log_decay=decay))
    backend, batch = setting.backend(), batch_of([(0, 70, 3)])
    out = torch.empty(70, setting.heads, setting.value_dim)
    backend.advance(mixed, mixed[:, :0], layer, batch, backend.plan_forward_metadata(batch, capture=False), out)
    raw = torch.log(torch.expm1(-decay.double()))  # whose softplus is -decay
    torch.testing.assert_close(out.double(), recurrence((mixed, raw.expand(70, -1)), setting), atol=5e-5, rtol=1e-5)


def test_a_prompt_in_pieces_equals_the_whole_prompt() -> None:
    setting = Setting(decay=0.1)
    mixed, gates = setting.rows(200)
    whole = advance(setting.backend(), setting, batch_of([(0, 200, 3)]), (mixed, gates))
    for cuts in ([1, 199], [64, 136], [63, 65, 72], [5] * 40):
        backend, pieces, start = setting.backend(), [], 0
        for count in cuts:
            rows = slice(start, start + count)
            pieces.append(advance(backend, setting, batch_of([(start, count, 3)]), (mixed[rows], gates[rows])))
            start += count
        torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-4, rtol=1e-5)


def test_a_slot_that_another_request_had_is_begun_from_zero() -> None:
    setting = Setting()
    backend = setting.backend()
    for count in (9, 1, 130):
        rows = setting.rows(count)
        torch.testing.assert_close(
            advance(backend, setting, batch_of([(0, count, 5)]), rows).double(), recurrence(rows, setting), atol=5e-5, rtol=1e-5
        )


def test_only_the_slots_of_the_batch_are_written() -> None:
    setting = Setting()
    backend = setting.backend()
    advance(backend, setting, batch_of([(0, 1, 6), (0, 5, 1)]), setting.rows(6))
    states = backend.states.layer(LocalLayerId(1))["matrix"]
    assert [slot for slot in range(NUM_STATES + 1) if states[slot].isfinite().all()] == [1, 6]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("padding", "more_tokens"),
    [([(0, 1, SCRATCH)] * 3, 0), ([(0, 0, SCRATCH)] * 2, 5), ([], 4), ([(0, 0, SCRATCH)] * 3, 0)],
    ids=["decoding requests", "empty requests and tokens", "tokens", "empty requests"],
)
def test_padding_changes_nothing(padding: list[tuple[int, int, int]], more_tokens: int, device: str) -> None:
    setting = Setting(device=device)
    plain, padded = setting.backend(), setting.backend()
    for requests in ([(0, 1, 2), (0, 6, 0)], [(1, 1, 2), (6, 1, 0)], [(2, 1, 2), (7, 3, 0)]):
        batch = batch_of(requests, device=device)
        longer = batch_of([*requests, *padding], more_tokens=more_tokens, device=device)
        rows = setting.rows(batch.num_tokens)
        count = longer.num_tokens - batch.num_tokens
        nothing = [torch.full_like(tensor[:1], float("nan")).expand(count, -1) for tensor in rows]
        expected = advance(plain, setting, batch, rows)
        out = advance(padded, setting, longer, joined([rows, (nothing[0], nothing[1])]))
        assert torch.equal(out[: batch.num_tokens], expected)
    kept = [backend.states.layer(LocalLayerId(1))["matrix"][:NUM_STATES].nan_to_num(nan=-7.0) for backend in (plain, padded)]
    assert torch.equal(*kept)


def test_requests_without_tokens_and_a_batch_without_requests_change_nothing() -> None:
    setting = Setting()
    backend = setting.backend()
    empty = batch_of([(3, 0, 1), (0, 0, 2)])
    assert advance(backend, setting, empty, setting.rows(0)).shape == (0, 3, 12)
    assert advance(backend, setting, batch_of([]), setting.rows(0)).shape == (0, 3, 12)
    assert backend.states.layer(LocalLayerId(1))["matrix"].isnan().all()
    rows = setting.rows(5)
    out = advance(backend, setting, batch_of([(3, 0, 1), (0, 5, 2), (0, 0, 3)]), rows)
    torch.testing.assert_close(out.double(), recurrence(rows, setting), atol=5e-5, rtol=1e-5)


def test_two_batches_planned_before_either_runs_keep_their_own_plans() -> None:
    setting = Setting()
    backend = setting.backend()
    batches = [batch_of([(0, 1, 2), (0, 6, 0)]), batch_of([(0, 1, 4), (0, 6, 5)])]
    batches = [batch.planned(backend.plan_forward_metadata(batch, capture=False)) for batch in batches]
    for batch in batches:
        for values in (batch.states.reads_cpu, batch.states.writes_cpu):
            values.fill_(SCRATCH)  # a plan holds what it needs
    for batch in batches:
        rows = setting.rows(7)
        parts = [tuple(tensor[:1] for tensor in rows), tuple(tensor[1:] for tensor in rows)]
        expected = torch.cat([recurrence(part, setting) for part in parts])  # type: ignore[arg-type]
        torch.testing.assert_close(advance(backend, setting, batch, rows).double(), expected, atol=5e-5, rtol=1e-5)
    states = backend.states.layer(LocalLayerId(1))["matrix"]
    assert [slot for slot in range(NUM_STATES + 1) if states[slot].isfinite().all()] == [0, 2, 4, 5]


def test_a_batch_attended_twice_has_moved_its_states_on_twice() -> None:
    setting = Setting()
    backend = setting.backend()
    advance(backend, setting, batch_of([(0, 4, 1)]), setting.rows(4))
    decode, rows = batch_of([(4, 1, 1)], phase=Phase.DECODE), setting.rows(1)
    assert not torch.equal(advance(backend, setting, decode, rows), advance(backend, setting, decode, rows))


def test_a_batch_without_its_plan_is_refused_and_no_state_is_touched() -> None:
    setting = Setting()
    mine, other = setting.backend("linear#0"), setting.backend("linear#1")
    batch = batch_of([(0, 4, 1)])
    rows, out = setting.rows(4), torch.empty(4, setting.heads, setting.value_dim)
    with pytest.raises(StalePlan, match="None is no plan"):
        mine.advance(*rows, setting.layer, batch, None, out)  # type: ignore[arg-type]
    foreign = other.plan_forward_metadata(batch, capture=False)
    with pytest.raises(StalePlan, match="linear#1"):
        mine.advance(*rows, setting.layer, batch, foreign, out)
    assert mine.states.layer(LocalLayerId(1))["matrix"].isnan().all()


def test_recurrent_layers_are_served_and_softmax_layers_are_refused() -> None:
    softmax = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=16)

    def refused(*layers: AttnLayerFacts) -> list[str]:
        needs = AttnNeeds(device="cpu", dtype="float32", kv_dtype="float32", page_size=16, layers=layers)
        return [reason.rule for reason in LINEAR.refuse(needs)]

    assert refused(Setting().facts) == []
    assert refused(Setting().facts, softmax) == ["softmax attention"]
