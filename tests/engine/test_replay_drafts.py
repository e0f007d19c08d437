"""Recorded steps that verify drafts, run again: equal on equal backends, and told drafts are those that the logits tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine.draft_models import by_itself
from engine.test_device_drafts import unread  # noqa: F401
from engine.test_kinds_at_random import WINDOWS, small_memory
from engine.test_replay import Defect, two_layers
from engine.test_speculation import Scripted, answers_of, with_drafter
from engine.test_trees import Branching, with_trees
from parity.engine_driver import drain, greedy, options
from parity.oracle import FAMILIES, Oracle
from parity.test_hybrids import HYBRIDS

from enginery.contracts.request import GenerationRequest
from enginery.contracts.step import INT
from enginery.engine.engine import Engine
from enginery.engine.recording import RecordedStep, Recording, read_recording
from enginery.engine.replay import build_replica, compare_replicas, compare_tokens, replay_options
from enginery.kv.pool import PagedKVPool
from enginery.plugin.registry import Registry
from enginery.worker.paths.path import Launched

NUM_STEPS = 18
MODELS = {"llama": two_layers(FAMILIES["llama"]), "gemma2": WINDOWS, "qwen3_next": HYBRIDS["qwen3_next"]}


def requests_of(oracle: Oracle, *, mixed: bool = False) -> list[GenerationRequest]:
    """All greedy, or only some; longer than a step, so that chunks lie beside verifications."""
    kinds: list[dict[str, object]] = [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.2}] if mixed else [{}] * 3
    return [
        greedy(f"r{index}", [3 + index, *prompt], **{"max_tokens": 9, **kinds[index % 3]})
        for index, prompt in enumerate(oracle.prompts[:5])
    ]


def scripted(oracle: Oracle, kind: str = "random", *, mixed: bool = False) -> Registry:
    """With a drafter that guesses what will come, mostly."""
    registry, requests = Registry.load(), requests_of(oracle, mixed=mixed)
    plain = answers_of(Engine.build(options(oracle), registry), requests)
    answers = {request.prompt_token_ids: plain[request.request_id].tokens for request in requests}
    return with_drafter(registry, lambda _: Scripted(kind, answers))


def recorded(oracle: Oracle, registry: Registry, path: Path, *, mixed: bool = False, **changes: object) -> Recording:
    sizes = {"max_batch_requests": 12, "max_batch_tokens": 24, "num_pages": 60, "page_size": 4}
    asked = options(oracle, record_steps=(NUM_STEPS, str(path)), **{**sizes, **changes})
    engine = Engine.build(asked, registry)
    for request in requests_of(oracle, mixed=mixed):
        engine.submit(request)
    drain(engine, {})
    return read_recording(path)


def verifying(made: Recording) -> list[RecordedStep]:
    return [each for each in made.steps if each.step.verifies]


@pytest.mark.parametrize(("name", "mixed"), [("llama", True), ("gemma2", False), ("qwen3_next", False)])
def test_a_recorded_run_is_the_same_again_bit_for_bit(
    write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, mixed: bool
) -> None:
    oracle = write_oracle(f"replay {name}", MODELS[name])
    registry = scripted(oracle, mixed=mixed)
    made = recorded(oracle, registry, tmp_path / "steps", mixed=mixed, drafter="scripted", draft_length="3")
    assert any(len(tokens) > 2 for each in verifying(made) for tokens in each.token_ids), "right drafts are told"
    assert any(len(set(each.step.columns().num_drafts.tolist())) > 1 for each in verifying(made)), "and some rows are padding"
    assert any(each.step.num_items > each.step.num_decode for each in verifying(made)), "beside prompts"
    small_memory(monkeypatch, windows=2, states=2)  # no replica would have the pages that the steps name
    asked = replay_options(made, None)
    first, second, one = (build_replica(asked, registry, made) for _ in range(3))
    outcome = compare_replicas(made, first, second, tolerance=0.0)
    assert (outcome.num_steps, outcome.parting) == (len(made.steps), None)
    assert outcome.num_calls >= 2 * len(made.steps)
    assert compare_tokens(made, one, tolerance=1e-5).parting is None


def test_so_is_one_whose_guesses_only_the_device_knew(
    unread: None,  # noqa: F811
    write_oracle: Callable[..., Oracle],
    tmp_path: Path,
) -> None:
    oracle, registry = write_oracle("replay llama", MODELS["llama"]), Registry.load()
    draft = by_itself(oracle)
    changes = {"drafter": draft.drafter, "draft_model": draft.draft_model, "draft_length": "3", "attention_backend": "torch"}
    made = recorded(oracle, registry, tmp_path / "steps", **changes)
    pending = [each for each in verifying(made) if max(item.pending for item in each.step.each()) > 1]
    assert pending, "their drafts are not in the steps"
    assert any(len(tokens) == 4 for each in pending for tokens in each.token_ids)
    replica = build_replica(replay_options(made, None), registry, made)
    assert compare_tokens(made, replica, tolerance=1e-5).parting is None
    forgotten = made._replace(steps=[msgspec.structs.replace(each, guesses=[]) for each in made.steps])
    parting = compare_tokens(forgotten, build_replica(replay_options(made, None), registry, made)).parting
    assert parting is not None
    assert parting.step >= pending[0].step.number


@pytest.fixture
def llama(write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle("replay llama", MODELS["llama"])


def test_another_token_than_the_second_that_was_told_is_noticed(llama: Oracle, tmp_path: Path) -> None:
    registry = scripted(llama)
    made = recorded(llama, registry, tmp_path / "steps", drafter="scripted", draft_length="3")
    place, index = next(
        (place, index)
        for place, each in enumerate(made.steps)
        if each.step.verifies and each.step.run.greedy
        for index, tokens in enumerate(each.token_ids)
        if len(tokens) > 1
    )
    tokens: list[tuple[int, ...]] = list(made.steps[place].token_ids)
    first, second, *others = tokens[index]
    tokens[index] = (first, (second + 1) % 256, *others)
    wrong = msgspec.structs.replace(made.steps[place], token_ids=tokens)
    spoilt = made._replace(steps=[*made.steps[:place], wrong, *made.steps[place + 1 :]])
    parting = compare_tokens(spoilt, build_replica(replay_options(made, None), registry, made)).parting
    assert parting is not None
    assert (parting.step, parting.layer, parting.request_id) == (place, None, wrong.request_ids[index])


@pytest.mark.parametrize("is_padding", [False, True])
def test_a_defect_in_a_draft_s_row_is_found_and_one_in_padding_is_nobody_s(llama: Oracle, tmp_path: Path, is_padding: bool) -> None:
    registry = scripted(llama, "some")
    made = recorded(llama, registry, tmp_path / "steps", drafter="scripted", draft_length="3")
    step, item = last_row(made, lambda drafts, length: drafts < length - 1 if is_padding else drafts == length - 1)
    first, broken = (build_replica(replay_options(made, None), registry, made) for _ in range(2))
    Defect(broken, step=step, layer=1, row=(item + 1) * made.steps[step].step.decode_len - 1)
    parting = compare_replicas(made, first, broken, tolerance=1e-4).parting
    if is_padding:
        assert parting is None
    else:
        assert parting is not None
        assert (parting.step, parting.layer, parting.request_id) == (step, 1, made.steps[step].request_ids[item])


def last_row(made: Recording, fits: Callable[[int, int], bool]) -> tuple[int, int]:
    """A step, and an item of it that verifies so many drafts in so many rows."""
    found = (
        (each.step.number, item)
        for each in verifying(made)
        for item, drafts in enumerate(each.step.columns().num_drafts[: each.step.num_decode].tolist())
        if fits(drafts, each.step.decode_len)
    )
    return next(found)


def test_a_state_stands_where_the_right_drafts_end(write_oracle: Callable[..., Oracle], tmp_path: Path) -> None:
    """Were another number of them committed, the tokens behind would not be the recorded ones."""
    oracle = write_oracle("replay qwen3_next", MODELS["qwen3_next"])
    registry = scripted(oracle, "right")
    made = recorded(oracle, registry, tmp_path / "steps", drafter="scripted", draft_length="3")
    replica = build_replica(replay_options(made, None), registry, made)
    keep, seen = replica._runner.keep_accepted, list[Sequence[int]]()

    def one_fewer(launched: Launched, right: torch.Tensor, path: torch.Tensor) -> None:
        seen.append(right.tolist())
        keep(launched, (right - 1).clamp(min=0), path)

    replica._runner.keep_accepted = one_fewer  # type: ignore[method-assign]
    parting = compare_tokens(made, replica).parting
    assert np.max(seen[0]) > 0
    assert parting is not None
    assert parting.step > verifying(made)[0].step.number
    assert np.frombuffer(made.steps[parting.step].step.states, INT).any()


@pytest.mark.parametrize("is_moved", [True, False])
def test_drafts_that_branch_are_walked_and_moved_again(
    llama: Oracle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_moved: bool
) -> None:
    registry, requests = Registry.load(), requests_of(llama)
    plain = answers_of(Engine.build(options(llama), registry), requests)
    answers = {request.prompt_token_ids: plain[request.request_id].tokens for request in requests}
    registry = with_trees(registry, Branching("comb", answers))
    sizes = {"max_batch_requests": 24, "attention_backend": "torch", "page_size": 2}
    made = recorded(llama, registry, tmp_path / "steps", drafter="scripted", draft_length="6", **sizes)
    assert any(len(tokens) == 3 for each in verifying(made) if each.step.parents for tokens in each.token_ids)
    asked = replay_options(made, None)
    first, second, one = (build_replica(asked, registry, made) for _ in range(3))
    if not is_moved:
        monkeypatch.setattr(PagedKVPool, "move", lambda self, src, dst: None)
    assert compare_replicas(made, first, second, tolerance=0.0).parting is None
    assert (compare_tokens(made, one, tolerance=1e-5).parting is None) is is_moved


def test_torch_and_triton_agree_on_trees(llama: Oracle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In Triton's interpreter, which takes milliseconds for every program: the first steps of short prompts."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no CUDA device")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    precision = pytest.importorskip("enginery_ops_triton.kernels.precision")
    pytest.importorskip("enginery_attn_triton.backend")
    if not precision.INTERPRETED.value:
        pytest.skip("triton was imported for the compiler in this process")
    requests = [greedy(f"r{index}", prompt[: 5 + index], max_tokens=9) for index, prompt in enumerate(llama.prompts[:2])]
    plain = answers_of(Engine.build(options(llama), Registry.load()), requests)
    answers = {request.prompt_token_ids: plain[request.request_id].tokens for request in requests}
    interpreted = with_trees(Registry.load(blocked=("ops-triton",)), Branching("comb", answers))
    asked = options(llama, drafter="scripted", draft_length="6", attention_backend="torch", num_pages=9)
    engine = Engine.build(dataclasses.replace(asked, record_steps=(4, str(tmp_path / "steps"))), interpreted)
    for request in requests:
        engine.submit(request)
    drain(engine, {})
    made = read_recording(tmp_path / "steps")
    assert sum(bool(each.step.parents) for each in made.steps) >= 2
    first, second = (build_replica(replay_options(made, backend), interpreted, made) for backend in ("torch", "triton"))
    outcome = compare_replicas(made, first, second)
    assert outcome.parting is None
    assert outcome.largest is not None
    assert 0 < outcome.largest.amount < 1e-4
