"""Conversations of any endpoint: from a body to the prompt, the requests and their growing answers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginery.contracts.parsers import ParserSpec, Tool
from enginery.errors import RequestError
from enginery.plugin.near import known_names
from enginery.serve.api.answer_parsers import AnswerFormat
from enginery.serve.api.chat_templates import tells_tools
from enginery.serve.api.choices import ChoiceDelta, Tally, choice_deltas
from enginery.serve.api.served_model import Job, Prompt, ServedModel
from enginery.serve.api.service import Heading, Service
from enginery.serve.schemas.chat import NO_PARAMETERS, AllowedTools, ChatMessage, ChatRequest, Choice, FunctionTool, ToolChoice
from enginery.serve.schemas.structured_outputs import FieldGrammar, asked_grammar


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation whose answers can begin: iterate over `deltas`, and close it. tally: nothing is counted yet."""

    heading: Heading
    jobs: Sequence[Job]
    deltas: AsyncGenerator[ChoiceDelta, None]
    tally: Tally


async def open_conversation(service: Service, asked: ChatRequest, prefix: str) -> Conversation:
    """Check a conversation and make the requests of its answers. prefix: of the answer's id. Raises `EnginError`."""
    model = service.model()
    if asked.top_logprobs and not asked.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    ready = await _ready(model, asked)
    prompt, how = ready.prompt, ready.how
    params = model.params(
        asked,
        default_max_tokens=max(1, model.facts.max_model_len - len(prompt.token_ids)),
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        prompt_logprobs=asked.prompt_logprobs,
    )
    if how.needs_special_tokens:
        params = dataclasses.replace(params, skip_special_tokens=False)
    heading = Heading.new(prefix, model.check_name(asked.model))
    jobs = model.jobs(asked, [prompt], params, heading.id, grammar=ready.grammar)
    deltas = choice_deltas(service.engine, model.text.tokenizer, jobs, how)
    return Conversation(heading=heading, jobs=jobs, deltas=deltas, tally=Tally(jobs))


async def prompt_of(model: ServedModel, asked: ChatRequest) -> Prompt:
    """The prompt that `open_conversation` would give to the engine. Raises `RequestError`."""
    return (await _ready(model, asked)).prompt


@contextlib.contextmanager
def naming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in `RequestError`s, for a body that was turned into another one. names: by the names in that one."""
    try:
        yield
    except RequestError as error:
        old, error.param = error.param, names.get(error.param or "", error.param)
        error.args = (str(error).replace(f"{old} is ", f"{error.param} is ", 1),)
        raise


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A prompt, how to read its answers, and what they must follow."""

    prompt: Prompt
    how: AnswerFormat
    grammar: FieldGrammar | None


async def _ready(model: ServedModel, asked: ChatRequest) -> _Ready:
    model.check_name(asked.model)
    tools, grammar = _usable_tools(asked, model), asked_grammar(asked)
    must_call, or_json = bool(tools) and not _is_free(asked), bool(tools) and grammar is not None
    text = await model.render(asked, tools=tools)
    must_follow = must_call or (grammar is not None and not or_json)
    text, how = _how_to_read(asked, model, tools, text, must_call=must_call, must_follow=must_follow)
    if must_call or or_json or isinstance(asked.tool_choice, AllowedTools) or any(tool.strict for tool in how.tools):
        grammar = _grammar_of_calls(asked, how, grammar)
    (prompt,) = await model.prompts(text, add_special_tokens=asked.add_special_tokens is True, field="messages")
    return _Ready(prompt=prompt, how=dataclasses.replace(how, or_json=or_json), grammar=grammar)


def _usable_tools(asked: ChatRequest, model: ServedModel) -> Sequence[FunctionTool]:
    """The tools that the model may call, and is told about. With tool_choice none there are none. Raises `RequestError`."""
    tools, choice = asked.tools or (), asked.tool_choice
    _check_tools([tool.function.name for tool in tools], choice)
    if not tools or choice == "none":
        return ()
    if model.parsers.tools is None:
        known = known_names(model.parsers.tool_names)
        advice = f"start the server with --tool-parser NAME, or send tool_choice none; there are {known}"
        raise RequestError(f"no parser of tool calls is known to suit this model; {advice}", param="tools")
    if _is_free(asked) and not tells_tools(asked.chat_template or model.text.template.source, model.parsers.tools):
        why = "the chat template does not write tools, so the model would not know of them"
        advice = "force a call with tool_choice, or start the server with a --chat-template that does"
        raise RequestError(f"{why}; {advice}", param="tools")
    return tools


def _is_free(asked: ChatRequest) -> bool:
    """Whether the model may answer without a call."""
    choice = asked.tool_choice
    return (choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice) in (None, "auto")


def _named(choice: Choice | None) -> set[str]:
    """The tools that a choice names."""
    chosen = choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice]
    return {each.function.name for each in chosen if isinstance(each, ToolChoice)}


def _check_tools(names: Sequence[str], choice: Choice | None) -> None:
    """Raises `RequestError` for two tools of one name, and for a choice that none of them fits."""
    if unknown := _named(choice) - set(names):
        raise RequestError(f"tool_choice names {min(unknown)!r}, which is none of the tools", param="tool_choice")
    if not names and choice == "required":
        raise RequestError("tool_choice is required, but there are no tools", param="tool_choice")
    if len(set(names)) < len(names):
        raise RequestError("two tools have the same name", param="tools")


def _grammar_of_calls(asked: ChatRequest, how: AnswerFormat, answer: FieldGrammar | None) -> FieldGrammar:
    """A grammar of calls that are forced, or else restricted to allowed tools and strict schemas. answer: of one without calls."""
    spec = how.tool_parser
    assert spec is not None
    by_choice = how.calls_only or isinstance(asked.tool_choice, AllowedTools)
    field, advice = ("tool_choice", "send tool_choice auto") if by_choice else ("tools", "leave strict out")
    force, what, at_fault = spec.force, "calls", "tools"
    if answer is not None:
        field = at_fault = answer.field
        what, advice = f"calls or a {answer.grammar.kind}", "leave one out, or send tool_choice none"
        force = spec.force_or_json and spec.force_or_json(answer.grammar)
    name = asked.tool_choice.function.name if isinstance(asked.tool_choice, ToolChoice) else None
    reasoning = ("", "") if how.calls_only else _reasoning_tags(how, field=field, advice=advice)
    with naming_fields({"": "tools", "grammar": at_fault}):
        grammar = force(how.tools, name, parallel=how.parallel, required=how.calls_only, reasoning=reasoning) if force else None
    if grammar is None:
        raise RequestError(f"the parser {spec.name} has no grammar of {what}; {advice}", param=field)
    return FieldGrammar(field, grammar)


def _reasoning_tags(how: AnswerFormat, *, field: str, advice: str) -> tuple[str, str]:
    """The tags between which reasoning is written, empty if there is none; the first is empty too if the prompt has opened it."""
    if how.reasoning is None:
        return "", ""
    begin, end = how.reasoning.tags
    if not (begin and end):
        message = f"the parser {how.reasoning.name} does not say between which tags reasoning is; {advice}"
        raise RequestError(message, param=field)
    return "" if how.is_inside else begin, end


def _how_to_read(
    asked: ChatRequest, model: ServedModel, tools: Sequence[FunctionTool], text: str, *, must_call: bool, must_follow: bool
) -> tuple[str, AnswerFormat]:
    """The prompt, and how to parse its answers. must_follow: from their beginning on, so reasoning that is open is closed."""
    spec = model.parsers.reasoning
    is_inside = bool(spec and spec.is_inside and spec.is_inside(text))
    if spec is not None and asked.continue_final_message:
        is_inside |= _opens_reasoning(asked.messages[-1], spec)
    if is_inside and must_follow:
        assert spec is not None
        text, is_inside = text + spec.close, False
    return text, AnswerFormat(
        reasoning=spec,
        tool_parser=model.parsers.tools if tools else None,
        tools=_for_parser(tools, asked.tool_choice),
        is_inside=is_inside,
        parallel=asked.parallel_tool_calls is not False,
        calls_only=must_call,
        goes_on=asked.continue_final_message is True,
        tells_logprobs=asked.logprobs is True,
    )


def _opens_reasoning(final: ChatMessage, spec: ParserSpec) -> bool:
    """Whether a message that is to be continued ends within reasoning."""
    (begin, end), text = spec.tags, str(final.for_template()["content"])
    return bool(begin) and text.lstrip().startswith(begin) and end not in text


def _for_parser(tools: Sequence[FunctionTool], choice: Choice | None) -> list[Tool]:
    """Those that may be called."""
    allowed = _named(choice) if isinstance(choice, AllowedTools) else None
    functions = [tool.function for tool in tools if allowed is None or tool.function.name in allowed]
    schemas = [NO_PARAMETERS if each.parameters is None else each.parameters for each in functions]
    named = zip(functions, schemas, strict=True)
    return [Tool(name=each.name, parameters=schema, strict=each.strict is True) for each, schema in named]
