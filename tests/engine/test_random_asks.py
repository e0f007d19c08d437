"""Requests that ask for anything, sent and aborted at random in a small memory: each gets its due, and nothing is left."""

from __future__ import annotations

import random
import time

import pytest
from engine.random_use import RandomUse
from integrity import check_scheduler
from pairwise import EVERYTHING

from enginery.config.schema import EngineOptions
from enginery.contracts.grammars import Grammar, GrammarKind
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

GRAMMARS = [
    Grammar(kind=GrammarKind.REGEX, source="[a-z ]+"),
    Grammar(kind=GrammarKind.JSON_OBJECT, source=""),
    Grammar(kind=GrammarKind.CHOICE, source='["yes","no"]'),
    Grammar(kind=GrammarKind.REGEX, source="("),  # refused when it is compiled
]
LONGEST_END_S = 60


def anything(chance: random.Random, name: str) -> GenerationRequest:
    """A request for anything. Its prompt begins like others, more often than not."""
    pick, odds = chance.choice, lambda likely: chance.random() < likely
    asks: dict[str, object] = {"max_tokens": chance.randint(1, 30), "temperature": pick([0.0, 0.8]), "ignore_eos": odds(0.5)}
    some = {
        "prompt_logprobs": pick([0, 1, 3]),
        "logprobs": pick([0, 2]),
        "frequency_penalty": 0.5,
        "grammar": pick(GRAMMARS),
        "min_tokens": 1,
        "logit_bias": {7: 3.0},
        "stop_token_ids": (chance.randrange(50),),
    }
    asks |= {name: value for name, value in some.items() if odds(0.35)}
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(pick([1, 2, 3]) for _ in range(pick([1, 5, 30, 90]))),
        params=SamplingParams(**asks),
        embed=odds(0.1),
        cache_salt=pick(["", "other"]),
    )


@pytest.mark.parametrize("seed", range(4) if EVERYTHING else [0, 3])
def test_each_gets_what_it_asked_for_and_nothing_is_left(seed: int) -> None:
    chance = random.Random(seed)
    asked = EngineOptions(
        num_pages=chance.choice([12, 24]),
        page_size=16,
        max_model_len=160,
        max_batch_tokens=chance.choice([8, 16]),
        max_batch_requests=chance.choice([2, 6]),
        max_queued_requests=20,
        prefix_cache=chance.random() < 0.7,
        overlap=seed != 3,
        num_threads=1,
    )
    engine = Engine.build(asked, Registry.load())
    use = RandomUse(engine, chance, lambda name: anything(chance, name))
    for _ in range(150 if EVERYTHING else 100):
        if chance.random() < 0.35:
            use.submit()
        if use.alive and chance.random() < 0.2:
            use.abort_one()
        use.step()
        check_scheduler(engine._scheduler)
    began = time.monotonic()
    while engine.has_work:
        use.step()
        assert time.monotonic() - began < LONGEST_END_S, "it does not come to an end"
    assert not use.alive
    assert engine._scheduler.table.by_id == {}  # what is kept for a request is kept with it
    assert use.counts["outputs"] > 40  # how many steps pass while a grammar is compiled is the machine's
    engine._scheduler.check_idle()
