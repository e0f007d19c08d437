"""Drafts that branch change no token, and leave in memory what plain decoding leaves there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from engine.test_grammars_ahead import TRAPS, Guesses, answer
from engine.test_kinds_at_random import WINDOWS
from engine.test_speculation import ASKS, GRAMMARS, TOKENS, VOCABULARY, Scripted, answers_of, used_at_random
from offers import offering
from pairwise import in_turn
from parity.engine_driver import drain, options
from parity.oracle import FAMILIES, Oracle
from parity.test_hybrids import HYBRIDS

from enginery.config.schema import EngineOptions
from enginery.contracts.attention import AttnBackendSpec
from enginery.contracts.drafting import DraftAsk, DrafterSpec, DraftTree
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.errors import ConfigError, PluginError, Unsupported
from enginery.plugin.registry import Registry
from enginery_attn_cpu import native_part
from enginery_attn_torch.backend import TorchAttention

KINDS = ("right", "wrong", "random", "comb", "out of range", "some")
BACKENDS = ("torch", "cpu") if native_part.kernels is not None else ("torch",)  # without a compiler the second is not there


def backend_of(name: str, asked: str) -> str:
    """Latents have one that verifies trees of them."""
    return "torch" if name == "deepseek-v2" else asked


class Branching(Scripted):
    """Trees by what the requests will say. Where they are right, wrong guesses lie between, so that what stands has to be moved."""

    def __init__(self, kind: str, answers: dict[tuple[int, ...], list[int]], seed: int = 0) -> None:
        super().__init__(kind, answers, seed)
        self.num_trees = 0

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        self.known |= {ask.key for ask in asks}
        return [self._tree(list(ask.token_ids), ask.most) for ask in asks]

    def _tree(self, tokens: list[int], most: int) -> Sequence[int]:
        prompt = next(prompt for prompt in self.answers if tuple(tokens[: len(prompt)]) == prompt)
        right = self.answers[prompt][len(tokens) - len(prompt) :]
        kind = self.chance.choice(["nothing", "chain", "right", "random"]) if self.kind == "some" else self.kind
        if kind == "nothing":
            return []
        if kind == "chain":
            return right[:most]
        self.num_trees += 1
        tree = self._random(right, most) if kind == "random" else self._comb(right, kind)
        return DraftTree(tree.tokens[:most], tree.parents[:most])

    def _comb(self, right: list[int], kind: str) -> DraftTree:
        """At each depth guesses that are wrong, then one that is right."""
        found, parents, before = list[int](), list[int](), -1
        for place, token in enumerate(right):
            others = [(token + 1 + self.chance.randrange(VOCABULARY - 1)) % VOCABULARY for _ in range(1 + (kind == "comb"))]
            if kind == "out of range" and place == 1:
                others = [1 << 40]
            line = [*others, token] if kind != "wrong" else [*others, (token + 1) % VOCABULARY]
            parents += [before] * len(line)
            found += line
            before = len(found) - 1
        return DraftTree(tuple(found), tuple(parents))

    def _random(self, right: list[int], most: int) -> DraftTree:
        depths, found, parents = [0], list[int](), list[int]()
        for at in range(most):
            parents.append(self.chance.randrange(-1, at))
            depths.append(depths[parents[-1] + 1] + 1)
            knows = depths[-1] <= len(right) and self.chance.random() < 0.6
            found.append(right[depths[-1] - 1] if knows else self.chance.randrange(VOCABULARY))
        return DraftTree(tuple(found), tuple(parents))


def with_trees(registry: Registry, drafter: object, *, says: bool = True) -> Registry:
    spec = DrafterSpec(
        name="scripted",
        api=(2, 0),
        summary="",
        most=16,
        build=lambda _: drafter,  # type: ignore[arg-type, return-value]
        trees=(lambda _: True) if says else None,
    )
    return offering(registry, DrafterSpec, dataclasses.replace(registry.offers(DrafterSpec)[0], spec=spec, name="scripted"))


def requests_of(oracle: Oracle, asks: dict[str, dict[str, object]] = ASKS) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=about,
            prompt_token_ids=tuple([3 + index, *oracle.prompts[index % 6]][: 20 + 7 * index]),
            params=SamplingParams(**{"max_tokens": TOKENS - index, "ignore_eos": True, **asked}),  # type: ignore[arg-type]
        )
        for index, (about, asked) in enumerate(asks.items())
    ]


def assert_equal_answers(
    registry: Registry, asked: EngineOptions, requests: Sequence[GenerationRequest], kind: str, *, length: int = 6
) -> tuple[Engine, Branching]:
    """With trees of a drafter that knows the answers, and tells them or not."""
    plainly = Engine.build(asked, registry)
    plain = answers_of(plainly, requests)
    scripted = Branching(kind, {request.prompt_token_ids: plain[request.request_id].tokens for request in requests})
    asked = dataclasses.replace(asked, drafter="scripted", draft_length=f"{length}")
    drafted = Engine.build(asked, with_trees(registry, scripted))
    for about, found in answers_of(drafted, requests).items():
        expected = plain[about]
        assert (found.tokens, found.reason) == (expected.tokens, expected.reason), about
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4), about
    if kind == "right":
        assert drafted.meter.num_steps < 0.7 * plainly.meter.num_steps
    assert scripted.num_trees > 10
    return drafted, scripted


WAYS: tuple[dict[str, object], ...] = (
    {"max_batch_tokens": 64},
    {"micro_batches": True, "max_batch_tokens": 48, "page_size": 4},
    {"overlap": True, "max_batch_tokens": 40, "page_size": 2},
    {"check_attention": True, "prefix_cache": False, "page_size": 1},
)


@in_turn(("name", ["llama", "qwen3", "deepseek-v2"]), ("kind", KINDS), ("way", range(len(WAYS))), ("backend", BACKENDS))
def test_each_is_told_what_plain_decoding_tells(
    write_oracle: Callable[..., Oracle], name: str, kind: str, way: int, backend: str
) -> None:
    oracle, registry = write_oracle(name, FAMILIES[name]), Registry.load()
    assert_equal_answers(
        registry, options(oracle, attention_backend=backend_of(name, backend), **WAYS[way]), requests_of(oracle), kind
    )


DEFECTS: dict[str, tuple[str, Callable[..., object]]] = {
    "nothing is moved": ("enginery.worker.runner.move_standing", lambda *given: None),
    "positions are those of rows": (
        "enginery.worker.layout.depths_of",
        lambda step: np.minimum(np.arange(step.decode_len), step.columns().num_drafts[: step.num_decode, None]),
    ),
    "numbers are those of rows": (
        "enginery.engine.sampling_input.depths_of",
        lambda step: np.tile(np.arange(step.decode_len), (step.num_decode, 1)),
    ),
    "rows see all before": ("enginery.worker.drafts.trees.seen_of", lambda parents: np.tri(parents.shape[1], dtype=bool)[None]),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_usual_mistake_changes_a_token(
    write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    oracle = write_oracle("llama", FAMILIES["llama"])
    requests = requests_of(oracle, {about: ASKS[about] for about in ("greedy", "seeded")})
    asked = options(oracle, attention_backend="torch")
    monkeypatch.setattr(*DEFECTS[defect])
    with pytest.raises(AssertionError):
        assert_equal_answers(Registry.load(), asked, requests, "comb")


@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_may_be_as_large_as_there_is_room(write_oracle: Callable[..., Oracle], backend: str) -> None:
    """More rows than a few, over a chunk of keys; alone, and beside others with fewer."""
    oracle, registry = write_oracle("llama", FAMILIES["llama"]), Registry.load()
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=4, ignore_eos=True)
    prompts = [tuple(range(3, 3 + count)) for count in (119, 30)]
    requests = [GenerationRequest(request_id=f"{len(each)}", prompt_token_ids=each, params=params) for each in prompts]
    asked = options(oracle, attention_backend=backend, max_batch_requests=40)
    engine, _ = assert_equal_answers(registry, asked, requests, "random", length=16)
    assert engine.meter.stats().drafts.accepted > 10


@pytest.mark.parametrize(("name", "kind"), [("llama", "right"), ("qwen3", "random")])
def test_keys_and_values_in_float8_are_moved_too(write_oracle: Callable[..., Oracle], name: str, kind: str) -> None:
    oracle = write_oracle(name, FAMILIES[name])
    asked = options(oracle, kv_dtype="fp8", attention_backend="torch", max_batch_tokens=64)
    requests = requests_of(oracle, {about: ASKS[about] for about in ("greedy", "seeded", "penalties")})
    assert_equal_answers(Registry.load(), asked, requests, kind)


@pytest.mark.skipif(len(BACKENDS) < 2, reason="the compiled part of enginery-attn-cpu was not built")
def test_a_step_may_prefill_with_one_backend_and_verify_trees_with_another(write_oracle: Callable[..., Oracle]) -> None:
    oracle = write_oracle("llama", FAMILIES["llama"])
    asked = options(oracle, prefill_attention_backend="cpu", decode_attention_backend="torch", max_batch_tokens=40, page_size=4)
    engine, _ = assert_equal_answers(Registry.load(), asked, requests_of(oracle), "comb")
    assert "prefill attention" in str(engine.facts.decisions)


@pytest.mark.parametrize("kind", ["right", "random", "out of range"])
def test_grammars_hold_behind_each_node(kind: str) -> None:
    requests = [
        GenerationRequest(
            request_id=f"{about} {heat}",
            prompt_token_ids=(place, *range(5, 20 + index)),
            params=SamplingParams(max_tokens=20, temperature=heat, seed=index, grammar=grammar, min_tokens=index),
        )
        for index, (about, grammar) in enumerate(GRAMMARS.items())
        for place, heat in enumerate((0.0, 1.0), start=9 + 2 * index)
    ]
    assert_equal_answers(Registry.load(), EngineOptions(num_pages=200, num_threads=1, dtype="float32"), requests, kind)


class OnBranches(Guesses):
    """Of its drafts the first ones alone, a trap beside them, then the others."""

    def __init__(self, drafts: dict[int, list[int]], trap: int) -> None:
        super().__init__(drafts)
        self.trap = trap

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        ((first, *others),) = super().propose(asks) if self.drafts else ([0],)
        tokens = (first, self.trap, *others)
        return [DraftTree(tokens[: asks[0].most], (-1, 0, 0, *range(2, 1 + len(others)))[: min(len(tokens), asks[0].most)])]


@pytest.mark.parametrize("kind", TRAPS)
def test_a_grammar_that_fails_on_a_branch_harms_nobody(kind: str) -> None:
    plain = answer("none", -1, None)[0]
    trap = next(token for token in range(3, 256) if token not in plain)
    guesses = OnBranches({at: plain[at : at + 4] for at in range(15)}, trap)
    assert answer(kind, trap, guesses, offer=with_trees) == (plain, None)


class Beside(Guesses):
    """Of its drafts, which are right, all, each with a wrong one in front."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        (right,) = super().propose(asks)
        tokens = [token for place, each in enumerate(right) for token in (250 + place, each)]
        before = [2 * place - 1 for place in range(len(right)) for _ in range(2)]
        return [DraftTree(tuple(tokens), tuple(before))[: asks[0].most]]


@in_turn(("kind", TRAPS), ("place", [1, 2, 5]))
def test_a_grammar_that_fails_behind_a_right_node_ends_the_answer_where_plain_decoding_ends_it(kind: str, place: int) -> None:
    plain = answer("none", -1, None)[0]
    trap = plain[place]
    guesses = Beside({at: plain[at : at + 4] for at in range(15)})
    assert answer(kind, trap, guesses, offer=with_trees) == answer(kind, trap, None)


@in_turn(("name", ["llama", "deepseek-v2"]), ("overlap", [False, True]), ("backend", BACKENDS))
def test_random_use_in_a_small_memory_breaks_no_promise(
    write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch, name: str, overlap: bool, backend: str
) -> None:
    """Requests come, are preempted, aborted and go on from cached prefixes; the memory is whole after each step."""
    oracle = write_oracle(name, FAMILIES[name])
    engine, counts = used_at_random(
        Registry.load(),
        monkeypatch,
        oracle,
        turns=150,
        script=Branching,
        offer=with_trees,
        overlap=overlap,
        attention_backend=backend_of(name, backend),
    )
    stats = engine.meter.stats()
    assert stats.num_preempted > 0
    assert counts["finished"] > 15
    assert stats.drafts.accepted > 0


# What is in memory


def kept(engine: Engine, pages: Sequence[int], count: int) -> torch.Tensor:
    """Keys and values of the first `count` tokens that lie in these pages, of all layers: [count, values]."""
    size = engine._runner.tables.page_size
    place = np.arange(count)
    slots = torch.from_numpy(np.asarray(pages)[place // size].astype(np.int64) * size + place % size)
    pool = engine._runner._pool
    assert pool is not None
    return torch.cat([pages.flatten(0, 1)[slots].flatten(1) for layer in pool._layers for pages in layer], 1)


def written_by_step(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, torch.Tensor]:
    """What is kept of each request's tokens when it ends, by id; after each step it is the same as far as it goes."""
    found: dict[str, torch.Tensor] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        for running in engine._scheduler.table.running:
            now = kept(engine, running.kv.pages, running.kv.num_written)
            before = found.get(running.request_id, now[:0])
            assert torch.equal(now[: len(before)], before), "what was kept stays"
            found[running.request_id] = now
    return found


@in_turn(("name", ["llama", "deepseek-v2"]), ("kind", ["right", "random", "comb"]), ("backend", BACKENDS))
def test_what_is_kept_is_what_plain_decoding_keeps(write_oracle: Callable[..., Oracle], name: str, kind: str, backend: str) -> None:
    oracle, registry = write_oracle(name, FAMILIES[name]), Registry.load()
    requests = requests_of(oracle, {about: ASKS[about] for about in ("greedy", "seeded", "penalties", "stops")})
    asked = options(oracle, attention_backend=backend_of(name, backend), page_size=4, max_batch_tokens=64)
    plain = written_by_step(Engine.build(asked, registry), requests)
    told = answers_of(Engine.build(asked, registry), requests)
    scripted = Branching(kind, {request.prompt_token_ids: told[request.request_id].tokens for request in requests})
    drafting = dataclasses.replace(asked, drafter="scripted", draft_length="6")
    engine = Engine.build(drafting, with_trees(registry, scripted))
    found = written_by_step(engine, requests)
    for about, values in found.items():
        both = min(len(values), len(plain[about]))
        assert both > 20
        assert torch.allclose(values[:both], plain[about][:both], atol=1e-4), about
    further = [
        dataclasses.replace(each, prompt_token_ids=(*each.prompt_token_ids, *told[each.request_id].tokens)) for each in requests
    ]
    expected = answers_of(Engine.build(asked, registry), further)
    for request in further:
        engine.submit(request)
    again: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            again.setdefault(output.request_id, []).extend(output.token_ids)
            before = next(len(each.prompt_token_ids) for each in requests if each.request_id == output.request_id)
            assert output.num_cached_tokens > before, "a part of its answer was cached"
    assert again == {about: each.tokens for about, each in expected.items()}


# Refused


def built(oracle: Oracle, registry: Registry, **changes: object) -> Engine:
    asked = options(oracle, drafter="scripted", draft_length="4", **changes)
    return Engine.build(asked, with_trees(registry, Branching("right", {})))


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("gemma2", WINDOWS, "the model has layers with sliding windows"),
        ("qwen3_next", HYBRIDS["qwen3_next"], "the model has recurrent layers"),
    ],
)
def test_layers_that_verify_chains_alone_are_refused_by_name(
    write_oracle: Callable[..., Oracle], name: str, config: object, why: str
) -> None:
    oracle = write_oracle(name, config)
    with pytest.raises(ConfigError, match=rf"--drafter is scripted, .* whose guesses branch, and {why}; chains alone"):
        built(oracle, Registry.load())


def test_a_window_that_no_context_outgrows_is_none(write_oracle: Callable[..., Oracle]) -> None:
    oracle = write_oracle("gemma2", WINDOWS)
    shortest = min(window for window in (WINDOWS.sliding_window,) if window)
    assert built(oracle, Registry.load(), max_model_len=shortest).facts


def test_backends_that_verify_chains_alone_are_refused_by_name(
    write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, registry = write_oracle("llama", FAMILIES["llama"]), Registry.load()
    offer = next(offer for offer in registry.offers(AttnBackendSpec) if offer.name == "torch")
    chains = dataclasses.replace(offer.spec.capabilities, trees=False)
    changed = dataclasses.replace(offer, spec=dataclasses.replace(offer.spec, capabilities=chains))
    with pytest.raises(Unsupported, match="trees of drafts is needed and not offered"):
        built(oracle, offering(registry, AttnBackendSpec, changed))
    monkeypatch.delattr(TorchAttention, "verify_mask")
    with pytest.raises(
        PluginError, match=r"torch claims to verify drafts that branch, and its TorchAttention has no hook verify_mask"
    ):
        built(oracle, registry, attention_backend="torch")


def test_trees_of_a_drafter_that_does_not_say_so_are_refused_by_name(write_oracle: Callable[..., Oracle]) -> None:
    oracle = write_oracle("llama", FAMILIES["llama"])
    (request, *_) = requests_of(oracle)
    scripted = Branching("right", {request.prompt_token_ids: [5] * 40})
    asked = options(oracle, drafter="scripted", draft_length="4", attention_backend="torch")
    engine = Engine.build(asked, with_trees(Registry.load(), scripted, says=False))
    engine.submit(request)
    drain(engine, {})
    assert "propose gave a DraftTree, and `trees` of its DrafterSpec does not say so" in engine.meter.stats().drafts.failure
