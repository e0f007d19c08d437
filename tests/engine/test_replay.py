"""Recorded steps run again: equal on equal backends, and a planted defect is found at its step, layer and request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from engine.test_kinds_at_random import WINDOWS, small_memory
from parity.engine_driver import drain, greedy, options
from parity.oracle import FAMILIES, Oracle
from parity.test_hybrids import HYBRIDS
from transformers import PretrainedConfig
from typer.testing import CliRunner

from enginery.cli.main import build_app
from enginery.config.schema import EngineOptions
from enginery.contracts.step import STORED_VERSION
from enginery.engine import recording as recording_module
from enginery.engine.engine import Engine
from enginery.engine.recording import Recording, read_recording
from enginery.engine.replay import Outcome, Replica, build_replica, compare_replicas, compare_tokens, replay_options
from enginery.errors import ConfigError
from enginery.plugin.registry import Registry

NUM_STEPS = 20


def two_layers(config: PretrainedConfig) -> PretrainedConfig:
    return type(config)(**{**config.to_dict(), "num_hidden_layers": 2})


@pytest.fixture
def llama(write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle("llama-two-layers", two_layers(FAMILIES["llama"]))


def recorded(
    oracle: Oracle, registry: Registry, path: Path, *, num_steps: int = NUM_STEPS, longest: int = 1000, **changes: object
) -> Recording:
    """Requests of every kind come, go, are preempted and use seats again."""
    asked = options(oracle, record_steps=(num_steps, str(path)), max_batch_requests=3, max_batch_tokens=24, **changes)
    engine = Engine.build(asked, registry)
    kinds: list[dict[str, object]] = [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.2}, {"prompt_logprobs": 1}]
    for index, prompt in enumerate(oracle.prompts[:6]):
        engine.submit(greedy(f"r{index}", prompt[:longest], **{"max_tokens": 9, **kinds[index % len(kinds)]}))
    for _ in range(8):
        engine.step()
    engine.abort("r1")
    drain(engine, {})
    return read_recording(path)


def replica(made: Recording, registry: Registry, backend: str | None = None) -> Replica:
    return build_replica(replay_options(made, backend), registry, made)


@pytest.mark.parametrize("changes", [{"overlap": True}, {"overlap": False, "num_pages": 20}, {"prefix_cache": False}], ids=str)
def test_a_recorded_run_is_the_same_again_bit_for_bit(
    llama: Oracle, registry: Registry, tmp_path: Path, changes: dict[str, object]
) -> None:
    made = recorded(llama, registry, tmp_path / "steps", **changes)
    assert len(made.steps) == NUM_STEPS
    assert [each.step.number for each in made.steps] == list(range(NUM_STEPS))
    if changes.get("overlap"):
        assert any(item.pending for each in made.steps for item in each.step.each())
    outcome = compare_replicas(made, replica(made, registry), replica(made, registry), tolerance=0.0)
    assert (outcome.num_steps, outcome.num_calls, outcome.parting) == (NUM_STEPS, 2 * NUM_STEPS, None)
    assert outcome.largest is not None
    assert outcome.largest.amount == 0
    outcome = compare_tokens(made, replica(made, registry), tolerance=1e-5)
    compared = [each.step.run.greedy and bool(each.token_ids) for each in made.steps]
    assert 0 < sum(compared) < NUM_STEPS
    assert (outcome.num_steps, outcome.parting) == (sum(compared), None)


@pytest.mark.parametrize("config", [WINDOWS, HYBRIDS["qwen3_next"]], ids=["windows", "states"])
def test_so_is_one_of_a_model_with_several_kinds_of_memory(
    write_oracle: Callable[..., Oracle],
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: PretrainedConfig,
) -> None:
    oracle = write_oracle(f"replay {config.model_type}", config)
    made = recorded(oracle, registry, tmp_path / "steps")
    small_memory(monkeypatch, windows=2, states=2)  # no replica would have the pages that the steps name
    outcome = compare_replicas(made, replica(made, registry), replica(made, registry), tolerance=0.0)
    assert (outcome.num_steps, outcome.parting) == (NUM_STEPS, None)
    assert outcome.num_calls > NUM_STEPS
    assert compare_tokens(made, replica(made, registry), tolerance=1e-5).parting is None


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (WINDOWS, {"overlap": True, "ep": False}),
        (HYBRIDS["qwen3_next"], {"ep": True}),
        (FAMILIES["llama"], {"pp": 2, "num_pages": 20}),
    ],
    ids=["windows", "states", "stages"],
)
def test_steps_of_lanes_are_run_again_as_those_of_one(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, config: PretrainedConfig, changes: dict[str, object]
) -> None:
    """One process gives the tokens that the lanes were told."""
    oracle = write_oracle(f"lanes {config.model_type}", config)
    made = recorded(oracle, registry, tmp_path / "steps", dp_attention=2, num_threads=1, step_deadline=20.0, **changes)
    assert len(made.steps) == NUM_STEPS
    seats = {item.seat for each in made.steps for item in each.step.each()}
    assert min(seats) < 3 <= max(seats), "both lanes had requests"
    assert not any(each.step.lanes for each in made.steps)
    assert compare_tokens(made, replica(made, registry), tolerance=1e-4).parting is None
    outcome = compare_replicas(made, replica(made, registry), replica(made, registry), tolerance=0.0)
    assert (outcome.num_steps, outcome.parting) == (NUM_STEPS, None)


def test_other_tokens_than_the_recorded_ones_are_noticed(llama: Oracle, registry: Registry, tmp_path: Path) -> None:
    made = recorded(llama, registry, tmp_path / "steps")
    place = next(index for index, each in enumerate(made.steps) if each.step.run.greedy and each.token_ids[0])
    wrong = msgspec.structs.replace(made.steps[place], token_ids=[(3,), *made.steps[place].token_ids[1:]])
    assert made.steps[place].token_ids[0] != (3,)
    spoilt = made._replace(steps=[*made.steps[:place], wrong, *made.steps[place + 1 :]])
    parting = compare_tokens(spoilt, replica(made, registry)).parting
    assert parting is not None
    assert (parting.step, parting.layer, parting.request_id) == (place, None, wrong.request_ids[0])


class Defect:
    """In one call of one layer, the rows of one request are a little wrong."""

    def __init__(self, broken: Replica, *, step: int, layer: int, row: int) -> None:
        self.relay, self.calls = broken.socket.relay, 0
        self.attend = self.relay.attend
        self.step, self.layer, self.row = step, layer, row
        self.relay.attend = self

    def __call__(self, *given: object) -> None:
        self.attend(*given)
        step, layer = divmod(self.calls, 2)
        self.calls += 1
        if (step, layer) == (self.step, self.layer):
            out = given[-1]
            assert isinstance(out, torch.Tensor)
            out[self.row] += 0.01 * out[self.row].abs().max()


@pytest.mark.parametrize(("step", "layer", "item"), [(0, 1, 0), (7, 0, 2), (19, 1, 1)])
def test_a_planted_defect_is_found_at_its_step_layer_and_request(
    llama: Oracle, registry: Registry, tmp_path: Path, *, step: int, layer: int, item: int
) -> None:
    made = recorded(llama, registry, tmp_path / "steps")
    lengths = made.steps[step].step.columns().num_tokens
    item = min(item, len(lengths) - 1)
    broken = replica(made, registry)
    Defect(broken, step=step, layer=layer, row=int(lengths[: item + 1].sum()) - 1)
    parting = compare_replicas(made, replica(made, registry), broken).parting
    assert parting is not None
    assert (parting.step, parting.layer, parting.request_id) == (step, layer, made.steps[step].request_ids[item])
    assert 0.001 < parting.amount <= 0.011


def test_a_wrong_head_is_found_in_the_logits(llama: Oracle, registry: Registry, tmp_path: Path) -> None:
    made = recorded(llama, registry, tmp_path / "steps")
    broken = replica(made, registry)
    model = broken._runner.parts.model
    compute, seen = model.logits, list[int]()

    def wrong(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        seen.append(len(logits))
        if sum(map(bool, seen)) == 4 and len(logits):
            logits[-1, 5] = torch.nan
        return logits

    model.logits = wrong  # type: ignore[method-assign]
    parting = compare_replicas(made, replica(made, registry), broken).parting
    sampling = [each for each in made.steps if any(item.samples for item in each.step.each())]
    assert parting is not None
    assert (parting.step, parting.layer) == (sampling[3].step.number, None)
    samplers = [index for index, item in enumerate(sampling[3].step.each()) if item.samples]
    assert parting.request_id == sampling[3].request_ids[samplers[-1]]
    assert "the logits" in str(parting)


def test_torch_and_triton_agree(llama: Oracle, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, which takes milliseconds for every program: the first steps of short prompts."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no CUDA device")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    precision = pytest.importorskip("enginery_ops_triton.kernels.precision")
    pytest.importorskip("enginery_attn_triton.backend")
    if not precision.INTERPRETED.value:
        pytest.skip("triton was imported for the compiler in this process")
    made = recorded(llama, registry, tmp_path / "steps", num_steps=5, longest=7)
    interpreted = Registry.load(blocked=("ops-triton",))
    outcome = compare_replicas(made, replica(made, interpreted, "torch"), replica(made, interpreted, "triton"))
    assert outcome.parting is None
    assert outcome.num_calls == 10
    assert outcome.largest is not None
    assert 0 < outcome.largest.amount < 1e-4


# Files


def test_a_version_that_is_not_known_is_refused(
    llama: Oracle, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_module, "STORED_VERSION", STORED_VERSION + 1)
    asked = options(llama, record_steps=(1, str(tmp_path / "steps")))
    Engine.build(asked, registry)
    monkeypatch.undo()
    said = f"holds steps of version {STORED_VERSION + 1}, and this engine reads version {STORED_VERSION}"
    with pytest.raises(ConfigError, match=said):
        read_recording(tmp_path / "steps")


@pytest.mark.parametrize("content", [b"", b"no frames", (8).to_bytes(8, "little") + b"no steps", json.dumps([1] * 9).encode()])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="recorded steps"):
        read_recording(file)


def test_a_file_that_was_cut_off_has_the_whole_steps(llama: Oracle, registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    recorded(llama, registry, path)
    path.write_bytes(path.read_bytes()[:-3])
    assert len(read_recording(path).steps) == NUM_STEPS - 1


def test_recording_ends_before_a_step_that_fails(llama: Oracle, registry: Registry, tmp_path: Path) -> None:
    engine = Engine.build(options(llama, record_steps=(9, str(tmp_path / "steps"))), registry)
    engine.submit(greedy("a", llama.prompts[0], max_tokens=8))
    engine.step()
    launch = engine._runner.launch
    engine._runner.launch = lambda step: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine._runner.launch = launch  # type: ignore[method-assign]
    engine.submit(greedy("b", llama.prompts[1], max_tokens=8))
    drain(engine, {})
    assert [each.request_ids for each in read_recording(tmp_path / "steps").steps] == [["a"]]


@pytest.mark.parametrize(("asked", "said"), [((0, "steps"), "record_steps is 0"), ((3, "/nowhere/steps"), "cannot be recorded")])
def test_what_cannot_be_recorded_is_refused_at_the_start(
    llama: Oracle, registry: Registry, asked: tuple[int, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Engine.build(options(llama, record_steps=asked), registry)


# The command


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["replay", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command_says_where_backends_part(
    llama: Oracle, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps"
    made = recorded(llama, registry, path, attention_backend="torch")
    code, said = run(str(path))
    assert code == 0
    num_greedy = sum(each.step.run.greedy for each in made.steps)
    assert f"torch and the recorded tokens agree in {num_greedy} of {NUM_STEPS} steps;" in said
    code, said = run(str(path), "--attention-backend", "torch", "--against", "torch")
    assert code == 0
    assert f"torch and torch agree in {NUM_STEPS} of {NUM_STEPS} steps and {2 * NUM_STEPS} calls of attention" in said
    with monkeypatch.context() as patch:
        patch.setattr("enginery.engine.replay.compare_tokens", lambda *_, **__: Outcome(0, 0, None, None))
        code, said = run(str(path))
    assert code == 1, "who asks a script for it would take 0 for equal"
    assert said.startswith(f"torch ran {NUM_STEPS} steps, and nothing was compared: in none are all tokens greedy")
    outcomes = []

    def parted(recording: Recording, first: Replica, second: Replica, *, tolerance: float | None) -> Outcome:
        Defect(second, step=4, layer=1, row=0)
        outcomes.append(compare_replicas(recording, first, second, tolerance=tolerance))
        return outcomes[-1]

    monkeypatch.setattr("enginery.engine.replay.compare_replicas", parted)
    code, said = run(str(path), "--against", "torch", "--tolerance", "0.0001")
    assert code == 1
    assert f"torch and torch part at step 4, attention of layer 1, request {made.steps[4].request_ids[0]}" in said


def test_the_flag_takes_a_number_and_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from enginery.config.sources import engine_options

    assert engine_options({}, {"ENGINERY_RECORD_STEPS": "10,steps.bin"}).record_steps == (10, "steps.bin")
    assert EngineOptions().record_steps is None
