"""Aborts while steps are in flight, whatever the request has asked for."""

from __future__ import annotations

import pytest
from integrity import check_scheduler
from pairwise import EVERYTHING

from enginery.config.schema import EngineOptions
from enginery.contracts.grammars import Grammar, GrammarKind
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

ASKS = [
    {},
    {"prompt_logprobs": 1},
    {"logprobs": 2, "prompt_logprobs": 0},
    {"frequency_penalty": 0.5, "prompt_logprobs": 1},
    {"grammar": Grammar(kind=GrammarKind.REGEX, source="[a-z]+")},
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    asked = EngineOptions(num_pages=32, max_model_len=128, max_batch_tokens=16, overlap=True, num_threads=1)
    return Engine.build(asked, Registry.load())


@pytest.mark.parametrize("place", range(len(ASKS)), ids=[",".join(asks) for asks in ASKS])
def test_an_abort_at_any_step_ends_nothing_else_and_leaves_nothing(engine, place):
    """A prompt of four chunks and its first tokens, aborted after every number of steps, beside a request that stays."""
    for number in range(12) if EVERYTHING else range(place % 3, 12, 3):
        for name, more in (("stays", {}), ("goes", ASKS[place])):
            params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, **more)
            prompt = tuple(range(5 + number, 63 + number)) if name == "goes" else (5, 6, 7)
            engine.submit(GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params, cache_salt=name + str(number)))
        outputs = [output for _ in range(number) for output in engine.step()]
        engine.abort("goes")
        late = []
        while engine.has_work:
            late += engine.step()
        assert {output.request_id for output in late} <= {"stays"}
        assert sum(len(output.token_ids) for output in outputs + late if output.request_id == "stays") == 10
        assert all(output.error is None for output in outputs + late)
        assert engine._scheduler.table.by_id == {}  # what is kept for a request is kept with it
        check_scheduler(engine._scheduler)
