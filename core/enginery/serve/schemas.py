"""The bodies of /v1/completions and /v1/chat/completions: which fields there are, and nothing else is accepted.

OpenAI's fields and the extensions of other engines that clients send. null is the same as absent. What changes no answer is
accepted and has no effect: `user`, `safety_identifier`, `metadata`, `store` (false), `service_tier` (auto, default). Everything
else is refused by name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from enginery.contracts.request import MAX_STOP_STRINGS
from enginery.errors import RequestError
from enginery.plugin.near import did_you_mean

MAX_BODY_BYTES: Final = 32 << 20
MAX_PROMPTS: Final = 1024
MAX_MESSAGES: Final = 8192
MAX_TOKEN_IDS: Final = 1024

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, msgspec.Meta(max_length=1024)]
Id = Annotated[str, msgspec.Meta(max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The only response format."""

    type: Literal["text"]


class CommonRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that both endpoints have. Ranges are checked by `SamplingParams`."""

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
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
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
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class CompletionRequest(CommonRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/completions. prompt: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | Int | list[Int]]
    echo: bool | None = None
    logprobs: Int | None = None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One message; its text parts are put together, one to a line."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As a chat template sees it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ChatRequest(CommonRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    response_format: TextFormat | None = None
    add_generation_prompt: bool | None = None


_UNSUPPORTED: Final = {
    "tools": "tool calls are not supported yet",
    "tool_choice": "tool calls are not supported yet",
    "parallel_tool_calls": "tool calls are not supported yet",
    "functions": "function calls are not supported",
    "function_call": "function calls are not supported",
    "tool_calls": "tool calls are not supported yet",
    "guided_json": "structured output is not supported yet",
    "structured_outputs": "structured output is not supported yet",
    "chat_template": "templates come from the model only",
    "chat_template_kwargs": "variables of the template cannot be set",
    "suffix": "text cannot be inserted before a suffix",
    "audio": "only text can be generated",
    "modalities": "only text can be generated",
}

RequestT = TypeVar("RequestT", bound=CommonRequest)


def decode_request(body: bytes, kind: type[RequestT]) -> RequestT:
    """Raises `RequestError` for whatever is wrong with a body, with the name of the field."""
    try:
        given = msgspec.json.decode(body)
        if not isinstance(given, dict):
            raise RequestError(f"the body must be a JSON object, and is {_json_name(given)}")
        given = {name: value for name, value in given.items() if value is not None}
        _refuse_unknown(given, kind)
        if isinstance(given.get("messages"), list):
            given["messages"] = [_without_nulls(message) for message in given["messages"]]
        return msgspec.convert(given, type=kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=_param(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error


def _refuse_unknown(given: dict[str, Any], kind: type[CommonRequest]) -> None:
    for name in given.keys() - set(kind.__struct_fields__):
        why = _UNSUPPORTED.get(name) or f"there is no such field{did_you_mean(name, kind.__struct_fields__)}"
        raise RequestError(f"{name[:100]!r} is not accepted: {why}", param=name[:100])


def _without_nulls(message: object) -> object:
    """Clients send back what they received, with null where there was nothing."""
    if not isinstance(message, dict):
        return message
    for name in message.keys() & _UNSUPPORTED.keys():
        if message[name] is not None:
            raise RequestError(f"{name!r} of a message is not accepted: {_UNSUPPORTED[name]}", param="messages")
    return {name: value for name, value in message.items() if value is not None}


def _param(message: str) -> str | None:
    """The field that msgspec's message points to."""
    found = re.search(r"(?:at|in) `\$\.(\w+)", message) or re.search(r"missing required field `(\w+)`", message)
    return found[1] if found else None


def _json_name(value: object) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
