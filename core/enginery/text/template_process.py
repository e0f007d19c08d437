"""The process that renders one chat template: frames on stdin, answers on stdout, until stdin ends.

Whatever takes too long is ended by the kernel (SIGPROF), whatever takes too much memory by a limit on the address space; the parent
sees that the answer is missing.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a template may take for one conversation. cpu_s: of processor time, so that a busy machine fails nobody."""

    cpu_s: float = 5.0
    memory_bytes: int = 1 << 30
    num_chars: int = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first frame."""

    template: str
    variables: dict[str, str]
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """Every further frame: one conversation."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The answer: a text, or why there is none, to go on from "the model's chat template"."""

    text: str | None = None
    error: str | None = None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks a model's own words for training; here it only passes them on."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Arguments(dict[str, Any]):
    """Of a call: an object for the templates that expect one, and JSON for those that put it into a text."""

    def __str__(self) -> str:
        return _tojson(self)

    def __radd__(self, text: str) -> str:
        return text + str(self)


def compile_template(source: str) -> jinja2.Template:
    """As transformers compiles it. Raises jinja2's errors."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(template: Callable[[], jinja2.Template], start: Start, asked: Rendering) -> Rendered:
    """Errors of the template, of whatever type, become the answer."""
    try:
        parts, num_chars = [], 0
        for message in asked.messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = _Arguments(call["function"]["arguments"])
        given = {"tools": asked.tools, "documents": None, "add_generation_prompt": asked.add_generation_prompt}
        for part in template().generate(messages=asked.messages, **start.variables, **given):
            num_chars += len(part)
            if num_chars > start.limits.num_chars:
                return Rendered(error=f"made more than {start.limits.num_chars:,} characters of these messages")
            parts.append(part)
        return Rendered(text="".join(parts))
    except jinja2.TemplateSyntaxError as error:
        return Rendered(error=f"is broken in line {error.lineno}: {error.message}; correct it in the checkpoint's folder")
    except Exception as error:  # a template may raise anything
        return Rendered(error=f"refuses these messages: {str(error) or type(error).__name__}")


def main() -> None:
    """Answer until stdin ends."""
    source, answers = sys.stdin.buffer, sys.stdout.buffer

    def frame() -> bytes | None:
        head = source.read(8)
        return source.read(int.from_bytes(head, "big")) if len(head) == 8 else None

    first = frame()
    if first is None:
        return
    start = msgspec.json.decode(first, type=Start)
    resource.setrlimit(resource.RLIMIT_AS, (start.limits.memory_bytes, start.limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled: list[jinja2.Template] = []

    def template() -> jinja2.Template:
        if not compiled:
            compiled.append(compile_template(start.template))
        return compiled[0]

    while (asked := frame()) is not None:
        signal.setitimer(signal.ITIMER_PROF, start.limits.cpu_s)
        answer = msgspec.msgpack.encode(render(template, start, msgspec.msgpack.decode(asked, type=Rendering)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(answer).to_bytes(8, "big") + answer)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        main()
