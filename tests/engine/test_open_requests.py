"""What is open at an engine in this process, and what becomes of it where a call ends early."""

from __future__ import annotations

import pytest
from engine.test_llm import GREEDY, TINY

from enginery import LLM
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
