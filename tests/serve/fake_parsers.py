"""Parsers of formats that no model has: calls are `[call NAME {...}]`, reasoning is between `(think)` and `(done)`."""

from __future__ import annotations

import json
import re

from enginery.contracts.grammars import Grammar, GrammarKind
from enginery.contracts.parsers import (
    ArgumentsText,
    ContentText,
    ParserSetup,
    ParserSpec,
    ReasoningText,
    ToolCallBegun,
    ToolCallEnded,
)
from enginery.contracts.versions import HookGroup
from enginery.plugin.records import Offer
from enginery.serve.api.answer_parsers import Parsers

CALL = re.compile(r"\[call (\w+) (\{.*?\})\]", re.DOTALL)
CUT_CALL = re.compile(r"\[call (\w+) (\{.*)", re.DOTALL)


class CallParser:
    """Says each call when it is whole, its arguments in two parts; one that the end cuts at the end."""

    def __init__(self, setup: ParserSetup) -> None:
        self._setup, self._held, self._num_calls = setup, "", 0

    def feed(self, text):
        self._held += text
        events = []
        while found := CALL.search(self._held):
            events += self._content(self._held[: found.start()])
            index, self._num_calls, self._held = self._num_calls, self._num_calls + 1, self._held[found.end() :]
            half = len(found[2]) // 2
            events += [ToolCallBegun(index, self._setup.new_id(), found[1])]
            events += [ArgumentsText(index, found[2][:half]), ArgumentsText(index, found[2][half:]), ToolCallEnded(index, True)]
        start = self._held.find("[")
        final, self._held = (self._held, "") if start < 0 else (self._held[:start], self._held[start:])
        return events + self._content(final)

    def finish(self):
        found = CUT_CALL.match(self._held)
        if found is None:
            return self._content(self._held)
        index = self._num_calls
        begun = ToolCallBegun(index, self._setup.new_id(), found[1])
        return [begun, ArgumentsText(index, found[2]), ToolCallEnded(index, False)]

    def _content(self, text):
        return [ContentText(text)] if text else []


class ReasoningParser:
    """The marks must come in one piece, as the fake tokenizer's do not: what could begin one is held."""

    def __init__(self, setup: ParserSetup) -> None:
        self._inside, self._held = setup.inside, ""

    def feed(self, text):
        self._held += text
        events = []
        while (place := self._held.find(mark := "(done)" if self._inside else "(think)")) >= 0:
            events += self._said(self._held[:place])
            self._held, self._inside = self._held[place + len(mark) :], not self._inside
        keep = next((size for size in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:size])), 0)
        final, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return events + self._said(final)

    def finish(self):
        return self._said(self._held)

    def _said(self, text):
        return [(ReasoningText if self._inside else ContentText)(text)] if text else []


def force(tools, name, *, parallel, required, reasoning=("", "")):
    """What was asked for, for the log; where no call is required, with the tools' schemas and the tags."""
    asked = [name or [tool.name for tool in tools], parallel]
    if not required:
        asked += [[tool.parameters if tool.strict else None for tool in tools], reasoning]
    return Grammar(kind=GrammarKind.CHOICE, source=json.dumps(asked))


def force_or_json(answer):
    """The same, and the schema."""

    def both(tools, name, **more):
        if answer.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
            return None
        asked = json.loads(force(tools, name, **more).source)
        return Grammar(kind=GrammarKind.CHOICE, source=json.dumps([*asked, json.loads(answer.source or "{}")]))

    return both


TOOLS = ParserSpec(name="brackets", api=(2, 0), kind="tools", summary="", suits=lambda facts: True, make=CallParser, force=force)
REASONING = ParserSpec(
    name="round",
    api=(2, 0),
    kind="reasoning",
    summary="",
    suits=lambda facts: True,
    make=ReasoningParser,
    is_inside=lambda text: text.endswith("(think)<assistant>"),
    close="(done)",
    tags=("(think)", "(done)"),
)
PARSERS = Parsers(tools=TOOLS, reasoning=REASONING)
OFFERS = tuple(
    Offer(spec=spec, group=HookGroup.PARSER, name=spec.name, plugin="fake", distribution="fake", version="0")
    for spec in (TOOLS, REASONING)
)
