"""What is open at an engine in this process, and what becomes of it where a call ends early."""

from __future__ import annotations

import asyncio

import pytest
from engine.test_llm import GREEDY, TINY

from enginery import LLM, AsyncLLM, SamplingParams
from enginery.contracts.grammars import Grammar, GrammarKind
from enginery.llm import open_requests
from enginery.text.detokenize import CompletionText


def test_what_interrupts_a_submission_leaves_no_request_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes: the second of two requests is being made ready."""
    made: list[object] = []

    def interrupted(*given: object, **named: object) -> CompletionText:
        made.append(given)
        if len(made) == 2:
            raise KeyboardInterrupt
        return CompletionText(*given, **named)  # type: ignore[arg-type]

    with LLM(**TINY) as model:
        assert model._engine is not None
        with monkeypatch.context() as patch:
            patch.setattr(open_requests, "CompletionText", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.generate([[1, 2], [3]], GREEDY)
        assert not model._engine.has_work
        assert model.generate([1, 2], GREEDY)[0].token_ids


def test_a_completion_may_end_in_the_step_that_answers_for_its_grammar() -> None:
    """While another of its request goes on: the second prompt has no room in that step. The engine was gone, for everybody."""
    choice = Grammar(kind=GrammarKind.CHOICE, source='["yes","no"]')
    params = SamplingParams(max_tokens=1, n=2, seed=1, grammar=choice)

    async def told() -> list[int]:
        async with AsyncLLM(**TINY, max_batch_tokens=16) as model:
            generation = await model.generate(list(range(12)), params)
            return [len(one.token_ids) for one in generation.completions]

    assert asyncio.run(told()) == [1, 1]
