"""A draft model where only the device knows how many guesses were right, eagerly and as graphs: no token differs.

Here the device is the host: graphs run their functions again, and what the host may not read yet is not given to it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from core.testing.graph_backend import GraphBackend
from engine.draft_models import SELVES, asking, assert_always_right, assert_told, by_itself, prompt_of
from engine.small_pair import small_model
from engine.test_graphs import AgainAndAgain
from engine.test_speculation import ASKS, Told, answers_of
from parity.engine_driver import options
from parity.oracle import Oracle

from enginery.api import ForwardBatch, ForwardPlan, Phase, Unsupported, hookimpl
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import BackendContext
from enginery.contracts.batch import FULL
from enginery.contracts.engine import DraftCounts
from enginery.contracts.request import GenerationRequest
from enginery.contracts.step import StepInput, StepOutput
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.drafts.draft_graphs import DraftGraphs
from enginery.worker.drafts.draft_model import DraftModel
from enginery.worker.paths.captured_step import takes_graphs
from enginery.worker.paths.decode_capture import DecodeCapture, Speculation
from enginery.worker.paths.decode_graphs import DecodeGraphs, LogitsHead
from enginery.worker.paths.path import Launched
from enginery.worker.paths.running_step import RunningStep
from enginery.worker.runner import Captured

MOST_ROWS = 24
TOKENS = 24


class Passed:
    """In place of a CUDA event."""

    def synchronize(self) -> None: ...


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not know lengths before the device has computed them, nor guesses."""
    made = DraftModel.__init__

    def unknowing(self: DraftModel, *args: object, **named: object) -> None:
        made(self, *args, **named | {"knows_lengths": False})  # type: ignore[arg-type]

    monkeypatch.setattr(DraftModel, "__init__", unknowing)
    monkeypatch.setattr("enginery.worker.runner.recorded", lambda *, is_cuda: Passed())


def captured(
    asked: EngineOptions,
    registry: Registry,
    *,
    recurrent: Callable[[BackendContext], object] | None = None,
    found_starts: int = MOST_ROWS,
    **given: object,
) -> tuple[Engine, AgainAndAgain, DraftGraphs | None]:
    """An engine whose decoding steps, and the draft model's behind them, are captured; requests have 128 positions at most.

    recurrent: builds the backend of recurrent layers. found_starts: of how many requests at the most the device finds
    where verifications begin. No graphs of the draft model: it runs eagerly, or none does.
    """

    class Short(GraphBackend):
        most_pages = 128 // asked.page_size

    class Composed(Registry):
        def create_attn_backend(self, name: str, context: BackendContext) -> object:
            return Short(context) if recurrent is None or name != "linear" else recurrent(context)

    composed = Composed(**{field.name: vars(registry)[field.name] for field in dataclasses.fields(registry)})
    parts = build_parts(dataclasses.replace(asked, attention_backend="torch"), composed, **given)
    capture, geometry = AgainAndAgain(), parts.step.pool.geometry
    facts, drafts = parts.choice.facts, None
    state = torch.zeros(MOST_ROWS, facts.hidden_size)
    if parts.draft_model is not None and parts.draft_model.can_be_captured:
        assert takes_graphs(parts.draft_model.relay, len(state), what="the draft model")
        drafts = DraftGraphs(
            parts.draft_model,
            parts.step,
            capture=capture,
            state=state,
            siblings=parts.choice.draft_siblings,
        )
    has_others = any(geometry.kind_of(layer) != FULL for layer in geometry.layers)
    speculation = Speculation(
        hidden=torch.empty(MOST_ROWS, facts.hidden_size),
        siblings=parts.choice.draft_siblings,
        most_starts=0 if has_others or drafts is None else found_starts,
        most_positions=parts.choice.settings.max_model_len,
    )
    head = LogitsHead(parts.step, MOST_ROWS)
    graphs = DecodeGraphs.build(DecodeCapture(parts.step, MOST_ROWS, head=head, record=capture, speculation=speculation))
    assert graphs is not None
    assert graphs.verified_rows == MOST_ROWS
    while drafts is not None and drafts.prepare(graphs.captured.values(), lambda _: parts.choice.draft_length):
        pass
    return Engine(dataclasses.replace(parts, captured=Captured(graphs, drafts=drafts)), registry, asked), capture, drafts


def requests_of(prompts: list[list[int]] | list[tuple[int, ...]], **changes: object) -> list[GenerationRequest]:
    return [asking(f"{at}", prompt, max_tokens=TOKENS - 2 * at, **changes) for at, prompt in enumerate(prompts)]


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek-v2"])
def test_eagerly_a_model_that_drafts_for_itself_is_always_right(
    unread: None, write_oracle: Callable[..., Oracle], registry: Registry, name: str
) -> None:
    oracle = write_oracle(f"self {name}", SELVES[name])
    requests = requests_of([oracle.prompts[index] for index in (0, 5, 2, 4)])
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    asked = by_itself(oracle, attention_backend="torch", page_size=4, max_batch_tokens=24, draft_length="3")
    engine = Engine.build(asked, registry)
    assert_told(answers_of(engine, requests), expected)
    assert_always_right(engine)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_captured_a_model_that_drafts_for_itself_is_always_right(
    unread: None, write_oracle: Callable[..., Oracle], registry: Registry, name: str
) -> None:
    oracle = write_oracle(f"self {name}", SELVES[name])
    requests = requests_of([oracle.prompts[index] for index in (0, 5, 2, 4)])
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    asked = by_itself(oracle, page_size=4, max_batch_tokens=24, draft_length="3", num_pages=200)
    engine, capture, _ = captured(asked, registry)
    assert_told(answers_of(engine, requests), expected)
    assert_always_right(engine)
    assert capture.num_replayed > 9


SAID = ("Hello", "Tell me a story about a fox named Mia.", "Name three colours.", "What is 47 + 38?")


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Greedy and drawn, and some that read their own tokens."""
    drawn = [asking(about, prompt_of(SAID[1]), **asked) for about, asked in ASKS.items()]
    return requests_of([prompt_of(said) for said in SAID]) + drawn


@pytest.fixture(scope="module")
def plainly(registry: Registry, requests: list[GenerationRequest]) -> dict[str, Told]:
    """What they are told without drafts."""
    return answers_of(Engine.build(small_model(), registry), requests)


@pytest.fixture(scope="module")
def where_the_host_reads(
    registry: Registry, requests: list[GenerationRequest], plainly: dict[str, Told]
) -> Callable[[EngineOptions], DraftCounts]:
    """How many guesses were right where the host knows lengths; once for all tests."""
    found: dict[EngineOptions, DraftCounts] = {}

    def counts(asked: EngineOptions) -> DraftCounts:
        if asked not in found:
            engine = Engine.build(asked, registry)
            assert_told(answers_of(engine, requests), plainly)
            found[asked] = engine.meter.stats().drafts
        return found[asked]

    return counts


@pytest.mark.parametrize(
    ("drafter", "how", "length"), [("eagle", "eager", "3"), ("eagle", "captured", "3"), ("standalone", "captured", "2")]
)
def test_drafters_guess_as_well_as_where_the_host_reads(
    request: pytest.FixtureRequest,
    registry: Registry,
    requests: list[GenerationRequest],
    plainly: dict[str, Told],
    where_the_host_reads: Callable[[EngineOptions], DraftCounts],
    *,
    drafter: str,
    how: str,
    length: str,
) -> None:
    """As many guesses are right as where the host knows lengths."""
    asked = small_model(drafter=drafter, draft_length=length, attention_backend="torch", num_pages=120, max_batch_requests=16)
    wanted = where_the_host_reads(asked)
    request.getfixturevalue("unread")
    engine = Engine.build(asked, registry) if how == "eager" else captured(asked, registry)[0]
    assert_told(answers_of(engine, requests), plainly)
    found = engine.meter.stats().drafts
    assert (found.drafted, found.accepted) == (wanted.drafted, wanted.accepted)


@pytest.mark.parametrize("drafter", ["eagle", "standalone"])
def test_steps_without_guesses_overlap(
    unread: None,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    requests: list[GenerationRequest],
    plainly: dict[str, Told],
    *,
    drafter: str,
) -> None:
    """A step that neither verifies nor guesses is on its way while the next one is launched; its tokens are the device's alone.

    Of one that does they are known, if they are not taken in yet either (`test_ahead`).
    """
    lengths, ahead = itertools.cycle([0, 0, 0, 2, 2, 0, 2, 0, 0, 1]), list[tuple[bool, bool]]()
    monkeypatch.setattr("enginery.speculate.length.DraftLength.of", lambda self, num_requests: next(lengths))
    few = [each for each in requests if each.request_id not in ASKS or each.request_id in ("seeded", "cut", "logprobs")]
    expected = {each.request_id: plainly[each.request_id] for each in few}
    asked = small_model(drafter=drafter, draft_length="2", attention_backend="torch", num_pages=120, max_batch_requests=16)
    engine = Engine.build(dataclasses.replace(asked, overlap=True), registry)
    launch, wait, told = engine._runner.launch, RunningStep.wait, list[StepInput]()

    def noting(step: StepInput) -> Launched:
        waits = [flight.step for flight in engine._in_flight if flight.step not in told]
        ahead.append((bool(waits), any(before.verifies or before.draft_len for before in waits)))
        return launch(step)

    def noted(running: RunningStep) -> StepOutput:
        told.append(running.step)
        return wait(running)

    monkeypatch.setattr(RunningStep, "wait", noted)

    monkeypatch.setattr(engine._runner, "launch", noting)
    assert_told(answers_of(engine, few), expected)
    assert engine.meter.stats().drafts.accepted > 0
    assert not any(unknown for _, unknown in ahead)
    assert 0.3 < sum(overlaps for overlaps, _ in ahead) / len(ahead) < 0.7


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_what_a_step_tells_can_be_read_before_anything_is_guessed(
    unread: None, registry: Registry, monkeypatch: pytest.MonkeyPatch, *, how: str
) -> None:
    """The host goes on with it while the device guesses."""
    asked = small_model(drafter="eagle", draft_length="2", attention_backend="torch", num_pages=120, max_batch_requests=16)
    engine = Engine.build(asked, registry) if how == "eager" else captured(asked, registry)[0]
    noted, draft = list[str](), engine._runner.draft
    monkeypatch.setattr("enginery.worker.runner.recorded", lambda *, is_cuda: noted.append("told") or Passed())

    def drafting(*given: object) -> object:
        noted.append("guessed from here on")
        return draft(*given)

    monkeypatch.setattr(engine._runner, "draft", drafting)
    answers_of(engine, requests_of([prompt_of("The cat")]))
    assert engine.meter.stats().drafts.accepted > 0
    told, guesses = noted[::3], noted[1::3]
    assert len(told) > 3
    assert {*told} == {"told"}
    assert {*guesses} == {"guessed from here on"}
    assert {*noted[2::3]} == {"told"}, "and guesses have an event of their own"


def test_best_tokens_are_accepted_within_the_graph(
    unread: None, write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded ones, and right ones up to a wrong one; nothing is left to do behind a replay."""
    oracle = write_oracle("self llama", SELVES["llama"])
    requests = requests_of([oracle.prompts[index] for index in (0, 5, 2)])
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    engine, _, drafts = captured(by_itself(oracle, page_size=4, draft_length="3", num_pages=200), registry)
    guess, wrong = drafts._model.guess, itertools.cycle((0, 0, 1))

    def sometimes(*given: object, **named: object) -> torch.Tensor:
        return (guess(*given, **named) + next(wrong)) % 250  # type: ignore[arg-type]

    monkeypatch.setattr(drafts._model, "guess", sometimes)
    monkeypatch.setattr("enginery.worker.runner.accept", None)
    assert_told(answers_of(engine, requests), expected)
    counts = engine.meter.stats().drafts
    assert 0.3 < counts.accepted / counts.drafted < 0.95


def test_sizes_that_a_backend_refuses_to_capture_are_verified_eagerly(
    unread: None, write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = write_oracle("self llama", SELVES["llama"])
    requests = requests_of([oracle.prompts[index] for index in (0, 5)])
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    plan, asked = GraphBackend.plan_forward_metadata, list[int]()

    def refusing(self: GraphBackend, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        if capture and batch.phase is Phase.VERIFY and batch.num_requests == 2:
            asked.append(batch.decode_len)
            raise Unsupported("not two")
        return plan(self, batch, capture)

    monkeypatch.setattr(GraphBackend, "plan_forward_metadata", hookimpl(refusing))
    engine, _, _ = captured(by_itself(oracle, page_size=4, draft_length="3", num_pages=200), registry)
    assert_told(answers_of(engine, requests), expected)
    assert_always_right(engine)
    assert len(asked) == len(set(asked)) > 0, "once, not in each step"


@pytest.mark.parametrize(("rates", "told"), [((1.0, 1.0, 1.0), 4.0), ((1.0, 0.0, 1.0), 2.0)])
def test_acceptance_is_forced_within_the_graph(
    unread: None, write_oracle: Callable[..., Oracle], registry: Registry, *, rates: tuple[float, ...], told: float
) -> None:
    """As often as its rates say, whatever was guessed, and with nothing left to do behind a replay."""
    oracle = write_oracle("self llama", SELVES["llama"])
    engine, _, drafts = captured(by_itself(oracle, page_size=4, draft_length="3", num_pages=200), registry, forced_rates=rates)
    drafts._model.guess = lambda state, *_: torch.zeros(len(state), 1, dtype=torch.int64)  # type: ignore[method-assign]
    (request,) = requests_of([oracle.prompts[0]])
    asked = dataclasses.replace(request, params=dataclasses.replace(request.params, max_tokens=41, ignore_eos=True))
    answers_of(engine, [asked])
    counts = engine.meter.stats().drafts
    assert counts.told / counts.verifications == pytest.approx(told, rel=0.05)


@pytest.fixture(scope="module")
def cut_and_drawn(write_oracle: Callable[..., Oracle]) -> tuple[Oracle, list[GenerationRequest]]:
    """Hot, so that the best token is seldom the one; each with another cut, and one that takes the best."""
    oracle = write_oracle("self llama", SELVES["llama"])
    cuts: tuple[dict[str, object], ...] = ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.0})
    asked = [{"temperature": 1.5, "seed": at + 7, "max_tokens": TOKENS - at, **cut} for at, cut in enumerate(cuts)]
    return oracle, [asking(f"{at}", oracle.prompts[at], **each) for at, each in enumerate(asked)]


@pytest.mark.parametrize("few", [[0], [1], [0, 1, 2, 3, 4]], ids=["nothing cut", "few kept", "all"])
def test_what_is_drawn_is_guessed_within_graphs(
    unread: None, cut_and_drawn: tuple[Oracle, list[GenerationRequest]], registry: Registry, few: list[int]
) -> None:
    """With the numbers that the target draws with; nothing is left to do behind a replay."""
    oracle, requests = cut_and_drawn
    requests = [requests[at] for at in few]
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    asked = by_itself(oracle, page_size=4, max_batch_tokens=24, draft_length="3", num_pages=200)
    engine, _, drafts = captured(asked, registry)
    assert_no_eager_guesses(drafts)
    assert_told(answers_of(engine, requests), expected)
    assert_always_right(engine)


def assert_no_eager_guesses(drafts: DraftGraphs) -> None:
    """From now on, where the target ran a graph: no step is planned then but those that are captured."""
    guess, model = drafts.drafts, drafts._model

    def captured_alone(*given: object, **named: object) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(model, "go_on", None)
            return guess(*given, **named)  # type: ignore[arg-type]

    drafts.drafts = captured_alone  # type: ignore[method-assign]


@pytest.mark.parametrize("length", ["1", "3"])
def test_a_head_draws_within_graphs_what_it_draws_where_the_host_reads(
    request: pytest.FixtureRequest, registry: Registry, length: str
) -> None:
    """Its first guess too."""
    requests = [asking(f"{at}", prompt_of(said), temperature=0.8, seed=at, max_tokens=30) for at, said in enumerate(SAID)]
    asked = small_model(drafter="eagle", draft_length=length, attention_backend="torch", num_pages=120, max_batch_requests=16)
    reading = Engine.build(asked, registry)
    expected, wanted = answers_of(reading, requests), reading.meter.stats().drafts
    request.getfixturevalue("unread")
    engine, _, drafts = captured(asked, registry)
    assert_no_eager_guesses(drafts)
    assert_told(answers_of(engine, requests), expected)
    found = engine.meter.stats().drafts
    assert (found.drafted, found.accepted) == (wanted.drafted, wanted.accepted)
    assert found.accepted > 10
