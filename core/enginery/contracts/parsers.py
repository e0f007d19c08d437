"""The contract of parsers: what a model writes, piece by piece, becomes content, reasoning and calls of tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from enginery.contracts.grammars import Grammar
from enginery.contracts.versions import ApiVersion

ParserKind = Literal["tools", "reasoning"]
Told = list[dict[str, object]]  # tools, or messages, as a chat template takes them


def writes_tools(template: str | None) -> bool:
    """Whether a template knows of tools. DeepSeek-V3's has calls and their results alone, Phi 4-mini's a member of a message."""
    return template is None or re.search(r"(?<![\w.'\"])tools(?![\w'\"])", template) is not None  # as a variable


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text of the model to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """The model calls `name`, one of the request's tools. index counts the calls of a choice from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """The next part of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """complete: the arguments are one JSON object; otherwise the output was cut, or is faulty, in the middle of them."""

    index: int
    complete: bool


ParserEvent = ContentText | ReasoningText | ToolCallBegun | ArgumentsText | ToolCallEnded


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function of the request. parameters: JSON schema of its arguments; empty if there is none. strict: they must satisfy it."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, kw_only=True)
class ParserFacts:
    """What `suits` sees of a checkpoint: its first architecture, the text of its chat template, its added tokens."""

    architecture: str
    chat_template: str
    added_tokens: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class ParserSetup:
    """What a parser of one choice is made from. new_id: for each call. inside: the prompt ends within reasoning."""

    tools: Sequence[Tool] = ()
    new_id: Callable[[], str] = str
    inside: bool = False


class OutputParser(Protocol):
    """The parser of one choice, fed with its decoded text. It raises nothing, whatever the text.

    Text is neither lost nor doubled, except for the markers of the format and the line breaks around them. How it is split over
    the calls splits the texts of events, and changes nothing else. What is no call of one of the tools stays content.
    """

    def feed(self, text: str) -> list[ParserEvent]:
        """The events that are certain now; what may become a marker is held back."""

    def finish(self) -> list[ParserEvent]:
        """The rest: nothing follows. Called once, for a stop, a limit and an abort alike."""


class ForceFn(Protocol):
    """The grammar of answers that call `name`, or any of `tools` if it is None. None: the parser has no such grammar.

    parallel: several calls are allowed. required: the answer is calls, and has no reasoning; else any text that is not read as a
    call may stand before, between and after them, and there may be none. Arguments satisfy the schema of a strict tool; those of
    the others do so as far as the format allows where a call is required, and else are any JSON object. reasoning: the tags around
    it, when the answer may begin with it, which says what it likes; the first is empty if the prompt ends within it, both if there
    is none. Raises `RequestError` for schemas that are too long, or that the format cannot keep to.
    """

    def __call__(
        self, tools: Sequence[Tool], name: str | None, *, parallel: bool, required: bool, reasoning: tuple[str, str] = ("", "")
    ) -> Grammar | None: ...


@dataclass(frozen=True, kw_only=True)
class ParserSpec:
    """A parser on offer. `auto` takes the highest priority whose `suits` is true.

    needs_special_tokens: the text must be decoded with them. For tools: force; force_or_json, that with a grammar of JSON: where no
    call is required, the answer is calls, which begin not as JSON does, or such JSON, behind reasoning; tell: of a template's text,
    tools and messages, both as one takes them that writes no calls, or None. For reasoning, else empty: is_inside, whether a prompt
    ends within it; close, what ends it there where none is wanted; tags, what is around it in answers, after up to 16 blanks.
    """

    name: str
    api: ApiVersion
    kind: ParserKind
    summary: str
    suits: Callable[[ParserFacts], bool]
    make: Callable[[ParserSetup], OutputParser]
    priority: int = 0
    needs_special_tokens: bool = False
    force: ForceFn | None = None
    force_or_json: Callable[[Grammar], ForceFn] | None = None
    tell: Callable[[str, Told, Told], tuple[Told, Told] | None] | None = None
    is_inside: Callable[[str], bool] | None = None
    close: str = ""
    tags: tuple[str, str] = ("", "")
