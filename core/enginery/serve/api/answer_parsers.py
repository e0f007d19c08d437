"""The parsers of one server, and of one answer: what a model writes becomes content, reasoning and calls of tools."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from enginery.checkpoint.folder import read_config
from enginery.contracts.parsers import (
    ContentText,
    OutputParser,
    ParserEvent,
    ParserFacts,
    ParserKind,
    ParserSetup,
    ParserSpec,
    ReasoningText,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
)
from enginery.plugin.boundary import guarded_parser
from enginery.plugin.records import Offer
from enginery.plugin.selection import choose_parser

if TYPE_CHECKING:
    from enginery.plugin.registry import Registry
    from enginery.text.text_side import TextSide


_BEGINS_JSON: Final = re.compile(r'\s*(\[\s*)?[{"\-0-9tfn]|\s*\[\s*[\[\]]')


@dataclass(frozen=True, kw_only=True)
class Parsers:
    """The parsers of this server; None where it parses nothing of that kind. decisions: (setting, value, reason)."""

    tools: ParserSpec | None = None
    tool_names: Sequence[str] = ()  # of all that could be asked for
    reasoning: ParserSpec | None = None
    decisions: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def choose(cls, registry: Registry, folder: Path, text: TextSide, *, tools: str, reasoning: str) -> Parsers:
        """Choose parsers by name, "none", or "auto": those that suit the checkpoint. Raises `PluginError` and `CheckpointError`."""
        facts = ParserFacts(
            architecture=read_config(folder)["architectures"][0],
            chat_template=text.template.source or "",
            added_tokens=text.tokenizer.added_tokens,
        )
        asked: dict[ParserKind, str] = {"tools": tools, "reasoning": reasoning}
        offers, records = registry.offers(ParserSpec), registry.records
        chosen = [choose_parser(*each, facts, offers=offers, records=records) for each in asked.items()]
        found_tools, found_reasoning = (None if offer is None else guarded_parser(offer) for offer in chosen)
        decisions = tuple(_decision(kind, asked[kind], offer) for kind, offer in zip(asked, chosen, strict=True))
        names = sorted(offer.name for offer in offers if offer.spec.kind == "tools")
        return cls(tools=found_tools, tool_names=names, reasoning=found_reasoning, decisions=decisions)


def _decision(kind: ParserKind, asked: str, offer: Offer[ParserSpec] | None) -> tuple[str, str, str]:
    setting = "tool parser" if kind == "tools" else "reasoning parser"
    if offer is None:
        return setting, "none", "asked for" if asked == "none" else "no parser suits the checkpoint"
    why = "asked for" if asked != "auto" else "the highest priority that suits the checkpoint"
    return setting, offer.name, f"{why}, from {offer.source}"


NO_PARSERS: Final = Parsers()


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How the answers to one request are read. is_inside: the prompt ends within reasoning. parallel: several calls are allowed.

    calls_only: so that half a tag at its end is no content. or_json: it is calls or JSON. goes_on: with the text of the prompt.
    tells_logprobs: those of the tokens that a text is made of.
    """

    reasoning: ParserSpec | None = None
    tool_parser: ParserSpec | None = None
    tools: Sequence[Tool] = ()
    is_inside: bool = False
    parallel: bool = True
    calls_only: bool = False
    or_json: bool = False
    goes_on: bool = False
    tells_logprobs: bool = False

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text for `AnswerReader` must have the special tokens in it."""
        return any(spec is not None and spec.needs_special_tokens for spec in (self.reasoning, self.tool_parser))


class AnswerReader:
    """Reads one answer: reasoning first, then calls in the rest.

    is_over: there was a call, and only one is allowed; what follows is dropped. ended_in_call: the answer stopped within a call, or
    before the one that was forced.
    """

    def __init__(self, how: AnswerFormat) -> None:
        setup = ParserSetup(tools=how.tools, new_id=_new_call_id, inside=how.is_inside)
        self._reasoning = None if how.reasoning is None else how.reasoning.make(setup)
        self._tools = None if how.tool_parser is None else how.tool_parser.make(setup)
        self._parallel, self._calls_only, self._or_json = how.parallel, how.calls_only, how.or_json and not how.calls_only
        self._beginning = ""  # until it is known whether it is JSON
        self.is_reasoning = how.is_inside
        self.has_called = False
        self.is_over = False
        self.ended_in_call = False

    def feed(self, text: str, *, finished: bool) -> list[ParserEvent]:
        """Read the next text. Returns the events that are certain now. finished: no text follows."""
        found: list[ParserEvent] = [ContentText(text)] if text else []
        if self._reasoning is not None:
            found = [*self._reasoning.feed(text), *(self._reasoning.finish() if finished else ())]
        if self._or_json and self._tools is not None:
            found = self._told_from_json(self._tools, found)
        if self._tools is not None:
            found = self._with_calls(self._tools, found, finished=finished)
        return self._checked(found, finished=finished)

    def _told_from_json(self, parser: OutputParser, events: list[ParserEvent]) -> list[ParserEvent]:
        """Looks for calls no more where the content begins as JSON does: its strings may quote some."""
        self._beginning += "".join(event.text for event in events if isinstance(event, ContentText))
        is_json = _BEGINS_JSON.match(self._beginning) is not None
        self._or_json = not is_json and self._beginning.strip() in ("", "[")
        self._tools = None if is_json else parser
        return [*parser.finish(), *events] if is_json else events

    def _with_calls(self, parser: OutputParser, events: list[ParserEvent], *, finished: bool) -> list[ParserEvent]:
        found: list[ParserEvent] = []
        for event in events:
            found += parser.feed(event.text) if isinstance(event, ContentText) else [event]
        if not finished:
            return found
        last = parser.finish()
        if any(isinstance(event, ToolCallEnded) and not event.complete for event in last):
            last = _without_content(last)  # which is what is left of a call
        return _without_content([*found, *last]) if self._calls_only else [*found, *last]

    def _checked(self, events: list[ParserEvent], *, finished: bool) -> list[ParserEvent]:
        kept: list[ParserEvent] = []
        for event in events:
            if isinstance(event, ToolCallEnded):
                self.ended_in_call = finished and not event.complete and event is events[-1]
                self.is_over = not (self._parallel or self.ended_in_call)
            if isinstance(event, ContentText | ReasoningText):
                self.is_reasoning = isinstance(event, ReasoningText)
            self.has_called |= isinstance(event, ToolCallBegun)
            kept.append(event)
            if self.is_over:
                break
        self.ended_in_call |= finished and self._calls_only and not self.has_called
        return kept


def _without_content(events: Sequence[ParserEvent]) -> list[ParserEvent]:
    return [event for event in events if not isinstance(event, ContentText)]


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
