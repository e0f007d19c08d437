"""On a CPU decoding steps are recorded by default. They give transformers' tokens, and in every way of asking the eager ones'."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

import noise
import pytest
import torch
from offers import offering
from pairwise import in_turn
from parity.engine_driver import assert_greedy, drain, generate, greedy, options
from parity.oracle import EXPERT_FAMILIES, FAMILIES, Oracle
from quick_processes import run_python

from enginery.attention.axes import renewed
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import AttnBackendSpec
from enginery.contracts.ops import OpSpec
from enginery.contracts.request import GenerationRequest, SamplingParams, TokenLogprob
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.errors import StalePlan, Unsupported
from enginery.plugin.registry import Registry
from enginery.speculate.length import DraftLength
from enginery.worker.paths.captured_step import CapturedStep
from enginery.worker.paths.decode_capture import DecodeCapture, DecodeKey
from enginery.worker.paths.recorded_steps import RecordedSteps, recorded_sizes
from enginery.worker.paths.running_step import NAN_ERROR

compiled = pytest.importorskip("enginery_attn_cpu.native_part", reason="the plugin is not installed").kernels
pytestmark = pytest.mark.skipif(compiled is None, reason="its compiled part was not built")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def sizes_recorded(engine: Engine) -> list[int]:
    graphs = engine._runner.graphs
    assert isinstance(graphs, RecordedSteps)
    return sorted(step.batch.num_requests for step in graphs.captured.values())


@in_turn(("count", [1, 3, 5, 7]), ("overlap", [False, True]), ("dtype", ["float32", "bfloat16"]))
def test_recorded_steps_give_the_references_tokens(
    llama: Oracle, registry: Registry, *, count: int, overlap: bool, dtype: str
) -> None:
    engine = Engine.build(options(llama, overlap=overlap, dtype=dtype), registry)
    answers = generate(engine, llama.prompts[:count])
    if dtype == "float32":
        assert_greedy(llama, answers, llama.prompts[:count])
    assert answers == generate(Engine.build(options(llama, dtype=dtype, graphs=False), registry), llama.prompts[:count])
    assert engine.meter.stats().num_graph_steps >= len(answers[0]) - 2
    assert min(size for size in recorded_sizes(16) if size >= count) in sizes_recorded(engine), "five are padded to six"


@pytest.mark.parametrize("drafter", ["eagle", "standalone"])
def test_steps_are_recorded_while_a_draft_model_guesses_nothing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """As where there is none. Steps that it follows or that verify run eagerly, before and after."""
    lengths = [0]
    monkeypatch.setattr(DraftLength, "of", lambda self, num_requests: lengths[-1])
    monkeypatch.setattr(DraftLength, "found", lambda self, num_requests: lengths[-1])
    asked = EngineOptions(dtype="float32", device="cpu", max_batch_requests=16, num_pages=64)
    plain, engine = (Engine.build(dataclasses.replace(asked, drafter=name), registry) for name in ("off", drafter))
    for turn, wanted in enumerate((0, 2, 0)):
        lengths.append(wanted)
        prompts, before = [[10 + turn, 5 + at, 8] * 5 for at in range(3)], engine.meter.stats()
        expected = generate(plain, prompts)
        assert generate(engine, prompts) == expected
        after = engine.meter.stats()
        assert (after.num_graph_steps - before.num_graph_steps > len(expected[0]) - 3) is (wanted == 0)
        assert (after.drafts.drafted > before.drafts.drafted) is (wanted > 0)
    assert sizes_recorded(engine) == [3]


@pytest.mark.parametrize("family", ["mistral", "qwen3", "glm4"])
def test_windows_and_other_families_are_recorded(write_oracle: Callable[..., Oracle], registry: Registry, family: str) -> None:
    oracle = write_oracle(family, FAMILIES[family])
    engine = Engine.build(options(oracle), registry)
    assert_greedy(oracle, generate(engine, oracle.prompts))
    assert sizes_recorded(engine)


def asks(llama: Oracle) -> list[GenerationRequest]:
    """Seeds, penalties, biases, log-probabilities, cuts and stops, each of another length."""
    wanted = [
        SamplingParams(temperature=0.9, seed=5),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=20, seed=6, logprobs=3),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3),
        SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=1.2, min_p=0.05, seed=7, logit_bias={3: 2.0, 9: -100.0}),
        SamplingParams(temperature=0.0),
    ]
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(llama.prompts[index]),
            params=dataclasses.replace(params, max_tokens=9 + 4 * index, ignore_eos=True),
        )
        for index, params in enumerate(wanted)
    ]


def run_as_they_arrive(
    engine: Engine, requests: Sequence[GenerationRequest], every: int
) -> dict[str, tuple[list[int], list[TokenLogprob]]]:
    """One more request after each `every` steps."""
    waiting, found = list(requests), {request.request_id: (list[int](), list[TokenLogprob]()) for request in requests}
    steps = 0
    while waiting or engine.has_work:
        if waiting and steps % every == 0:
            engine.submit(waiting.pop(0))
        for output in engine.step():
            assert output.error is None
            tokens, told = found[output.request_id]
            tokens.extend(output.token_ids)
            told.extend(output.logprobs or ())
        steps += 1
    return found


@in_turn(("every", [1, 3]), ("overlap", [False, True]), ("pages", [2000, 24]))
def test_every_way_of_sampling_is_as_in_eager_steps_while_requests_arrive_and_are_preempted(
    llama: Oracle, registry: Registry, *, every: int, overlap: bool, pages: int
) -> None:
    asked = options(llama, overlap=overlap, num_pages=pages, page_size=4)
    recorded, eager = Engine.build(asked, registry), Engine.build(dataclasses.replace(asked, graphs=False), registry)
    found, wanted = (run_as_they_arrive(engine, asks(llama), every) for engine in (recorded, eager))
    assert {name: tokens for name, (tokens, _) in found.items()} == {name: tokens for name, (tokens, _) in wanted.items()}
    for name, (_, told) in found.items():
        assert [each.token_id for each in told] == [each.token_id for each in wanted[name][1]]
        torch.testing.assert_close(
            torch.tensor([each.logprob for each in told]), torch.tensor([each.logprob for each in wanted[name][1]])
        )
    assert recorded.meter.stats().num_graph_steps > 20
    assert eager.meter.stats().num_graph_steps == 0


def test_prefix_hits_change_no_token(llama: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(llama, page_size=4), registry)
    for _ in range(3):
        assert_greedy(llama, generate(engine, llama.prompts[:4]), llama.prompts[:4])
    assert engine.meter.stats().num_graph_steps > 60


@pytest.mark.usefixtures("two_threads")
def test_other_numbers_of_threads_change_no_token(llama: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(llama), registry)
    for threads in (2, 1, 2):
        torch.set_num_threads(threads)
        assert_greedy(llama, generate(engine, llama.prompts[:2]), llama.prompts[:2])


def test_sizes_are_recorded_when_needed_and_the_rest_in_idle_moments(llama: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(llama, max_batch_requests=6), registry)
    assert sizes_recorded(engine) == []
    generate(engine, llama.prompts[:2], max_tokens=4)
    assert sizes_recorded(engine) == [2]
    while engine.prepare():
        pass
    assert sizes_recorded(engine) == [1, 2, 3, 4, 6]
    assert_greedy(llama, generate(engine, llama.prompts[:3]), llama.prompts[:3])


def test_more_requests_than_the_largest_size_are_no_matter_of_a_warning(
    llama: Oracle, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.build(options(llama), registry)
    generate(engine, [llama.prompts[0]] * 17, max_tokens=4)
    assert engine.meter.stats().num_graph_steps == 0
    assert "eagerly" not in caplog.text


@pytest.mark.parametrize("asked", [{"graphs": False}, {"check_attention": True}, {"attention_backend": "torch"}])
def test_the_flags_for_graphs_mean_the_same_here(llama: Oracle, registry: Registry, asked: dict[str, object]) -> None:
    engine = Engine.build(options(llama, **asked), registry)
    generate(engine, llama.prompts[:1], max_tokens=4)
    assert engine._runner.graphs is None


def silenced(registry: Registry, kind: type[OpSpec | AttnBackendSpec], name: str) -> Registry:
    """With one descriptor that knows nothing of recordings."""
    offers = tuple(
        dataclasses.replace(offer, spec=dataclasses.replace(offer.spec, record_calls=None)) if offer.name == name else offer
        for offer in registry.offers(kind)
    )
    return offering(registry, kind, *offers)


@pytest.mark.parametrize(("kind", "name"), [(OpSpec, "cpu-compiled"), (AttnBackendSpec, "cpu")])
def test_a_plugin_that_states_nothing_is_not_recorded(
    llama: Oracle, registry: Registry, caplog: pytest.LogCaptureFixture, kind: type[OpSpec | AttnBackendSpec], name: str
) -> None:
    with caplog.at_level(logging.DEBUG):
        parts = build_parts(options(llama), silenced(registry, kind, name))
    assert parts.captured.graphs is None
    assert f"decoding runs eagerly: {name}, from plugin" in caplog.text
    assert "states no record_calls" in caplog.text


def test_a_model_that_reads_numbers_back_decodes_eagerly_and_right(
    write_oracle: Callable[..., Oracle], registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    mixtral = write_oracle("mixtral", EXPERT_FAMILIES["mixtral"])
    engine = Engine.build(options(mixtral), registry)
    with caplog.at_level(logging.DEBUG):
        assert_greedy(mixtral, generate(engine, mixtral.prompts[:2]), mixtral.prompts[:2])
    assert caplog.text.count("a step of 2 requests was not recorded") == 1
    assert caplog.text.count("was not recorded, no sizes are left") == 1
    assert engine.meter.stats().num_graph_steps == 0
    assert not engine._runner.graphs.waiting()


def test_a_size_that_is_refused_takes_no_other_with_it(
    llama: Oracle, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two requests are padded to three then. What is refused twice for one reason is the model's matter: no size is left."""
    capture, why = DecodeCapture.capture, iter(["one reason", "another", "another"])

    def refusing(self: DecodeCapture, key: DecodeKey) -> CapturedStep:
        if key.size in (2, 4, 6):
            raise Unsupported(next(why))
        return capture(self, key)

    monkeypatch.setattr(DecodeCapture, "capture", refusing)
    engine = Engine.build(options(llama, max_batch_requests=8), registry)
    assert_greedy(llama, generate(engine, llama.prompts[:2]), llama.prompts[:2])
    assert engine._runner.graphs.sizes == (1, 3, 4, 6, 8)
    assert 3 in sizes_recorded(engine)
    assert engine.meter.stats().num_graph_steps > 10
    with caplog.at_level(logging.DEBUG):
        while engine.prepare():
            pass
    assert engine._runner.graphs.sizes == ()
    assert "[1, 3, 6, 8] are left: Unsupported: another" in caplog.text
    assert_greedy(llama, generate(engine, llama.prompts[:3]), llama.prompts[:3])


def test_recordings_take_no_more_memory_than_is_planned_for_them(llama: Oracle, registry: Registry) -> None:
    asked = options(llama, num_pages=100)
    engine, eager = Engine.build(asked, registry), build_parts(dataclasses.replace(asked, graphs=False), registry)
    planned = build_parts(asked, registry).memory.workspace_bytes - eager.memory.workspace_bytes
    while engine.prepare():
        pass
    storages: dict[int, int] = {}

    def count(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for each in value:
                count(each)

    for step in engine._runner.graphs.captured.values():
        for _, _, result in step.graph.kept:
            count(result)
    assert 0 < sum(storages.values()) <= planned


def test_a_request_that_fails_in_a_recorded_step_fails_as_in_an_eager_one(llama: Oracle, registry: Registry) -> None:
    """The compiled kernels look at every id and slot in each replay."""
    engine = Engine.build(options(llama), registry)
    engine.submit(greedy("0", llama.prompts[0], max_tokens=8))
    while engine.meter.stats().num_graph_steps < 2:
        engine.step()
    step = next(iter(engine._runner.graphs.captured.values()))
    with torch.inference_mode():
        step.packed[0].fill_(10**6)
        with pytest.raises(IndexError, match="row 1000000 is not in"):
            step.graph.replay()
    drain(engine, {})


def test_stages_are_not_recorded_and_other_ranks_are(llama: Oracle, registry: Registry) -> None:
    from enginery.config.resolve import resolve
    from enginery.worker.choice import choose

    chosen = choose(options(llama), registry)
    assert chosen.settings.max_graph_requests == 16
    for mesh, most in (({"tp": 2}, 16), ({"dp_attention": 2}, 16), ({"pp": 2}, 0)):
        asked = EngineOptions(model=str(llama.folder), device="cpu", **mesh)
        assert resolve(asked, chosen.device_facts, chosen.facts, config=chosen.checkpoint.config).max_graph_requests == most


def test_on_gpus_stages_and_lanes_capture_no_pieces(llama: Oracle, registry: Registry) -> None:
    from enginery.config.resolve import resolve
    from enginery.worker.choice import choose

    chosen = choose(options(llama), registry)
    gpu = dataclasses.replace(chosen.device_facts, kind="cuda", compute_capability=(9, 0))
    for mesh, are_captured in (({"tp": 2}, [True, True]), ({"dp_attention": 2}, [True, False]), ({"pp": 2}, [True, False])):
        asked = EngineOptions(model=str(llama.folder), device="cuda", **mesh)
        settings = resolve(asked, gpu, chosen.facts, config=chosen.checkpoint.config)
        assert [settings.max_graph_requests > 0, settings.max_piece_tokens > 0] == are_captured


@pytest.mark.parametrize("logprobs", [None, 1])
def test_nan_logits_in_a_recorded_step_end_their_request_alone(llama: Oracle, registry: Registry, logprobs: int | None) -> None:
    engine, told, ends = Engine.build(options(llama), registry), {"0": list[int](), "1": list[int]()}, dict[str, object]()
    for name in told:
        engine.submit(greedy(name, llama.prompts[int(name)], max_tokens=8, logprobs=logprobs))
    while engine.has_work:
        for output in engine.step():
            told[output.request_id].extend(output.token_ids)
            ends[output.request_id] = output.error or output.finish_reason
        if len(told["0"]) == len(told["1"]) == 4:
            assert engine.meter.stats().num_graph_steps >= 2
            with torch.inference_mode():
                engine._runner.parts.model.embedding[told["0"][-1]] = torch.nan
    assert ends == {"0": NAN_ERROR, "1": "length"}
    assert [len(tokens) for tokens in told.values()] == [4, 8]


def test_plans_of_tables_that_were_made_anew_are_stale_and_larger_steps_are_refused(llama: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(llama), registry)
    engine._runner.graphs.provide(DecodeKey(6, 1, followed=False))
    (step,), relay = engine._runner.graphs.captured.values(), engine._runner.parts.relay
    relay.refresh(step.batch.plan, step.batch)
    assert relay.ask("init_graph_state", max_batch_size=4, max_num_tokens=4)
    with pytest.raises(StalePlan, match="made anew since"):
        relay.refresh(step.batch.plan, step.batch)
    with pytest.raises(Unsupported, match="captures no step of 6 requests"):
        relay.plan(renewed(step.batch), capture=True)


def test_torch_s_compiler_is_not_imported_to_record_steps() -> None:
    """It takes 2 s of a processor and 100 MB, in every server's engine."""
    code = f"""
import sys
from enginery import LLM, SamplingParams
assert "torch._dynamo" not in sys.modules
llm = LLM(**{noise.OPTIONS | {"num_pages": 32, "num_threads": 1, "device": "cpu"}!r})
llm.generate([7, 8], SamplingParams(max_tokens=4, ignore_eos=True))
print(llm._engine.meter.stats().num_graph_steps > 0, "torch._dynamo" in sys.modules)
"""
    done = run_python("-c", code, capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.split() == ["True", "False"]
