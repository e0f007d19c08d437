"""Answers that are only described, for /openapi.json, as their endpoints build dicts, and those about models. See `replies` too."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from enginery.serve.schemas.replies import JsonObject


class OpenAIFault(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong. param: the field that is wrong, if it is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct, frozen=True, kw_only=True):
    """Any error but those below /v1/messages."""

    error: OpenAIFault


class AnthropicErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    error_code: str


class AnthropicFault(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str
    details: AnthropicErrorDetails | msgspec.UnsetType = msgspec.UNSET


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """Any error below /v1/messages, but that of the guard before it."""

    type: Literal["error"]
    error: AnthropicFault


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """replicas: the states of several engines."""

    status: str
    replicas: list[str] | msgspec.UnsetType = msgspec.UNSET


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """The attention kernels. compiling: those that are compiled beside the engine. seconds: since that began, or that it took."""

    status: Literal["compiled", "compiling", "failed"]
    compiling: list[str]
    seconds: float
    failure: str | None


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """What drafts have brought since the start. acceptance_length: tokens that a verification told on average, 0 before any."""

    acceptance_length: float
    drafted_tokens: int
    accepted_tokens: int


class Progress(Status, frozen=True, kw_only=True):
    """Whether steps complete; while it loads, status, phase and bytes alone. stalled_s: since the last, while there is work."""

    status: Literal["loading", "restarting", "stuck", "moving", "idle"]
    phase: str | msgspec.UnsetType = msgspec.UNSET
    done_bytes: int | msgspec.UnsetType = msgspec.UNSET
    total_bytes: int | msgspec.UnsetType = msgspec.UNSET
    stalled_s: float | msgspec.UnsetType = msgspec.UNSET
    attention_backend: str | msgspec.UnsetType = msgspec.UNSET
    kernels: Kernels | msgspec.UnsetType = msgspec.UNSET
    speculation: Speculation | msgspec.UnsetType = msgspec.UNSET


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an administrator's order, as a sentence."""

    told: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served, with the fields of OpenAI, and from `display_name` on those of Anthropic. root: its folder."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "enginery"
    root: str
    parent: None = None
    max_model_len: int
    display_name: str
    created_at: datetime
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them: there is no other page."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The chat template. The named special tokens are fields besides."""

    chat_template: str | None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class PromptUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one input: numbers, or base64 of float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsReply(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: PromptUsage


class CountedInput(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"]
    input_tokens: int


class OriginalInput(msgspec.Struct, frozen=True, kw_only=True):
    original_input_tokens: int


class CountedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/messages/count_tokens: how long the prompt is, after and before its edits."""

    input_tokens: int
    context_management: OriginalInput | msgspec.UnsetType = msgspec.UNSET


class TextContent(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    text: str


class ThinkingContent(msgspec.Struct, frozen=True, kw_only=True, tag="thinking"):
    """A block of reasoning. signature: always empty."""

    thinking: str
    signature: str


class ToolUseContent(msgspec.Struct, frozen=True, kw_only=True, tag="tool_use"):
    """A call of a tool. input: empty if the answer ended within it."""

    id: str
    name: str
    input: JsonObject


class AnthropicUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of tokens, as /v1/messages tells them. input_tokens: of the prompt, without the cached ones."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class AppliedEdits(msgspec.Struct, frozen=True, kw_only=True):
    """What was left out of the conversation."""

    applied_edits: list[JsonObject]


class MessageReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/messages: the message that the model wrote."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage
    context_management: AppliedEdits | msgspec.UnsetType = msgspec.UNSET


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: str
    role: Literal["assistant"]
    content: list[JsonObject]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    id: str
    status: str
    summary: list[JsonObject]
    content: list[JsonObject]
    encrypted_content: None


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class ResponsesUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/responses. The fields after `incomplete_details` repeat the request, or are always the same."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["completed", "incomplete"]
    output: list[MessageItem | ReasoningItem | CallItem]
    usage: ResponsesUsage
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_logprobs: int
    top_p: float
    reasoning: JsonObject | None
    text: JsonObject
    tools: list[JsonObject]
    tool_choice: str | JsonObject
    parallel_tool_calls: bool
    metadata: dict[str, str]
    store: bool
    background: bool
    truncation: str
    previous_response_id: None
