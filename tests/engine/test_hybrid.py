"""A model of MLA and gated linear layers through the real engine: its tokens are a float64 reference's, however it is served."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
import torch
from engine.hybrid_model import BatchAndFlag, BatchOnly, WithoutHook
from engine.hybrid_reference import HybridOracle, write_hybrid
from installed import install
from pairwise import EVERYTHING, crossed, in_turn, pairwise, spread
from parity.engine_driver import RecordingModel, assert_greedy, drain, generate, greedy
from parity.oracle import NUM_GREEDY
from parity.test_http import train_tokenizer
from transformers import PreTrainedTokenizerFast

from enginery.attention.composite import Composite
from enginery.cli.main import main
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import AttnBackend
from enginery.contracts.batch import Phase
from enginery.contracts.step import RunSizes, StepInput
from enginery.engine.build import BuiltParts, build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

UNLIMITED = 4096
LAYERS = {"latent last": (3,), "latent first": (0,)}
HOOKED = ("batch-only", "batch-and-flag")
RAGGED = {"one-shot": 512, "chunked": 24}  # with the keys and values made at once
LONG = 5  # the prompt of 64 tokens
SHORT = 0  # that of 5


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test model as an installed distribution."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "enginery-hybrid", "engine.hybrid_model", name="hybrid")
    return folder


@pytest.fixture(scope="module")
def registry(site: Path) -> Iterator[Registry]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield Registry.load()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> dict[str, HybridOracle]:
    made = {}
    for name, latent_layers in LAYERS.items():
        folder = tmp_path_factory.mktemp("hybrid")
        tokenizer.save_pretrained(folder)
        made[name] = write_hybrid(folder, latent_layers=latent_layers, vocab_size=len(tokenizer))
    return made


@pytest.fixture
def oracle(oracles: dict[str, HybridOracle]) -> HybridOracle:
    return oracles["latent last"]


def options(oracle: HybridOracle, **changes: object) -> EngineOptions:
    return EngineOptions(**{"model": str(oracle.folder), "num_pages": 400, "max_batch_requests": 8, "device": "cpu", **changes})


@dataclass
class Served:
    """An engine, its softmax leaf, and the steps it has made."""

    engine: Engine
    leaf: WithoutHook
    steps: list[StepInput]
    preempted: list[str]

    @property
    def num_prefills(self) -> int:
        """Steps in which a request is at its prompt, or at tokens to be recomputed."""
        return sum(step.num_decode < step.num_items for step in self.steps)


def serve(registry: Registry, asked: EngineOptions) -> Served:
    parts = build_parts(asked, registry)
    engine = Engine(parts, registry, asked)
    return Served(engine, softmax_leaf(parts), *watched(engine))


def softmax_leaf(parts: BuiltParts) -> WithoutHook:
    """Under the hybrid and MLA."""
    backend: AttnBackend = parts.step.relay.backend
    while isinstance(backend, Composite):
        backend = backend.children[0].backend
    return backend  # type: ignore[return-value]


def watched(engine: Engine) -> tuple[list[StepInput], list[str]]:
    """Every step from now on that is not empty, and ids of the requests that were preempted."""
    steps, preempted = list[StepInput](), list[str]()
    original = engine._scheduler.next_step

    def noting(sizes: RunSizes) -> StepInput:
        step = original(sizes)
        preempted.extend(engine._scheduler.preempted)
        if step.items:
            steps.append(step)
        return step

    engine._scheduler.next_step = noting  # type: ignore[method-assign]
    return steps, preempted


# The numbers


@pairwise(
    ("layers", LAYERS),
    ("mla_prefill, at_once", [("auto", 512), ("auto", 24), ("absorbed", 512), *RAGGED.items()]),
    ("chunk", [16, UNLIMITED]),
)
def test_logits_of_a_prompt_are_within_1e_4(
    oracles: dict[str, HybridOracle], registry: Registry, layers: str, mla_prefill: str, at_once: int, chunk: int
) -> None:
    oracle = oracles[layers]
    asked = options(oracle, max_batch_tokens=chunk, mla_prefill=mla_prefill, mla_chunk_tokens=at_once)
    parts = build_parts(asked, registry)
    recording = RecordingModel(parts.step.model)
    engine = Engine(dataclasses.replace(parts, step=parts.step._replace(model=recording)), registry, asked)
    engine.submit(greedy("a", oracle.prompts[LONG], max_tokens=1, prompt_logprobs=0))
    drain(engine, {})
    actual = torch.cat(recording.recorded)  # the prompt's rows chunk by chunk, and last the one that is sampled from
    expected = oracle.logits(oracle.prompts[LONG])
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=0)


@in_turn(("layers", LAYERS), ("page_size, chunk, batch", crossed([1, 16], [16, UNLIMITED], [1, 7])))
def test_64_greedy_tokens_are_equal(
    oracles: dict[str, HybridOracle], registry: Registry, *, layers: str, page_size: int, chunk: int, batch: int
) -> None:
    oracle = oracles[layers]
    asked = options(oracle, page_size=page_size, num_pages=6400 // page_size, max_batch_tokens=chunk)
    prompts = oracle.prompts if batch == 7 else oracle.prompts[LONG:6]
    assert_greedy(oracle, generate(Engine.build(asked, registry), prompts), prompts)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batches": True},
        {"prefill_attention_backend": "torch", "decode_attention_backend": "without-hook"},
        {"prefill_attention_backend": "batch-only", "decode_attention_backend": "torch", "micro_batches": True},
    ],
    ids=str,
)
def test_other_composites_around_the_hybrid_change_no_token(
    oracle: HybridOracle, registry: Registry, changes: dict[str, object]
) -> None:
    engine = Engine.build(options(oracle, max_batch_tokens=48, **changes), registry)
    assert_greedy(oracle, generate(engine, oracle.prompts))


@pytest.mark.parametrize("micro_batches", [False, True])
def test_one_plugin_serves_both_kinds_of_layers_under_one_name(
    oracle: HybridOracle, registry: Registry, *, micro_batches: bool
) -> None:
    """Hole 2: both backends had the id `both#0`, so that either took the other's plan."""
    asked = options(oracle, attention_backend="both", linear_attention_backend="both", micro_batches=micro_batches)
    parts = build_parts(asked, registry)
    assert parts.choice.attention.name == "both"
    assert set(parts.choice.attention.by_role) == {"softmax", "recurrent"}
    ids = re.findall(r"target/0/(softmax|recurrent)/both#(\d+)", parts.step.relay.backend_id)
    assert [part for part, _ in ids] == ["softmax", "recurrent"]
    assert len({number for _, number in ids}) == 2
    assert_greedy(oracle, generate(Engine(parts, registry, asked), oracle.prompts))


def test_the_kit_tries_both_kinds_of_layers_of_one_plugin(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        with pytest.raises(SystemExit) as end:
            main(["test-backend", "both", "--json", "-k", "mixed"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["message"] for row in rows if row["outcome"] == "failed"] == []
    assert {row["traits"]["kind of layer"] for row in rows if row["traits"]} == {"softmax", "MLA", "recurrent"}
    assert not end.value.code


# States


def test_requests_that_wait_for_a_state_slot_get_a_clean_one(oracle: HybridOracle, registry: Registry) -> None:
    served = serve(registry, options(oracle, max_batch_requests=2, max_batch_tokens=16))
    assert_greedy(oracle, generate(served.engine, oracle.prompts))
    assert {seat for step in served.steps for seat in step.columns().seat.tolist()} <= {0, 1}


def test_preemption_changes_no_token(oracle: HybridOracle, registry: Registry) -> None:
    served = serve(registry, options(oracle, num_pages=18, max_batch_tokens=64))
    assert_greedy(oracle, generate(served.engine, oracle.prompts))
    assert len(served.preempted) > 0


def test_requests_that_are_aborted_midway_disturb_nobody(oracle: HybridOracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle, max_batch_tokens=32, max_batch_requests=3), registry)
    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(oracle.prompts):
        engine.submit(greedy(f"leaver-{index}", prompt[::-1]))
        engine.submit(greedy(str(index), prompt))
    for index in range(7):
        for output in (output for _ in range(3 + 2 * index) for output in engine.step()):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.abort(f"leaver-{index}")
    drain(engine, tokens)
    assert_greedy(oracle, [tokens[str(index)] for index in range(7)])


def served_after(engine: Engine, prompt: list[int], **changes: object) -> tuple[list[int], int]:
    """Its answer, and how many tokens of the prompt were found in the cache."""
    engine.submit(greedy("a", prompt, **changes))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert all(output.error is None for output in outputs)
    (found,) = {output.num_cached_tokens for output in outputs}
    return [token for output in outputs for token in output.token_ids], found


@in_turn(("page_size", [1, 16]), ("overlap", [False, True]))
def test_the_same_prompt_goes_on_from_its_last_page(
    oracle: HybridOracle, registry: Registry, *, page_size: int, overlap: bool
) -> None:
    asked = options(oracle, page_size=page_size, num_pages=6400 // page_size, overlap=overlap)
    engine = Engine.build(asked, registry)
    for length in spread((64, 49, 33, 16, 17), 3):
        prompt = oracle.prompts[LONG][64 - length :]
        before, again = served_after(engine, prompt), served_after(engine, prompt)
        assert_greedy(oracle, [before[0], again[0]], [prompt, prompt])
        assert (before[1], again[1]) == (0, (length - 1) // page_size * page_size)


@pytest.mark.parametrize(("backend", "steps"), [("linear", 1), ("both", 2)])
def test_a_prompt_is_one_step_where_its_state_is_kept_amid_it(
    oracle: HybridOracle, registry: Registry, *, backend: str, steps: int
) -> None:
    """A backend that does not claim it is given the last page's end in a step of its own, and the rest in another."""
    served = serve(registry, options(oracle, linear_attention_backend=backend, attention_backend="both"))
    for prompt, expected in ((oracle.prompts[LONG], steps), (oracle.prompts[LONG], 1)):  # the second goes on from that end
        served.steps.clear()
        assert_greedy(oracle, [served_after(served.engine, prompt)[0]], [prompt])
        assert served.num_prefills == expected


def test_a_branch_goes_on_from_where_it_was_recomputed_once(oracle: HybridOracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle), registry)
    shared, found = oracle.prompts[LONG][:40], []
    for number in range(3):
        prompt = [*shared, *oracle.prompts[LONG - 1][number : number + 20]]
        answer, count = served_after(engine, prompt)
        assert_greedy(oracle, [answer], [prompt])
        found.append(count)
    assert found == [0, 0, 32]


def test_a_chunks_end_lets_a_branch_go_on_at_the_second_sighting(oracle: HybridOracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle, max_batch_tokens=16), registry)
    shared, found = oracle.prompts[LONG][:40], []
    for number in range(2):
        prompt = [*shared, *oracle.prompts[LONG - 1][number : number + 20]]
        answer, count = served_after(engine, prompt)
        assert_greedy(oracle, [answer], [prompt])
        found.append(count)
    assert found == [0, 32]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_next_turn_goes_on_from_the_answers_last_page(oracle: HybridOracle, registry: Registry, *, overlap: bool) -> None:
    engine = Engine.build(options(oracle, overlap=overlap), registry)
    prompt = oracle.prompts[LONG]
    answer, _ = served_after(engine, prompt)
    turn = [*prompt, *answer, *oracle.prompts[SHORT]]
    second, found = served_after(engine, turn)
    assert_greedy(oracle, [second], [turn])
    assert found == (len(prompt) + len(answer) - 1) // 16 * 16
    assert set(engine.meter.stats().pages) == {"full", "state"}


# One hook, three ways to have it


@pairwise(("leaf", HOOKED), ("mla_prefill, at_once", RAGGED.items()), ("chunk", [16, UNLIMITED]))
def test_a_child_with_the_hook_is_asked_once_for_each_batch_that_prefills(
    oracle: HybridOracle, registry: Registry, leaf: str, mla_prefill: str, at_once: int, chunk: int
) -> None:
    ragged = {"mla_prefill": mla_prefill, "mla_chunk_tokens": at_once}
    asked = options(oracle, attention_backend=leaf, max_batch_tokens=chunk, prefix_cache=False, **ragged)
    served = serve(registry, asked)
    assert_greedy(oracle, generate(served.engine, oracle.prompts))
    assert isinstance(served.leaf, BatchOnly)
    assert 0 < served.num_prefills < len(served.steps)
    assert len(served.leaf.asked) == served.num_prefills
    assert {batch.phase for batch in served.leaf.asked} == {Phase.PREFILL}
    assert set(served.leaf.planned) == set(served.leaf.attended) == {Phase.DECODE}
    assert (max(served.leaf.ragged) > 0) == (mla_prefill == "chunked" and chunk == 16)
    if isinstance(served.leaf, BatchAndFlag):
        assert set(served.leaf.flags) == {mla_prefill == "one-shot"}


@pytest.mark.parametrize("leaf", HOOKED)
def test_with_auto_a_child_with_the_hook_is_asked_where_it_is_cheaper(oracle: HybridOracle, registry: Registry, leaf: str) -> None:
    served = serve(registry, options(oracle, attention_backend=leaf, prefix_cache=False))
    assert isinstance(served.leaf, BatchOnly)
    assert_greedy(oracle, generate(served.engine, [oracle.prompts[SHORT]]), [oracle.prompts[SHORT]])
    assert served.leaf.asked == []
    assert Phase.PREFILL in served.leaf.attended
    assert_greedy(oracle, generate(served.engine, [oracle.prompts[LONG]]), [oracle.prompts[LONG]])
    assert len(served.leaf.asked) == 1
    assert_greedy(oracle, generate(served.engine, oracle.prompts))


@pytest.mark.parametrize("mla_prefill", [*RAGGED, "auto"])
def test_a_child_without_the_hook_is_absorbed_and_the_log_says_why(
    oracle: HybridOracle, registry: Registry, mla_prefill: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(registry, options(oracle, attention_backend="without-hook", mla_prefill=mla_prefill))
    with caplog.at_level(logging.WARNING, logger="enginery.attention.latent"):
        assert_greedy(oracle, generate(served.engine, oracle.prompts))
    denied = "one-shot" if mla_prefill == "auto" else mla_prefill
    said = rf".*/without-hook#\d+ denies MLA prefill {denied}: it has no init_mha_chunk_metadata; another strategy is taken"
    assert len([message for message in caplog.messages if re.fullmatch(said, message)]) == 1
    assert served.leaf.attended.count(Phase.PREFILL) == served.leaf.planned.count(Phase.PREFILL) == served.num_prefills > 0


# Over HTTP


@contextmanager
def server(folder: Path, site: Path, *flags: str) -> Iterator[tuple[openai.OpenAI, dict[str, str]]]:
    """A client of `engine serve` in a process of its own, and its decisions with their reasons."""
    command = [sys.executable, "-m", "enginery", "serve", "-m", str(folder), "--served-model-name", "hybrid", "--port", "0", *flags]
    path = os.pathsep.join([str(site), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            said = ""
            while not (found := re.search(r"ready: hybrid at (http://\S+),", said)):
                line = process.stdout.readline()
                assert line, said
                said += line
            info = httpx.get(found[1] + "/server_info", timeout=150).json()
            decisions = {made["setting"]: f"{made['value']}: {made['reason']}" for made in info["engine"]["decisions"]}
            yield openai.OpenAI(base_url=found[1] + "/v1", api_key="none", max_retries=0), decisions
        finally:
            process.terminate()
            process.stdout.read()
        assert process.wait(timeout=40) == 0


@pytest.mark.parametrize(
    ("leaf", "mla_prefill"), [("batch-and-flag", "chunked"), *([("without-hook", "one-shot")] if EVERYTHING else [])]
)
def test_a_child_with_the_hook_and_one_without_are_served_over_http(
    oracle: HybridOracle, site: Path, tokenizer: PreTrainedTokenizerFast, leaf: str, mla_prefill: str
) -> None:
    flags = ("--attention-backend", leaf, "--mla-prefill", mla_prefill, "--max-batch-tokens", "32", "--num-pages", "256")

    def complete(client: openai.OpenAI, prompt: list[int]) -> str:
        asked = dict(model="hybrid", prompt=prompt, max_tokens=NUM_GREEDY, temperature=0, extra_body={"ignore_eos": True})
        return client.completions.create(**asked).choices[0].text

    with server(oracle.folder, site, *flags) as (client, decisions), ThreadPoolExecutor(7) as pool:
        assert decisions["attention"].startswith(f"{leaf}: asked for")
        assert decisions["recurrent attention"].startswith("linear: ")
        texts = list(pool.map(partial(complete, client), oracle.prompts))
    assert texts == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in oracle.greedy]
