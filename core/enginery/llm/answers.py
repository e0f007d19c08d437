"""Answers as Python callers get them: whole, or in parts as their tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from enginery.contracts.request import FinishReason, RequestOutput, TokenLogprob, of_length_one
from enginery.errors import RequestError
from enginery.text.detokenize import CompletionText


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of one completion so far. num_cached_tokens: of the prompt, that were found in the prefix cache.

    num_drafted_tokens: guesses at its tokens that were verified. num_accepted_tokens: those that are among its tokens.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished answer. finish_reason: why it ended. logprobs: one entry for each token, if asked for."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class Generation:
    """All answers to one prompt; the properties are those of the first. prompt_logprobs: None for the first token."""

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    num_cached_tokens: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first completion, with its end-of-sequence token."""
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        """The text of the first completion, without stop strings; empty for a checkpoint that has no tokenizer."""
        return self.completions[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The log-probabilities of the first completion, one entry for each token; None if they were not asked for."""
        return self.completions[0].logprobs

    @property
    def usage(self) -> Usage:
        """How many tokens the first completion took, and how many of them were guessed."""
        return self.completions[0].usage


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """What `embed` gives for one prompt. vector: [hidden size]."""

    prompt_token_ids: tuple[int, ...]
    vector: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class GenerationDelta:
    """What came of one completion since its last delta. All put together are what `generate` gives.

    index: which of `SamplingParams.n`. text: may be empty, or more than the tokens', where a character or what may become a stop
    string spans several. finish_reason: set in its last delta. prompt_logprobs: in its first, if asked for. embedding: of a prompt
    that is only embedded.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    embedding: tuple[float, ...] | None = None


@dataclass(kw_only=True, eq=False)
class GrowingCompletion:
    """A completion in the making. name: of the request that it is one of. text: None without a tokenizer.

    error: it failed, and nothing more comes.
    """

    request_id: str
    name: str
    index: int
    num_prompt_tokens: int
    text: CompletionText | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    embedding: tuple[float, ...] | None = None
    error: RequestError | None = None
    _taken: tuple[int, int] = (0, 0)  # tokens and pieces that are in deltas

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=len(self.token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )

    def add(self, output: RequestOutput) -> None:
        """Take what one step added. A stop string may end the completion before the engine does."""
        if output.error is not None:
            self.error = RequestError(output.error, param=output.param)
            return
        finished = output.finish_reason is not None
        count, stopped_by = len(output.token_ids), None
        if self.text is not None:
            delta = self.text.feed(output.token_ids, finished=finished, stop_token_id=output.stop_token_id)
            self.pieces.append(delta.text)
            count, stopped_by = delta.num_tokens, delta.stopped_by
        self.token_ids += output.token_ids[:count]
        self.logprobs += (output.logprobs or ())[:count]
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.embedding = output.embedding or self.embedding
        self.num_cached_tokens = output.num_cached_tokens
        drafted, accepted = output.guesses(count)
        self.num_drafted_tokens += drafted
        self.num_accepted_tokens += accepted
        self.finish_reason = FinishReason.STOP if stopped_by is not None else output.finish_reason

    def take(self) -> GenerationDelta | None:
        """What was added since the last call; None if nothing was."""
        tokens, pieces = self._taken
        if len(self.token_ids) == tokens and self.finish_reason is None:
            return None
        self._taken = (len(self.token_ids), len(self.pieces))
        return GenerationDelta(
            index=self.index,
            text="".join(self.pieces[pieces:]),
            token_ids=tuple(self.token_ids[tokens:]),
            usage=self.usage,
            logprobs=tuple(self.logprobs[tokens:]) if self.logprobs else None,
            prompt_logprobs=None if tokens else self.prompt_logprobs,
            finish_reason=self.finish_reason,
            embedding=self.embedding,
        )


def embedding(prompt: tuple[int, ...], vector: tuple[float, ...] | None, *, normalize: bool) -> Embedding:
    """The finished answer to a prompt that is only embedded."""
    assert vector is not None  # it comes with the first token, and an error would have been raised
    return Embedding(prompt_token_ids=prompt, vector=of_length_one(vector) if normalize else vector)


def generation(prompt: tuple[int, ...], deltas: Sequence[Sequence[GenerationDelta]]) -> Generation:
    """The finished answer to one prompt. deltas: of each completion; one that has not ended was aborted."""
    first = deltas[0][0]
    return Generation(
        prompt_token_ids=prompt,
        completions=tuple(map(_joined, deltas)),
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.usage.num_cached_tokens,
    )


def _joined(deltas: Sequence[GenerationDelta]) -> Completion:
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs or ()]
    return Completion(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        finish_reason=deltas[-1].finish_reason or FinishReason.ABORT,
        logprobs=tuple(logprobs) or None,
        usage=deltas[-1].usage,
    )
