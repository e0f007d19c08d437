"""What the bodies of requests share, and the body of /v1/completions. Fields that are not named here are refused.

OpenAI's fields and the extensions of other engines that clients send; docs/api.md lists them. null is the same as absent. What
changes no answer is accepted and has no effect (`NoEffect`). Everything else is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from enginery.contracts.request import MAX_STOP_STRINGS

MAX_PROMPTS: Final = 1024
MAX_MESSAGES: Final = 8192
MAX_TOKEN_IDS: Final = 1024

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, msgspec.Meta(max_length=1024)]
Id = Annotated[str, msgspec.Meta(max_length=1024)]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=16)
]  # OpenAI's bounds


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Without effect: prefixes are cached wherever they are the same. scope: as Claude Code sends it."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    scope: str | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """include_usage: a last chunk with the usage. continuous_usage_stats: it in every chunk. Nothing is obfuscated."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class NamedSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A JSON schema for an answer. strict: false leaves out what no grammar says of it; else that is refused."""

    name: str
    schema: dict[str, object]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the answer must be. json_schema goes with the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the answer must be, in one of these ways. grammar: in the notation of the plugin that compiles it."""

    json: dict[str, object] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class NoEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that change no answer."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, str] | None = None
    metadata: Metadata | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class CommonRequest(NoEffect, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that completions and conversations have. Ranges are checked by `SamplingParams`."""

    model: str | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[Int, float], msgspec.Meta(max_length=MAX_TOKEN_IDS)] | None = None
    best_of: Int | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[Int], msgspec.Meta(max_length=MAX_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Int | None = None
    cache_salt: Id | None = None
    speculation: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionRequest(CommonRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/completions. prompt: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | Int | list[Int]]
    echo: bool | None = None
    logprobs: Int | None = None


UNSUPPORTED: Final = {
    **dict.fromkeys(("chat_template", "reasoning_effort", "prediction", "thinking"), "it is a field of /v1/chat/completions"),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking", "verbosity"), "it is a field of /v1/chat/completions"),
    **dict.fromkeys(("audio", "modalities"), "only text can be generated"),
    **dict.fromkeys(("web_search_options", "max_tool_calls", "mcp_servers", "container"), "there are no tools on the server"),
    **dict.fromkeys(("previous_response_id", "conversation"), "conversations are not stored; send the whole one as input"),
    "store": "nothing is stored; leave it out, and send whole conversations",
    "background": "answers are not stored; leave it out, and wait for the answer or stream it",
    "functions": "use tools",
    "function_call": "use tools and tool_choice",
    "guided_decoding_backend": "the plugin of highest priority that has the kind of grammar is used",
    "guided_whitespace_pattern": "white space between the parts of JSON is up to the plugin that compiles grammars",
    "continue_final_message": "it is a field of /v1/chat/completions; a prompt is always continued",
    "suffix": "text cannot be inserted before a suffix",
    "prompt": "stored prompts are not supported; send input and instructions",
    "thread": "conversations are not stored; send all messages, without thread",
    "input_type": "texts are embedded as they are",
}
