"""The body of /v1/responses, and the conversation that it is."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from enginery.contracts.request import MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from enginery.errors import RequestError
from enginery.serve.schemas import chat
from enginery.serve.schemas.completions import MAX_MESSAGES, Id, Int, NamedSchema, NoEffect, ResponseFormat, StopString

NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}  # of fields that errors name as /v1/chat/completions does
_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos"),
    *("stream", "cache_salt", "priority", "speculation"),
)  # fields that chats have too


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of an item. annotations, logprobs: as answers have them; without effect."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str
    annotations: list[object] | None = None
    logprobs: list[object] | None = None


class InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message, a call, what a call gave, or reasoning. id, status, summary and encrypted_content are without effect."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputText] | None = None
    call_id: Id | None = None
    name: str | None = None
    arguments: str | dict[str, object] | None = None
    output: str | list[InputText] | None = None
    id: str | None = None
    status: str | None = None
    summary: list[InputText] | None = None
    encrypted_content: str | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the answer must be. The other fields go with json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, object] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text of the answer must be."""

    format: TextFormat | None = None
    verbosity: chat.Verbosity | None = None


class ResponsesTool(chat.Function, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the model may call."""

    type: Literal["function"]


class ResponsesToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="function"):
    """The tool that must be called, or one that may be."""

    name: Id


class ResponsesAllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="allowed_tools"):
    """The tools that may be called, or of which one must be; the model is told about all."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponsesToolChoice], msgspec.Meta(min_length=1, max_length=chat.MAX_TOOLS)]


_Choice = Literal["auto", "none", "required"] | ResponsesToolChoice | ResponsesAllowedTools


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much the model reasons. summary: without effect, as reasoning is given whole."""

    effort: chat.Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class Obfuscation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Without effect: nothing is obfuscated."""

    include_obfuscation: Literal[False] | None = None


class InputTokensRequest(NoEffect, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/responses/input_tokens: the fields of /v1/responses that make the prompt, and those without effect."""

    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool], msgspec.Meta(max_length=chat.MAX_TOOLS)] | None = None
    tool_choice: _Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, object] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def as_chat(self) -> chat.ChatRequest:
        """The same as a body of /v1/chat/completions. Raises `RequestError`, which may name fields as that body does."""
        messages = [] if self.instructions is None else [chat.ChatMessage(role="developer", content=self.instructions)]
        messages += _messages([InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input)
        return chat.ChatRequest(
            model=self.model,
            messages=messages,
            tools=[chat.FunctionTool(type="function", function=tool) for tool in self.tools or ()],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_response_format(self.text),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            verbosity=self.text.verbosity if self.text else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class ResponsesRequest(InputTokensRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/responses. store is false whether it is sent or not. client_metadata, access_programs: of Codex; no effect."""

    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: Obfuscation | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    background: Literal[False] | None = None
    client_metadata: dict[str, str] | None = None
    access_programs: dict[str, str] | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Id | None = None
    priority: int | None = None
    speculation: bool | None = None

    def as_chat(self) -> chat.ChatRequest:
        """The same conversation as a body of /v1/chat/completions, with how to sample. Raises `RequestError`."""
        return msgspec.structs.replace(
            super().as_chat(),
            max_completion_tokens=self.max_output_tokens,
            logprobs=bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ()),
            top_logprobs=self.top_logprobs,
            **{name: getattr(self, name) for name in _SAMPLING},
        )


def _choice(asked: _Choice | None) -> chat.Choice | None:
    if isinstance(asked, ResponsesAllowedTools):
        tools = [chat.ToolChoice(chat.ChosenFunction(tool.name)) for tool in asked.tools]
        return chat.AllowedTools(chat.Allowed(asked.mode, tools))
    return chat.ToolChoice(chat.ChosenFunction(asked.name)) if isinstance(asked, ResponsesToolChoice) else asked


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or (asked := text.format) is None:
        return None
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    if asked.schema is None:
        raise RequestError("a format of the type json_schema needs schema", param="text")
    return ResponseFormat(type=asked.type, json_schema=NamedSchema(name=asked.name or "", schema=asked.schema, strict=asked.strict))


def _messages(items: list[InputItem]) -> list[chat.ChatMessage]:
    """An assistant's reasoning, text and calls that follow each other are one message."""
    groups: list[list[chat.ChatMessage]] = []
    has_content = False
    for message in map(_message, items):
        if message == chat.ChatMessage(role="assistant", reasoning_content=""):
            continue  # reasoning that the client has kept nothing of
        last = groups[-1][-1] if groups else None
        if last is not None and last.role == message.role == "assistant" and not (has_content and message.content is not None):
            groups[-1].append(message)
        else:
            groups.append([message])
            has_content = False
        has_content |= message.content is not None
    return [group[0] if len(group) == 1 else _merged(group) for group in groups]


def _merged(group: list[chat.ChatMessage]) -> chat.ChatMessage:
    return chat.ChatMessage(
        role="assistant",
        content=next((each.content for each in group if each.content is not None), None),
        reasoning_content="".join(each.reasoning_content or "" for each in group) or None,
        tool_calls=[call for each in group for call in each.tool_calls or ()] or None,
    )


def _message(item: InputItem) -> chat.ChatMessage:
    _check(item)
    if item.type == "function_call":
        function = chat.CalledFunction(name=item.name or "", arguments=item.arguments)
        return chat.ChatMessage(role="assistant", tool_calls=[chat.ToolCall(id=item.call_id or "", function=function)])
    if item.type == "function_call_output":
        return chat.ChatMessage(role="tool", tool_call_id=item.call_id, content=_text(item.output))
    if item.type == "reasoning":
        return chat.ChatMessage(role="assistant", reasoning_content=_text(item.content))
    return chat.ChatMessage(role=item.role or "user", content=_text(item.content))


_NEEDS: Final = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": set[str](),
}
_MAY_HAVE: Final = {"type", "id", "status", "summary"}
_REASONING_MAY_HAVE: Final = {"content", "encrypted_content"}


def _check(item: InputItem) -> None:
    given = {name for name in item.__struct_fields__ if getattr(item, name) is not None}
    needed = _NEEDS[item.type]
    if missing := needed - given:
        raise RequestError(f"an item of the type {item.type} needs {' and '.join(sorted(missing))}", param="input")
    if extra := given - needed - _MAY_HAVE - (_REASONING_MAY_HAVE if item.type == "reasoning" else set()):
        raise RequestError(f"an item of the type {item.type} has no {' and no '.join(sorted(extra))}", param="input")


def _text(content: str | list[InputText] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())
