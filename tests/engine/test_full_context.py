"""A prompt that fills the context can be embedded and scored; nothing can be generated after it."""

from __future__ import annotations

import pytest

from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, RequestOutput, SamplingParams
from enginery.engine.engine import Engine
from enginery.errors import ConfigError, RequestError
from enginery.plugin.registry import Registry

CONTEXT = 48
PROMPT = tuple(5 + place * 7 % 90 for place in range(CONTEXT))


def engine_of(max_model_len: int) -> Engine:
    asked = EngineOptions(num_pages=32, max_model_len=max_model_len, overlap=True, num_threads=1, dtype="float32")
    return Engine.build(asked, Registry.load())


def read(engine: Engine, *, prompt_only: bool, beside: int = 0) -> RequestOutput:
    """The only output for the prompt. beside: so many others are generated at the same time."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    engine.submit(GenerationRequest(request_id="it", prompt_token_ids=PROMPT, params=params, embed=True, prompt_only=prompt_only))
    for number in range(beside):
        longer = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        engine.submit(GenerationRequest(request_id=f"other-{number}", prompt_token_ids=(7, 8), params=longer))
    found = []
    while engine.has_work:
        found += [output for output in engine.step() if output.request_id == "it"]
    (only,) = found
    return only


@pytest.mark.parametrize("beside", [0, 3])
def test_a_prompt_of_the_whole_context_is_read_as_in_a_longer_one(beside: int) -> None:
    expected = read(engine_of(2 * CONTEXT), prompt_only=False)
    found = read(engine_of(CONTEXT), prompt_only=True, beside=beside)
    assert found.embedding == pytest.approx(expected.embedding, abs=1e-4)
    assert len(found.prompt_logprobs) == CONTEXT
    logprobs = [[each.logprob for each in output.prompt_logprobs[1:]] for output in (found, expected)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def test_generating_needs_room_for_one_token() -> None:
    with pytest.raises(RequestError, match=r"less one to generate.*larger --max-model-len"):
        read(engine_of(CONTEXT), prompt_only=False)


@pytest.mark.parametrize("max_model_len", [None, 256])
def test_where_pages_hold_less_than_the_context_that_was_asked_for_more_memory_is_the_remedy(max_model_len: int | None) -> None:
    """A larger --max-model-len changed nothing, and was what the message told to give."""
    asked = EngineOptions(num_pages=4, page_size=8, max_model_len=max_model_len, num_threads=1, dtype="float32")
    with pytest.raises(RequestError, match=r"at most 31 fit .* start the engine with more KV memory: its pages hold no more"):
        read(Engine.build(asked, Registry.load()), prompt_only=False)


def test_pages_that_hold_no_request_are_refused() -> None:
    asked = EngineOptions(num_pages=1, page_size=1, num_threads=1, dtype="float32")
    with pytest.raises(ConfigError, match=r"the KV pages hold 1 token, .* raise --num-pages"):
        Engine.build(asked, Registry.load())
