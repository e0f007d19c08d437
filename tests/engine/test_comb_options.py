"""How many tokens are verified beside the guesses of a draft model, in which order, and what is refused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from engine.draft_models import SAID, asking, assert_told, branching, by_itself, counts_of, embedded, prompt_of
from engine.test_kinds_at_random import WINDOWS
from engine.test_speculation import Told, answers_of
from offers import offering
from parity.oracle import FAMILIES, Oracle
from parity.test_hybrids import HYBRIDS

from enginery.contracts.attention import AttnBackendSpec
from enginery.contracts.drafting import DraftModelOptions, DraftTree
from enginery.contracts.request import GenerationRequest
from enginery.engine.engine import Engine
from enginery.errors import ConfigError, Unsupported
from enginery.plugin.registry import Registry
from enginery.speculate.combs import comb_parents
from enginery.worker.drafts import draws as draws_module
from enginery.worker.drafts.draws import beside
from enginery.worker.drafts.trees import deepest


def test_a_comb_is_the_chain_and_then_the_likeliest_others_of_each_depth() -> None:
    logits = torch.tensor([[0.1, 0.9, 0.3, 0.2], [0.4, 0.3, 0.2, 0.1]])
    found = beside(logits, torch.tensor([1, 3]), 2)
    assert found.tolist() == [[1, 2, 3], [3, 0, 1]]
    both = draws_module.verified_order([found, found + 4])
    assert both.tolist() == [[1, 5, 2, 3, 6, 7], [3, 7, 0, 1, 4, 5]]


def lengths_of_items(engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[dict[str, Told], set[int], set[int]]:
    """What each is told; how many drafts items have, and how far the longest way of a step's trees goes."""
    counts, depths, launch = set[int](), set[int](), engine._runner.launch

    def noted(step: object) -> object:
        drafted = step.columns().num_drafts[: step.num_decode]  # type: ignore[attr-defined]
        counts.update(drafted.tolist())
        if step.parents:  # type: ignore[attr-defined]
            depths.add(deepest(step))  # type: ignore[arg-type]
        return launch(step)  # type: ignore[arg-type]

    engine._runner.launch = noted  # type: ignore[method-assign, assignment]
    return answers_of(engine, requests), counts, depths


def test_where_there_is_no_room_siblings_are_left_out_before_guesses(registry: Registry) -> None:
    """Of rows, for many at once, and of tokens, at an answer's end."""
    requests = [asking(f"{at}", prompt_of(said), max_tokens=100 - 40 * at) for at, said in enumerate(SAID[:3])]
    expected = answers_of(Engine.build(embedded(), registry), requests)
    few = Engine.build(embedded(drafter="eagle", draft_length="4", max_batch_requests=18), branching(registry, "eagle", 2))
    found, counts, depths = lengths_of_items(few, requests)
    assert_told(found, expected)
    assert {5} <= counts, "a chain of four, and one beside its first"
    assert max(counts) == 12, "all of it, for who is alone"
    assert depths >= {4}


def test_as_many_guesses_are_made_as_pay_with_the_rows_that_they_take(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auto` lengths change, and what was right at each depth is learnt."""
    chance = random.Random(1)
    monkeypatch.setattr("enginery.speculate.length.DraftLength.of", lambda self, count: chance.choice((1, 2, 3)))
    requests = [asking(f"{at}", prompt_of(said), max_tokens=70) for at, said in enumerate(SAID[:3])]
    expected = answers_of(Engine.build(embedded(), registry), requests)
    engine = Engine.build(embedded(drafter="eagle", max_batch_requests=64), branching(registry, "eagle"))
    taught = list[tuple[int, int]]()
    assert engine._drafting is not None
    monkeypatch.setattr(engine._drafting.lengths, "told", taught.extend)
    found, _, depths = lengths_of_items(engine, requests)
    assert_told(found, expected)
    assert depths == {1, 2, 3}
    assert {drafted for drafted, _ in taught} == {1, 2, 3}
    assert all(accepted <= drafted for drafted, accepted in taught)


def test_what_is_asked_for_is_said_and_counted(registry: Registry) -> None:
    engine = Engine.build(embedded(drafter="eagle", draft_length="3"), branching(registry, "eagle", 2))
    (why,) = (reason for setting, _, reason in engine.facts.decisions if setting == "drafter")
    assert "up to 3 tokens of a request in a step, each beside its 2 likeliest others" in why
    answers_of(engine, [asking("a", prompt_of(SAID[3]), max_tokens=30)])
    counts = counts_of(engine)
    assert len(counts.by_position) == 3
    assert counts.drafted > 6 * counts.verifications


def test_options_are_those_of_every_draft_model() -> None:
    registry = Registry.load(options=["eagle.trees=true", "standalone.trees=true", "standalone.siblings=3", "mtp.siblings=1"])
    given = {name: registry.options_for(name) for name in ("eagle", "eagle3", "standalone", "mtp", "lookup")}
    assert [each.num_siblings for each in given.values() if isinstance(each, DraftModelOptions)] == [1, 0, 3, 0]
    with pytest.raises(ConfigError, match=r"the options of eagle do not go together: siblings is 0; take 1 to 32"):
        Registry.load(options=["eagle.siblings=0"])
    with pytest.raises(ConfigError, match=r"siblings is 33; take 1 to 32"):
        Registry.load(options=["eagle.siblings=33"])
    with pytest.raises(ConfigError, match=r"siblings is 2, but only trees have them; set trees=true too, or leave siblings out"):
        Registry.load(options=["eagle.siblings=2"])


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("gemma2", WINDOWS, "the model has layers with sliding windows"),
        ("qwen3_next", HYBRIDS["qwen3_next"], "the model has recurrent layers"),
    ],
)
def test_layers_that_verify_chains_alone_are_refused_by_name(
    write_oracle: Callable[..., Oracle], registry: Registry, name: str, config: object, why: str
) -> None:
    oracle = write_oracle(name, config)
    with pytest.raises(ConfigError, match=rf"--drafter is standalone, .* whose guesses branch, and {why}; chains alone"):
        Engine.build(by_itself(oracle), branching(registry, "standalone"))


def test_backends_that_verify_chains_alone_are_refused_by_name(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    oracle = write_oracle("llama", FAMILIES["llama"])
    offer = next(offer for offer in registry.offers(AttnBackendSpec) if offer.name == "torch")
    chains = dataclasses.replace(offer.spec.capabilities, trees=False)
    changed = dataclasses.replace(offer, spec=dataclasses.replace(offer.spec, capabilities=chains))
    only = offering(registry, AttnBackendSpec, changed)
    with pytest.raises(Unsupported, match="trees of drafts is needed and not offered"):
        Engine.build(by_itself(oracle), branching(only, "standalone"))


def test_a_tree_that_is_cut_to_a_chain_is_verified_as_one() -> None:
    tree = DraftTree(tuple(range(6)), comb_parents(3, 1))
    assert tree.parents == (-1, 0, 1, -1, 0, 1)
    assert tree[:3].is_chain
    assert not tree[:4].is_chain
