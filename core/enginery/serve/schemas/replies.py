"""The answers of /v1/completions and /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from typing import Literal

import msgspec

JsonObject = dict[str, object]  # fields named `object` hide the builtin inside of their classes


class CachedTokens(msgspec.Struct, frozen=True):
    """How many tokens of the prompt were found in the prefix cache."""

    cached_tokens: int


class CompletionTokens(msgspec.Struct, frozen=True):
    """How many tokens of the completion are reasoning: those before the one that ended it.

    accepted_prediction_tokens: of its tokens, those that a drafter had guessed; rejected_prediction_tokens: its wrong guesses.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of tokens. A prompt counts once, however many completions it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens


class LegacyLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists over tokens; the first token of a prompt has None."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None
    prompt_logprobs: list[JsonObject | None] | msgspec.UnsetType = msgspec.UNSET


class CompletionReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/completions, and each of its chunks."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None
    object: Literal["text_completion"] = "text_completion"


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One of the likeliest tokens. No garbage collection: an answer has a hundred thousand, and no cycles of them."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, frozen=True, kw_only=True, gc=False):
    """One token of a chat completion."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The tokens of a whole message, or of a chunk."""

    content: list[ChatLogprob]


class FunctionPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call, or what a chunk adds to it. name: in the first chunk only."""

    name: str | None = None
    arguments: str | None = None


class CallPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call, or what a chunk adds to it. index: in chunks only; id and type: in the first of them only."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: FunctionPart


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said. The last two are there only where there is something of the kind."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallPart] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/chat/completions, if it is not streamed."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: list[JsonObject | None] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPart] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to one chat completion."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
