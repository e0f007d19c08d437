"""Chat templates: the fields of a body that are about them, and turns at the one process that renders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final, TypeVar

from enginery.contracts.parsers import ParserSpec, Told, writes_tools
from enginery.errors import RequestError
from enginery.serve.schemas.chat import ChatRequest, FunctionTool
from enginery.text.template import ChatTemplate, TemplateStuck

_Message = dict[str, Any]
ResultT = TypeVar("ResultT")
_SWITCHES: Final = ("enable_thinking", "thinking")  # as Qwen and GLM, and as DeepSeek call it
_LATE_S: Final = 2.0
_PROBE_S: Final = 2.0
_PROBE_AGAIN_S: Final = 1.0


def renderer(template: ChatTemplate, asked: ChatRequest, *, reasons: bool, trusts_templates: bool) -> Callable[..., str]:
    """Renders messages and tools as the request asks. reasons: a parser of reasoning suits the model. Raises `RequestError`.

    An effort is the template's variable of that name, and the switch with which the model reasons or does not; a template without
    them goes without. "none" needs one where the model reasons, as does a switch that is off in `chat_template_kwargs`; `thinking`
    that is disabled does not.
    """
    if asked.chat_template is not None and not trusts_templates:
        why = "templates of requests are not trusted here; the operator may allow them with --trust-request-chat-template"
        raise RequestError(f"'chat_template' is not accepted: {why}", param="chat_template")
    variables = dict(asked.chat_template_kwargs or {})
    switches = _switches_of(asked, variables)
    if not reasons:
        switches |= {name: variables.pop(name) for name in _SWITCHES if variables.get(name) is False}
    return partial(
        template.render,
        template=asked.chat_template,
        variables=variables,
        switches=switches,
        needs_switch=asked.may_not_reason and reasons and not variables.keys() & {"reasoning_effort", *_SWITCHES},
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message is True,
    )


def ways_to_tell(
    asked: ChatRequest, tools: Sequence[FunctionTool], source: str, parser: ParserSpec | None
) -> Iterator[tuple[Told, ...]]:
    """Tools and messages, first as they are, then for templates that want more or less. Made when they are asked for.

    Qwen 3's takes it that messages have content; gpt-oss' that tools are described, and that thoughts or content go with calls;
    Llama 3's that messages have one call. source: of the template. parser: of calls, which tells them to templates that do not.
    """
    offered, given = [tool.for_template() for tool in tools], [message.for_template() for message in asked.messages]
    offered, given = _told_otherwise(parser, source, offered, given) or (offered, given)
    yield offered, given
    full, whole = [each | {"content": each["content"] or ""} for each in given], [tool.for_template(whole=True) for tool in tools]
    told = [(offered, given)]
    for way in product((offered, whole), (given, full, list(map(_with_one_thought, full)), _with_one_call_each(full))):
        if way not in told:
            told.append(way)
            yield way


def tells_tools(source: str | None, parser: ParserSpec) -> bool:
    """Whether a template writes tools, or gets them from the parser of calls in another way."""
    return writes_tools(source) or _told_otherwise(parser, source or "", [], []) is not None


def _told_otherwise(parser: ParserSpec | None, source: str, tools: Told, messages: Told) -> tuple[Told, Told] | None:
    return None if parser is None or parser.tell is None else parser.tell(source, tools, messages)


def _with_one_thought(message: dict[str, object]) -> dict[str, object]:
    if not message["content"] or not {"reasoning_content", "tool_calls"} <= message.keys():
        return message
    return message | {"content": "", "reasoning_content": f"{message['reasoning_content']}\n\n{message['content']}"}


def _with_one_call_each(messages: Sequence[_Message]) -> list[dict[str, object]]:
    """Calls of one message as if each had waited for the result of the one before. As they are where an id comes twice."""
    answers = [message for message in messages if "tool_call_id" in message]
    results, told = {message["tool_call_id"]: message for message in answers}, list[dict[str, object]]()
    if len(results) < len(answers):
        return list(messages)
    for message in messages:
        if len(message.get("tool_calls", ())) > 1:
            told += _calls_apart(message, results)
        elif message.get("tool_call_id") is None or message["tool_call_id"] in results:
            told.append(message)
    return told


def _calls_apart(message: _Message, results: dict[str, dict[str, object]]) -> Iterator[dict[str, object]]:
    """A message for each call, and its result, which is taken out of `results`."""
    for place, call in enumerate(message["tool_calls"]):
        yield ({"role": message["role"], "content": ""} if place else message) | {"tool_calls": [call]}
        if call["id"] in results:
            yield results.pop(call["id"])


def _switches_of(asked: ChatRequest, variables: Mapping[str, object]) -> dict[str, object]:
    """The variables that fields set. Raises `RequestError` where the request sets one of them to something else."""
    switches: dict[str, object] = {} if asked.verbosity is None else {"verbosity": asked.verbosity}
    if (effort := asked.effort) is not None:
        switches |= {"reasoning_effort": effort, **dict.fromkeys(_SWITCHES, effort != "none")}
    for name in variables.keys() & switches.keys():
        if variables[name] != switches[name]:
            other = f"verbosity of {asked.verbosity!r}" if name == "verbosity" else f"reasoning_effort of {effort!r}"
            message = f"it has {name} {variables[name]!r:.50}, against a {other}; send one of them"
            raise RequestError(f"chat_template_kwargs: {message}", param="chat_template_kwargs")
    return switches


class TemplateTurns:
    """Renders conversations one after another, so that a template that is stuck holds one thread and no more."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._began_s = 0.0
        self._probed_s = 0.0
        self._answers = True

    async def render(self, template: ChatTemplate, render: Callable[[], str]) -> str:
        """Call `render` on a thread when it is its turn, and return the text. Raises `TemplateStuck` if that takes too long."""
        try:
            async with asyncio.timeout(2 * template.limits.wall_s):
                await self._turn.acquire()
        except TimeoutError:
            raise TemplateStuck("the conversations before this one take too long to render; try again in a moment") from None
        text = await self._apart(render)
        self._answers = True
        return text

    async def can_render(self, template: ChatTemplate) -> bool:
        """Whether a conversation would be rendered soon. The process that renders is asked once a second at most."""
        if self._turn.locked():
            return time.monotonic() - self._began_s < _LATE_S
        if time.monotonic() - self._probed_s >= _PROBE_AGAIN_S:
            await self._turn.acquire()
            self._probed_s = time.monotonic()
            self._answers = await self._apart(partial(template.answers, _PROBE_S))
        return self._answers

    async def _apart(self, work: Callable[[], ResultT]) -> ResultT:
        """On a thread, which has the turn until it is done, though whoever waits for it may be gone before."""
        self._began_s = time.monotonic()
        working = asyncio.create_task(asyncio.to_thread(work))
        working.add_done_callback(self._give_back)
        return await asyncio.shield(working)

    def _give_back(self, working: asyncio.Task[object]) -> None:
        self._turn.release()
        if not working.cancelled():
            working.exception()  # nobody may be there to be told
