"""The body of /v1/chat/completions. The other endpoints for conversations turn theirs into it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from enginery.contracts.request import MAX_TOP_LOGPROBS
from enginery.errors import RequestError
from enginery.serve.schemas.body_decoding import too_much
from enginery.serve.schemas.completions import MAX_MESSAGES, CacheControl, CommonRequest, Id, Int

MAX_TOOLS: Final = 256
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """arguments: JSON as text, an object, or what the model wrote. parsed_arguments: of OpenAI's client, without effect."""

    name: str
    arguments: str | dict[str, object] | None = None
    parsed_arguments: object = None


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A call that the model made earlier. index: as streams have it; without effect."""

    id: Id
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None

    def for_template(self) -> dict[str, object]:
        """With the arguments as text or as an object, as they were sent. Raises `RequestError` if they hold too much."""
        given = self.function.arguments
        if isinstance(given, str) and (told := too_much(given.encode(errors="surrogatepass"))):
            raise RequestError(f"the arguments of the call {self.id!r} hold {told}", param="messages")
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": given}}


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One message; its text parts are put together, one to a line.

    reasoning: another name of reasoning_content; reasoning_details: where there is neither. annotations: of one that has none.
    parsed, provider_specific_fields: no effect.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[dict[str, object]] | None = None
    annotations: Annotated[list[object], msgspec.Meta(max_length=0)] | None = None
    parsed: object = None
    provider_specific_fields: object = None
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, object]:
        """The message as a chat template reads it. Raises `RequestError` for fields that do not go with the role."""
        self._check()
        content = self.content if isinstance(self.content, str | None) else "\n".join(part.text for part in self.content)
        named = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self._reasoned}
        told: dict[str, object] = {"role": self.role, "content": content}
        told |= {name: value for name, value in named.items() if value is not None}
        if self.tool_calls:
            told["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return told

    @property
    def _reasoned(self) -> str | None:
        told = "".join(str(part.get("text") or part.get("summary") or "") for part in self.reasoning_details or ()) or None
        return next((text for text in (self.reasoning_content, self.reasoning, told) if text is not None), None)

    def _check(self) -> None:
        if self.reasoning not in (None, self._reasoned):
            raise RequestError("reasoning and reasoning_content of a message differ; send one of them", param="messages")
        if self.role != "assistant" and (self.tool_calls or self._reasoned):
            raise RequestError("only an assistant's message has tool_calls and reasoning_content", param="messages")
        if self.role != "tool" and self.tool_call_id is not None:
            raise RequestError("only a tool's message has tool_call_id", param="messages")
        if self.content is None and not (self.tool_calls or self._reasoned):
            raise RequestError(f"content of a message of the role {self.role} is missing or null", param="messages")


NO_PARAMETERS: Final[dict[str, object]] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the model may call. parameters: a JSON schema; without one it has none, as with OpenAI."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tool of the kind function, which is the only kind."""

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None

    def for_template(self, *, whole: bool = False) -> dict[str, object]:
        """The tool as a chat template reads it, without the fields that the request left out. whole: with what they stand for."""
        function = {"name": self.function.name, "description": self.function.description, "parameters": self.function.parameters}
        left_out = {"description": "", "parameters": NO_PARAMETERS} if whole else {}
        told = {name: left_out.get(name) if value is None else value for name, value in function.items()}
        return {"type": "function", "function": {name: value for name, value in told.items() if value is not None}}


class ChosenFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of the tool that must be called."""

    name: Id


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="function"):
    """The tool that must be called, or one of those that may be."""

    function: ChosenFunction


class Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """mode: whether one of these tools may be called, or must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="allowed_tools"):
    """The tools that may be called; the model is told about all."""

    allowed_tools: Allowed


Choice = Literal["auto", "none", "required"] | ToolChoice | AllowedTools
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """As Anthropic's and GLM's clients send it. budget_tokens: without effect. display: omitted leaves the text of thinking out.

    disabled: a model that nothing keeps from reasoning does, and the text is left out; agents send it with what should be short.
    """

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: Int | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_told(self) -> bool:
        return self.type != "disabled" and self.display != "omitted"


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The same as OpenRouter's clients send it. max_tokens: without effect. exclude: the text of thinking is left out."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Int | None = None
    exclude: bool | None = None


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the client expects of the answer. Without effect: guesses are the drafter's."""

    type: Literal["content"]
    content: str | list[TextPart]


class ChatRequest(CommonRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/chat/completions. chat_template: refused unless the operator trusts those of requests.

    enable_thinking: as Qwen's clients send it; include_reasoning: as OpenRouter's. verbosity: for templates that have it.
    """

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    verbosity: Verbosity | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: Prediction | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None

    @property
    def effort(self) -> Effort | None:
        """What all fields that are about reasoning come to; medium where it is enabled and nothing else is said."""
        reasoning, told = self.reasoning or Reasoning(), {"enabled": True, "disabled": False}
        enabled = (self.enable_thinking, reasoning.enabled, told.get(self.thinking.type) if self.thinking else None)
        if False in enabled:
            return "none"
        return self.reasoning_effort or reasoning.effort or ("medium" if True in enabled else None)

    @property
    def may_not_reason(self) -> bool:
        """Whether it is refused where nothing keeps the model from reasoning."""
        return self.effort == "none" and (self.thinking is None or self.thinking.type != "disabled")

    @property
    def shows_reasoning(self) -> bool:
        excluded = self.include_reasoning is False or (self.reasoning is not None and self.reasoning.exclude)
        return not excluded and (self.thinking is None or self.thinking.is_told)
