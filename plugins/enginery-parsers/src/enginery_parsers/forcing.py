"""Grammars of the families' own formats, of answers that must call a tool or may. They are Lark in llguidance's dialect.

Arguments are spaced as in the models' templates. A lazy lexeme ends where it first can, and no other goes on from there: text up to
a marker is followed by a call, and text without one ends the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from enginery.api import Grammar, GrammarKind, RequestError, Tool
from enginery_parsers.calls import GRANITE, HERMES, LONGCAT, NEMOTRON, PHI, TOOL_CALLS, ObjectFormat
from enginery_parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from enginery_parsers.framed import KIMI, MINIMAX_TEXT
from enginery_parsers.harmony import CALL, CHANNEL, END, MESSAGE, RETURN, START
from enginery_parsers.lark import json_answer, json_value, literal, pattern, up_to
from enginery_parsers.mistral import ARGUMENTS, MISTRAL
from enginery_parsers.pythonic import LFM2
from enginery_parsers.tagged import GLM, MIMO, MINIMAX, QWEN, TaggedFormat, argument_types
from enginery_parsers.tagged import LONGCAT as LONGCAT_TAGS
from enginery_parsers.tagged_arguments import ANY_KEY, TaggedArguments, check_tool, is_any_boolean, json_argument, refusal

_BLANK: Final = r"[ \t\r\n]"
_LLAMA: Final = '{"name": "'
_LFM2: Final = "LFM2"
_PYTHON_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# An object that can be a call where one is looked for: its first member is one of a call's, or is spelt with an escape.
_LLAMA_CALL: Final = (
    rf"((?s:.*)(\n|<\|python_tag\|>{_BLANK}*)|{_BLANK}*)\{{{_BLANK}*"
    r'"((name|arguments|parameters|id|type)"|[a-z]*\\)(?s:.*)'
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `ForceFn` is called with. schema: of the JSON that an answer without calls is, lenient: as `Grammar` has it; None: it is
    any text."""

    tools: Sequence[Tool]
    name: str | None
    parallel: bool
    required: bool
    reasoning: tuple[str, str]
    schema: str | None = None
    lenient: bool = False

    @property
    def wanted(self) -> list[Tool]:
        """The tools that may be called."""
        return [tool for tool in self.tools if self.name in (None, tool.name)]

    @property
    def several(self) -> bool:
        """Whether calls may stand side by side where no text may."""
        return self.parallel and self.name is None

    @property
    def calls_alone(self) -> bool:
        """Whether no text may stand around calls."""
        return self.required or self.schema is not None


class ForceJson:
    """Calls whose arguments are JSON.

    around: the texts before a call's name, between name and arguments, and after; the parser reads a call where it finds the first
    `trigger` characters of it. between: calls. ends: before and after all. number: Lark behind a name.
    """

    def __init__(self, *around: str, trigger: str, between: str = "", ends: tuple[str, str] = ("", ""), number: str = "") -> None:
        before, self._middle, self._after = around
        self._trigger, self._before = trigger, before.removeprefix(trigger)
        self._number = number
        self._between = between
        self._ends = ends

    def __call__(self, asked: Asked) -> Grammar | None:
        """Make the grammar."""
        calls, rules = self._calls(asked)
        begin, end = self._ends
        more = f" ({literal(self._between + self._trigger)} call)*" if asked.several else ""
        section = f"{literal(self._trigger)} call{more} {literal(end)}"
        if asked.calls_alone:
            return _grammar(_alone(asked, f"{literal(begin)} {section}"), calls, rules)
        leads = [f"lead[lazy]: {up_to(self._trigger)}"]
        piece = "lead call"
        if begin:
            leads.append(f"lead_of_all[lazy]: {up_to(begin)}")
            piece = f"({piece} | lead_of_all {section})"
        rest = f"({piece})* TEXT" if asked.parallel else f"{piece} | TEXT"
        return _grammar([*_starts(asked.reasoning), f"rest: {rest}", *leads], calls, rules)

    def _calls(self, asked: Asked) -> tuple[list[str], list[str]]:
        """Each without the trigger, and the rules of their arguments."""
        calls, rules = [], []
        for index, tool in enumerate(asked.wanted):
            middle = f"{self._number} {literal(self._middle)}" if self._number else ""
            named = f"{literal(self._before + tool.name)} {middle}" if middle else literal(self._before + tool.name + self._middle)
            calls.append(f"{named} arguments_{index} {literal(self._after)}")
            rules.append(f"arguments_{index}: {_object(tool, required=asked.required)}")
        return calls, rules


class ForceLlama(ForceJson):
    """Objects without a marker: an answer is calls from its beginning, or text that cannot be taken for one."""

    def __call__(self, asked: Asked) -> Grammar | None:
        """Make the grammar."""
        if asked.required:
            return super().__call__(asked)
        if asked.schema is not None:
            return None  # a call begins as JSON does
        calls, rules = self._calls(asked)
        more = f" ({literal(self._between + self._trigger)} call)*" if asked.parallel else ""
        lines = [
            f"rest: FIRST call{more} | NO_CALL",
            r'FIRST: /\n{0,2}\{"(type": "function", ")?name": "/',
            f"NO_CALL: /(?s:.*)/ & ~/{_LLAMA_CALL}/",
        ]
        return _grammar([*_starts(asked.reasoning), *lines], calls, rules)


class ForceList(ForceJson):
    """One list of calls, between a marker and another. around: as above, without the markers. opens: behind the first one."""

    def __init__(self, written: ObjectFormat, *around: str, opens: str, between: str, closes: str) -> None:
        super().__init__(*around, trigger="", between=between)
        self._opens, self._closes = opens, literal(closes + written.end)
        self._marker = written.begin

    def __call__(self, asked: Asked) -> Grammar | None:
        """Make the grammar."""
        calls, rules = self._calls(asked)
        more = f" ({literal(self._between)} call)*" if asked.several else ""
        if asked.calls_alone:
            return _grammar(_alone(asked, f"{literal(self._marker + self._opens)} call{more} {self._closes}"), calls, rules)
        piece = f"lead {literal(self._opens)} call{more} {self._closes}"
        rest = f"({piece})* TEXT" if asked.parallel else f"{piece} | TEXT"
        return _grammar([*_starts(asked.reasoning), f"rest: {rest}", f"lead[lazy]: {up_to(self._marker)}"], calls, rules)


class ForcePythonic(ForceList):
    """Calls as Python writes them. The values are JSON, which the parser reads too, but for the words of Python."""

    def _calls(self, asked: Asked) -> tuple[list[str], list[str]]:
        calls = []
        rules = ["ANY_NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/", f"any_argument: ANY_NAME {literal('=')} {json_value({}, exact=True)}"]
        for index, tool in enumerate(asked.wanted):
            arguments = '(any_argument (", " any_argument)*)?'
            if asked.required or tool.strict:
                arguments = f"first_{index}_0"
                rules += self._arguments(tool, index)
            calls.append(f"{literal(tool.name + '(')} {arguments} {literal(')')}")
        return calls, rules

    def _arguments(self, tool: Tool, index: int) -> list[str]:
        """Rules of the arguments from one place on, in the schema's order: `first` where none stands before, else `more`."""
        if tool.strict:
            check_tool(tool, _LFM2)
        listed = tool.parameters.get("required")
        wanted = listed if isinstance(listed, list) else []
        keys = list(argument_types(tool.parameters))
        if odd := [key for key in keys if not _PYTHON_NAME.fullmatch(key)]:
            raise refusal(tool, _LFM2, f"of the name {odd[0]!r}")
        rules = [f'first_{index}_{len(keys)}: ""', f'more_{index}_{len(keys)}: ""']
        for place, key in enumerate(keys):
            value, rest = _python_value(tool, key), f"more_{index}_{place + 1}"
            none_here, not_here = ("", "") if key in wanted else (f" | first_{index}_{place + 1}", f" | {rest}")
            rules += [
                f"first_{index}_{place}: {literal(key + '=')} {value} {rest}{none_here}",
                f"more_{index}_{place}: {literal(f', {key}=')} {value} {rest}{not_here}",
            ]
        return rules


class ForceTagged:
    """Calls whose arguments are pairs of tags."""

    def __init__(self, written: TaggedFormat) -> None:
        self._written = written
        self._arguments = TaggedArguments(written)

    def __call__(self, asked: Asked) -> Grammar | None:
        """Make the grammar."""
        written = self._written
        calls, rules = [], [self._arguments.any_text, ANY_KEY]
        for index, tool in enumerate(asked.wanted):
            arguments = self._arguments.any
            if asked.required or tool.strict:
                arguments, of_tool = self._arguments.rules(tool, index)
                rules += of_tool
            calls.append(f'{literal(tool.name + written.name_end)} "\\n"? "\\n"? {arguments} {literal(written.end)}')
        leads = [f"lead[lazy]: {up_to(written.begin)}"]
        piece = whole = "call"
        if written.section:
            more = f' ("\\n"? {literal(written.begin)} call)*' if written.many and asked.several else ""
            whole = f'"\\n"? {literal(written.begin)} call{more} "\\n"? {literal(written.section_end)}'
            leads.append(f"lead_of_all[lazy]: {up_to(written.section)}")
        section = literal(written.section or written.begin)
        if asked.calls_alone:
            more = f' ("\\n"? {section} {whole})*' if asked.several and not written.many else ""
            return _grammar(_alone(asked, f'"\\n"? {section} {whole}{more}'), calls, rules)
        piece = f"(lead call | lead_of_all {whole})" if written.section else "lead call"
        rest = f"({piece})* TEXT" if asked.parallel else f"{piece} | TEXT"
        return _grammar([*_starts(asked.reasoning), f"rest: {rest}", *leads], calls, rules)


def force_harmony(asked: Asked) -> Grammar | None:
    """Make the grammar. A call ends the answer, so there is one at most.

    The markers are special tokens here. Reasoning is one of the messages, so its tags tell nothing new. The model may have to end a
    final message that the prompt has begun.
    """
    calls, rules = [], []
    for index, tool in enumerate(asked.wanted):
        calls.append(f'{literal(f"commentary to=functions.{tool.name} ")} <|constrain|> "json" {MESSAGE} arguments_{index}')
        rules.append(f"arguments_{index}: {_object(tool, required=asked.required)}")
    if asked.required:
        return _grammar([f'start: ({END} {START} "assistant")? {CHANNEL} call'], calls, rules)
    markers = "|".join(pattern(marker) for marker in (START, CHANNEL, END, CALL, RETURN))
    last, channels = "message", "analysis|commentary|final"
    if asked.schema is not None:
        last, channels = f'{CHANNEL} "final" {MESSAGE} {json_answer(asked.schema, lenient=asked.lenient)}', "analysis"
    lines = [
        f'start: (message {END} {START} "assistant")* last',
        f"last: {last} | {CHANNEL} call",
        f"message: {CHANNEL} CHANNEL_NAME {MESSAGE} TEXT",
        f"CHANNEL_NAME: /{channels}/",
        f"TEXT: /(?s:.*)/ & ~/(?s:.*)({markers})(?s:.*)/",
    ]
    return _grammar(lines, calls, rules)


def _object(tool: Tool, *, required: bool) -> str:
    """The arguments as a JSON object; of a tool that is not strict, any object where no call is required."""
    schema = tool.parameters if required or tool.strict else {}
    if schema.get("type", "object") != "object":
        raise RequestError(f"the parameters of {tool.name} must describe an object, as arguments are", param="tools")
    return json_value({"type": "object", **schema}, exact=tool.strict)


def _python_value(tool: Tool, key: str) -> str:
    properties = tool.parameters["properties"]
    assert isinstance(properties, Mapping), "argument_types has looked"
    schema = properties[key]
    if is_any_boolean(schema):
        return '("True" | "False" | "true" | "false")'
    return json_argument(tool, schema) if isinstance(schema, Mapping) else json_value({}, exact=True)


def _alone(asked: Asked, calls: str) -> list[str]:
    """Calls without text around; where they are not required, reasoning that may be, then these or JSON of the schema."""
    if asked.required or asked.schema is None:
        return [f"start: {calls}"]
    rest = f'rest: "\\n"? "\\n"? ({calls} | {json_answer(asked.schema, lenient=asked.lenient)})'
    return [*_starts(asked.reasoning, endless=False), rest]


def _starts(reasoning: tuple[str, str], *, endless: bool = True) -> list[str]:
    """Reasoning that may be, then `rest`. endless: the answer may end within reasoning."""
    begin, end = reasoning
    lines = ["TEXT: /(?s:.*)/"] if endless else []
    if not end:
        return ["start: rest", *lines]
    lines += ["reasoned: ended rest" + " | TEXT" * endless, f"ended[lazy]: {up_to(end)}"]
    if not begin:
        return ["start: reasoned", *lines]
    return ["start: rest | opened reasoned", rf"opened[lazy]: /{_BLANK}{{0,16}}{pattern(begin)}/", *lines]


def _grammar(lines: Sequence[str], calls: Sequence[str], rules: Sequence[str]) -> Grammar | None:
    if not calls:
        return None
    call = f"call: {' | '.join(f'call_{index}' for index in range(len(calls)))}"
    called = [f"call_{index}: {each}" for index, each in enumerate(calls)]
    return Grammar(kind=GrammarKind.GRAMMAR, source="\n".join([*lines, call, *called, *rules]) + "\n")


def _objects(written: ObjectFormat) -> ForceJson:
    around = (f'{written.begin}\n{{"name": "', '", "arguments": ', f"}}\n{written.end}")
    return ForceJson(*around, trigger=written.begin, between="\n")


def _list_of_objects(written: ObjectFormat, *, opens: str, between: str, closes: str) -> ForceList:
    return ForceList(written, '{"name": "', '", "arguments": ', "}", opens=opens, between=between, closes=closes)


FORCED_BY: Final[Mapping[str, Callable[[Asked], Grammar | None]]] = {
    "hermes": _objects(HERMES),
    "longcat": _objects(LONGCAT),
    "granite3": _list_of_objects(GRANITE, opens="[", between=", ", closes="]"),
    "phi4-mini": _list_of_objects(PHI, opens="[", between=", ", closes="]"),
    "nemotron": _list_of_objects(NEMOTRON, opens="[", between=", ", closes="]"),
    "jamba": _list_of_objects(TOOL_CALLS, opens="[\n    ", between=",\n    ", closes="\n]"),
    "minimax-m1": _list_of_objects(TOOL_CALLS, opens="\n", between="\n", closes="\n"),
    "llama3-json": ForceLlama(_LLAMA, '", "parameters": ', "}", trigger=_LLAMA, between="; "),
    "mistral": _list_of_objects(MISTRAL, opens="[", between=", ", closes="]"),
    "mistral-args": ForceJson(MISTRAL.begin, ARGUMENTS, "", trigger=MISTRAL.begin),
    "deepseek-v3": ForceJson(
        f"{CALL_BEGIN}function{SEPARATOR}",
        "\n```json\n",
        f"\n```{CALL_END}",
        trigger=CALL_BEGIN,
        between="\n",
        ends=(CALLS_BEGIN, CALLS_END),
    ),
    "deepseek-v3.1": ForceJson(CALL_BEGIN, SEPARATOR, CALL_END, trigger=CALL_BEGIN, ends=(CALLS_BEGIN, CALLS_END)),
    "kimi-k2": ForceJson(
        f"{KIMI.begin}functions.",
        KIMI.separator,
        KIMI.ends[0],
        trigger=KIMI.begin,
        ends=(KIMI.sections[0], KIMI.ends[1]),
        number="/:[0-9]{1,4}/",
    ),
    "minimax-text": ForceJson(
        f"{MINIMAX_TEXT.begin}```typescript\nfunctions.",
        MINIMAX_TEXT.separator,
        ")\n```",
        trigger=MINIMAX_TEXT.begin,
        between="\n",
    ),
    "glm4": ForceTagged(GLM),
    "longcat-tags": ForceTagged(LONGCAT_TAGS),
    "qwen3-xml": ForceTagged(QWEN),
    "mimo": ForceTagged(MIMO),
    "minimax-m2": ForceTagged(MINIMAX),
    "lfm2": ForcePythonic(LFM2, "", "", "", opens="[", between=", ", closes="]"),
    "harmony": force_harmony,
}
