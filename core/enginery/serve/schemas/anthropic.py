"""The bodies of /v1/messages and /v1/messages/count_tokens, and the conversation that they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from enginery.contracts.request import MAX_STOP_STRINGS
from enginery.errors import RequestError
from enginery.serve.schemas import chat
from enginery.serve.schemas.completions import MAX_MESSAGES, CacheControl, Id, Int, NamedSchema, ResponseFormat, StopString

NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config",
    "reasoning_effort": "thinking",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
}  # of fields that errors name as /v1/chat/completions does


class Caller(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model called by itself, as it always does here."""

    type: Literal["direct"]


class TextBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="text"):
    """A block of text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[object], msgspec.Meta(max_length=0)] | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="thinking"):
    """Reasoning of an earlier answer. signature: without effect."""

    thinking: str
    signature: str | None = None
    cache_control: CacheControl | None = None


class RedactedThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="redacted_thinking"):
    """Reasoning that only Anthropic can read. It is left out."""

    data: str
    cache_control: CacheControl | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="tool_use"):
    """A call of an earlier answer. input: an object, unless the model wrote something else."""

    id: Id
    name: str
    input: object = None
    cache_control: CacheControl | None = None
    caller: Caller | None = None


class ToolReferenceBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="tool_reference"):
    """A deferred tool that a call has found: the model may call it from here on."""

    tool_name: str
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        """What the model reads."""
        return f"The tool {self.tool_name} can be called now."


class ToolResultBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="tool_result"):
    """What a call gave. is_error: the text is put after the word Error."""

    tool_use_id: Id
    content: str | list[TextBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def found(self) -> list[str]:
        """The deferred tools that it names."""
        blocks = self.content if isinstance(self.content, list) else []
        return [block.tool_name for block in blocks if isinstance(block, ToolReferenceBlock)]


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
BlockT = TypeVar("BlockT", TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock)


class AnthropicMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One turn. A system's has text only."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        """Of a text alone there are none."""
        return [] if isinstance(self.content, str) else self.content


class AnthropicTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the model may call. input_schema: a JSON schema. strict: calls always follow it.

    eager_input_streaming: without effect. defer_loading: the model knows it when a result of a call has named it, not before.
    """

    name: chat.FunctionName
    input_schema: dict[str, object]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AnthropicToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """any: some tool must be called. tool: the one named."""

    type: Literal["auto", "any", "tool", "none"]
    name: Id | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """About the sender; without effect."""

    user_id: str | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The answer follows this JSON schema."""

    type: Literal["json_schema"]
    schema: dict[str, object]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the answer must be. effort: the `reasoning_effort`."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Amount(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """So many tokens of the prompt, or calls of tools."""

    type: Literal["input_tokens", "tool_uses"]
    value: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class ThinkingTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="thinking_turns"):
    """The last so many turns with thinking."""

    value: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class AllTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="all"):
    """The thinking of all turns."""


class ClearToolUses(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="clear_tool_uses_20250919"):
    """When the prompt has more than `trigger`, results of calls are left out, but for the last ones.

    keep: how many of these; 3 if left out. clear_at_least: nothing is left out unless it makes up for so many tokens.
    exclude_tools: whose results always stay. clear_tool_inputs: the arguments of those calls too, of all tools or of these.
    """

    trigger: Amount = Amount(type="input_tokens", value=100_000)
    keep: Amount = Amount(type="tool_uses", value=3)
    clear_at_least: Amount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ClearThinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="clear_thinking_20251015"):
    """Thinking of earlier turns is left out, but for the last ones; one if `keep` is left out."""

    keep: Literal["all"] | AllTurns | ThinkingTurns = ThinkingTurns(value=1)


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out of long conversations."""

    edits: Annotated[list[ClearToolUses | ClearThinking], msgspec.Meta(max_length=2)] | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/messages/count_tokens: the fields of /v1/messages that make the prompt."""

    messages: Annotated[list[AnthropicMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], msgspec.Meta(max_length=chat.MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: chat.Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    @property
    def blocks(self) -> list[Block]:
        """Those of all messages, in their order."""
        return [block for message in self.messages for block in message.blocks]

    def as_chat(self) -> chat.ChatRequest:
        """The same as a body of /v1/chat/completions. Raises `RequestError`, which may name fields as that body does."""
        messages = [] if self.system is None else [chat.ChatMessage(role="system", content=_text(self.system))]
        for message in self.messages:
            messages += _messages(message)
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        named = chat.ToolChoice(chat.ChosenFunction(choice.name or "")) if choice.type == "tool" else None
        words: dict[str, Literal["auto", "none", "required"]] = {"auto": "auto", "none": "none", "any": "required"}
        return chat.ChatRequest(
            model=self.model,
            messages=messages,
            tools=[_tool(tool) for tool in self._known_tools()],
            tool_choice=named or words[choice.type],
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            response_format=_response_format(self.output_config),
            reasoning_effort=(self.output_config or OutputConfig()).effort,
            thinking=self.thinking,
            continue_final_message=_is_begun(messages),
        )

    def _known_tools(self) -> list[AnthropicTool]:
        """Those that are not deferred, and those that results or calls name. Raises `RequestError`."""
        tools, found = self.tools or [], {name for result in blocks_of(self.blocks, ToolResultBlock) for name in result.found}
        if unknown := found - {tool.name for tool in tools}:
            raise RequestError(
                f"a tool_reference names {min(unknown)!r}, which is none of the tools; send it too", param="messages"
            )
        found |= {call.name for call in blocks_of(self.blocks, ToolUseBlock)}
        return [tool for tool in tools if not tool.defer_loading or tool.name in found]


class MessagesRequest(CountTokensRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/messages: what the prompt is made of, and how to sample."""

    max_tokens: Int
    stop_sequences: Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speculation: bool | None = None

    def as_chat(self) -> chat.ChatRequest:
        """The same conversation as a body of /v1/chat/completions, with how to sample. Raises `RequestError`."""
        same = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_k", "top_p", "speculation")}
        return msgspec.structs.replace(super().as_chat(), stop=self.stop_sequences, **same)


def _is_begun(messages: Sequence[chat.ChatMessage]) -> bool:
    """Whether the answer goes on with the last message, as Anthropic's does: it is the assistant's, and has text and no calls."""
    final = messages[-1]
    return final.role == "assistant" and bool(final.content) and not final.tool_calls


def _response_format(asked: OutputConfig | None) -> ResponseFormat | None:
    if asked is None or asked.format is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=NamedSchema(name="answer", schema=asked.format.schema))


def _tool(tool: AnthropicTool) -> chat.FunctionTool:
    function = chat.Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return chat.FunctionTool(type="function", function=function)


def _messages(message: AnthropicMessage) -> list[chat.ChatMessage]:
    """A turn as messages: one for each result of a call, then one for everything else, if there is anything else."""
    if isinstance(message.content, str):
        return [chat.ChatMessage(role=message.role, content=message.content)]
    results = blocks_of(message.content, ToolResultBlock)
    others = [block for block in message.content if not isinstance(block, ToolResultBlock | RedactedThinkingBlock)]
    messages = [_result(block) for block in results]
    return [*messages, _words(message.role, others)] if others or not results else messages


def _words(role: Literal["user", "assistant", "system"], blocks: Sequence[Block]) -> chat.ChatMessage:
    """Text, reasoning and calls as one message. Its content is null where there are blocks and none of them is text."""
    texts = [block.text for block in blocks_of(blocks, TextBlock)]
    thinking = "".join(block.thinking for block in blocks_of(blocks, ThinkingBlock))
    calls = [_call(block) for block in blocks_of(blocks, ToolUseBlock)]
    content = "\n".join(texts) if texts or not blocks else None
    return chat.ChatMessage(role=role, content=content, reasoning_content=thinking or None, tool_calls=calls or None)


def blocks_of(blocks: Iterable[Block], kind: type[BlockT]) -> list[BlockT]:
    """Those of the blocks that are of one kind."""
    return [block for block in blocks if isinstance(block, kind)]


def _result(block: ToolResultBlock) -> chat.ChatMessage:
    text = _text(block.content or "")
    return chat.ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=f"Error: {text}" if block.is_error else text)


def _call(block: ToolUseBlock) -> chat.ToolCall:
    arguments = block.input if isinstance(block.input, str | dict) else msgspec.json.encode(block.input).decode()
    return chat.ToolCall(id=block.id, function=chat.CalledFunction(name=block.name, arguments=arguments))


def _text(content: str | Sequence[TextBlock | ToolReferenceBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
