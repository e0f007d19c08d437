"""The requests that Python callers have open at one engine: submitted, grown by every step, aborted. One thread uses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from enginery.contracts.request import GenerationRequest, RequestOutput, SamplingParams, choices_of
from enginery.engine.engine import Engine
from enginery.errors import CheckpointError
from enginery.llm.answers import GrowingCompletion
from enginery.llm.prompts import Encoded
from enginery.text.detokenize import CompletionText
from enginery.text.tokenizer import Tokenizer

EMBEDDED: Final = SamplingParams(max_tokens=1, temperature=0)  # with the first token the engine tells the embedding


class OpenRequests:
    """All open completions of one engine. Each step grows all of them, whoever runs it, so several callers share their steps."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._open: dict[str, GrowingCompletion] = {}

    def submit(self, name: str, prompt: Encoded, params: SamplingParams, *, embed: bool = False) -> list[GrowingCompletion]:
        """Send the `params.n` requests of one prompt to the engine, and return their completions, which `step` grows.

        name: unique among what is open. embed: the prompt's embedding is all that is wanted, with `EMBEDDED` as params. Raises
        `EnginError`; then none of them is open.
        """
        if params.stop and self._tokenizer is None:
            folder = self.engine.facts.folder
            raise CheckpointError(f"{folder} has no tokenizer.json, which stop strings need; use stop_token_ids")
        group: list[GrowingCompletion] = []
        try:
            asked = GenerationRequest(request_id=name, prompt_token_ids=prompt.ids, params=params, embed=embed, prompt_only=embed)
            for index, request in enumerate(choices_of(asked)):
                if index:  # the prompt's log-probabilities are the same for all of its completions: the first one reports them
                    request = dataclasses.replace(request, params=dataclasses.replace(request.params, prompt_logprobs=None))
                text = None if self._tokenizer is None else CompletionText(self._tokenizer, params, after=prompt.after)
                growing = GrowingCompletion(
                    request_id=request.request_id, name=name, index=index, num_prompt_tokens=len(prompt.ids), text=text
                )
                group.append(growing)
                self._open[request.request_id] = growing
                self.engine.submit(request)  # last: whatever fails or interrupts this, what was submitted is aborted
        except BaseException:
            self.abort(group)
            raise
        return group

    def step(self) -> list[GrowingCompletion]:
        """Run one step of the engine. Returns the completions that grew in it."""
        return self.take_in(self.engine.step())

    def take_in(self, outputs: Iterable[RequestOutput]) -> list[GrowingCompletion]:
        """Add outputs of the engine, several of one completion too, and abort what a stop string ended. Returns what grew."""
        grown: dict[str, GrowingCompletion] = {}
        for output in outputs:
            growing = self._open.get(output.request_id)
            if growing is None:  # it was aborted while its output was on its way
                continue
            growing.add(output)
            if growing.is_over:
                del self._open[output.request_id]
                if output.finish_reason is None and output.error is None:
                    self.engine.abort(output.request_id)
            grown[output.request_id] = growing
        return list(grown.values())

    def abort(self, group: Iterable[GrowingCompletion]) -> None:
        """Abort those of the group that are still open; nothing more is added to them."""
        for growing in group:
            if self._open.pop(growing.request_id, None) is not None:
                self.engine.abort(growing.request_id)
