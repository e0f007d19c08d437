"""The process that renders chat templates: frames on stdin, answers on stdout, until stdin ends.

The first frame is answered with an empty one when the process is ready, and so is every empty frame, which asks whether it still
answers. Whatever takes too long is ended by the kernel (SIGPROF), whatever takes too much memory by a limit on the address space;
the parent sees that the answer is missing.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from typing import Final

import jinja2
import jinja2.ext
import jinja2.meta
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from enginery.child_process import read_frame, write_frame

GIVEN: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # what every template gets
INSTRUCTS: Final = ("system", "developer")  # roles whose messages no template may leave out


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a template may take for one conversation. cpu_s: of processor time, so that a busy machine fails nobody.

    wall_s: by the clock, after which the process counts as stuck, by no fault of the conversation.
    """

    cpu_s: float = 5.0
    wall_s: float = 15.0
    memory_bytes: int = 1 << 30
    num_chars: int = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first frame: the model's template, its own variables, and the limits."""

    template: str
    variables: dict[str, str]
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """Every further frame: one conversation.

    variables: a template that does not use one of them is an error. switches: each is given to a template that uses it, and if
    needs_switch, one that uses none of them is an error. template: instead of that of `Start`.
    """

    messages: list[dict[str, object]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, object]] | None = None
    variables: dict[str, object] = field(default_factory=dict)
    switches: dict[str, object] = field(default_factory=dict)
    needs_switch: bool = False
    template: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The answer: a text, or why there is none, to go on from "the model's chat template", and what is to blame."""

    text: str | None = None
    error: str | None = None
    param: str = "messages"


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks a model's own words for training; here it only passes them on."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Arguments(dict[str, object]):
    """Of a call: an object for the templates that expect one, and JSON for those that put it into a text.

    Models also write what is no JSON object: that stays as it is in a text, and the object has it as `arguments`.
    """

    def __init__(self, given: object) -> None:
        found = given or {}
        if isinstance(given, str):
            with contextlib.suppress(ValueError, RecursionError):
                found = msgspec.json.decode(given.strip() or "{}") or {}
        self.text = "" if isinstance(found, dict) else str(given)
        super().__init__(found if isinstance(found, dict) else {"arguments": self.text})

    def __str__(self) -> str:
        return _tojson(self)

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def syntax_error(source: str) -> str:
    """What is wrong with a template as it is written, to go on from its name; empty if nothing is."""
    try:
        _environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        return f"is broken in line {error.lineno}: {error.message}"
    return ""


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=8)
def _variables_of(source: str) -> frozenset[str]:
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own escapes HTML."""
    if isinstance(value, _Arguments) and value.text:
        return value.text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# Complexity 11: every way in which rendering can end is in one place.
def render(start: Start, asked: Rendering) -> Rendered:
    """Errors of the template, of whatever type, become the answer."""
    source = start.template if asked.template is None else asked.template
    try:
        template = _compiled(source)
        variables = asked.variables | asked.switches
        if variables and (refused := _refused(asked, _variables_of(source) - GIVEN - start.variables.keys())):
            return refused
        messages, mark = _as_templates_expect(asked.messages), f"{uuid.uuid4().hex} "
        if asked.continue_final_message:
            messages[-1]["content"] = f"{messages[-1]['content']}{mark}"
        given = {**start.variables, **variables, "messages": messages, "tools": asked.tools, "documents": None}
        given["add_generation_prompt"] = asked.add_generation_prompt
        write = partial(_written, template, given, num_chars=start.limits.num_chars)
        if _leaves_out(messages, text := write(), write):
            return Rendered(error="leaves out what the system or the developer says; let a user say it, or give a --chat-template")
        return _until_mark(text, asked.messages[-1]["content"], mark) if asked.continue_final_message else Rendered(text=text)
    except jinja2.TemplateSyntaxError as error:
        where, param = (" in the checkpoint's folder", "messages") if asked.template is None else ("", "chat_template")
        return Rendered(error=f"is broken in line {error.lineno}: {error.message}; correct it{where}", param=param)
    except Exception as error:  # a template may raise anything
        return Rendered(error=f"refuses these messages: {str(error) or type(error).__name__}")


def _written(template: jinja2.Template, given: dict[str, object], *, num_chars: int) -> str:
    """The whole text. Raises `jinja2.TemplateError` as soon as it is longer than allowed."""
    taken, left = list[str](), num_chars
    for part in template.generate(given):
        left -= len(part)
        if left < 0:
            raise jinja2.TemplateError(f"they make more than {num_chars:,} characters")
        taken.append(part)
    return "".join(taken)


def _leaves_out(messages: list[dict[str, object]], text: str, write: Callable[[], str]) -> bool:
    """Whether the text lacks a message of the system or the developer. Found out by a mark in each, which stays there.

    One at the beginning alone is looked for first. The words of others would show nothing: they may have been said elsewhere too.
    """
    places = [place for place, message in enumerate(messages) if message.get("role") in INSTRUCTS]
    if not places or (places == [0] and str(messages[0].get("content")).strip() in text):
        return False
    mark = uuid.uuid4().hex
    for place in places:
        said, own = messages[place].get("content") or "", f"{mark}{place}."
        messages[place]["content"] = [{"type": "text", "text": own}, *said] if isinstance(said, list) else f"{said}{own}"
    return {int(place) for place in re.findall(rf"{mark}(\d+)\.", write())} != set(places)


def _refused(asked: Rendering, known: frozenset[str]) -> Rendered | None:
    told = f"its variables are {', '.join(sorted(known)) or 'none'}"[:500]
    for name in asked.variables.keys() - known:
        return Rendered(error=f"does not use the variable {name!r}; {told}", param="chat_template_kwargs")
    if asked.needs_switch and not {name for name, value in asked.switches.items() if value in ("none", False)} & known:
        return Rendered(error=f"has none of {', '.join(asked.switches)}; {told}", param="reasoning_effort")
    return None


def _as_templates_expect(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Copies, with arguments that are objects and texts, and the reasoning under both of its names, as transformers has it."""
    found = []
    for message in messages:
        reasoning = message.get("reasoning_content")
        found.append(message.copy() if reasoning is None else {"thinking": reasoning, **message})
        if isinstance(calls := message.get("tool_calls"), list):
            functions = [{**call["function"], "arguments": _Arguments(call["function"].get("arguments"))} for call in calls]
            found[-1]["tool_calls"] = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return found


def _until_mark(text: str, content: object, mark: str) -> Rendered:
    """The text until the end of the last message's content, where the mark is, whose blank is gone if the template trims it."""
    place = text.rfind(mark.strip())
    if place < 0 or str(content).strip() not in text:
        told = "rewrites or leaves out the final message, so that it cannot be continued"
        return Rendered(error=told, param="continue_final_message")
    return Rendered(text=text[:place] if text.startswith(mark, place) else text[:place].rstrip())


def main() -> None:
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    if (first := read_frame(source)) is None:
        return
    start = msgspec.msgpack.decode(first, type=Start)
    resource.setrlimit(resource.RLIMIT_AS, (start.limits.memory_bytes, start.limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write_frame(answers, b"")
    while (asked := read_frame(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, start.limits.cpu_s)
        rendered = msgspec.msgpack.encode(render(start, msgspec.msgpack.decode(asked, type=Rendering))) if asked else b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, rendered)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the whole group, whose parent drains
        signal.signal(number, signal.SIG_IGN)
    main()
