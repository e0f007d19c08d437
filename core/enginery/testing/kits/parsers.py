"""The kit for parsers: what holds for every one of them, on texts that its author gives.

class TestMine(ParserSuite):
    parser = SPEC
    texts = ("<think>why</think>so", "no tags")
    plain = ("nothing of the format",)
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

from enginery.contracts.parsers import (
    ArgumentsText,
    ContentText,
    ParserEvent,
    ParserSetup,
    ParserSpec,
    ReasoningText,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
)
from enginery.testing.rules import BrokenRule

_NUM_CUTS: Final = 40
_NUM_SPLICES: Final = 60


def parsed(spec: ParserSpec, pieces: Iterable[str], *, tools: Sequence[Tool] = (), inside: bool = False) -> list[ParserEvent]:
    """The events of a text that comes in pieces, with neighbouring texts of one kind joined."""
    numbers = itertools.count()
    parser = spec.make(ParserSetup(tools=tools, new_id=lambda: f"call-{next(numbers)}", inside=inside))
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def joined(events: Iterable[ParserEvent]) -> list[ParserEvent]:
    """Neighbouring texts of one kind, or arguments of one call, as one event."""
    result: list[ParserEvent] = []
    for event in events:
        match result[-1:], event:
            case [ContentText(before)], ContentText(text):
                result[-1] = ContentText(before + text)
            case [ReasoningText(before)], ReasoningText(text):
                result[-1] = ReasoningText(before + text)
            case [ArgumentsText(first, before)], ArgumentsText(index, text) if first == index:
                result[-1] = ArgumentsText(index, before + text)
            case _:
                result.append(event)
    return [event for event in result if event not in (ContentText(""), ReasoningText(""))]


def cuts_of(text: str) -> Iterator[list[str]]:
    """The text in pieces: character by character, in halves at every place, and at random."""
    yield list(text)
    yield from ([text[:place], text[place:]] for place in range(len(text) + 1))
    for seed in range(_NUM_CUTS):
        chosen = random.Random(seed)
        places = sorted(chosen.sample(range(len(text) + 1), min(len(text), 1 + seed % 7)))
        yield [text[first:last] for first, last in itertools.pairwise([0, *places, len(text)])]


def check_cuts(spec: ParserSpec, text: str, *, tools: Sequence[Tool] = (), inside: bool = False) -> None:
    """Raises `BrokenRule` if the same text gives other events when it comes in other pieces."""
    whole = parsed(spec, [text], tools=tools, inside=inside)
    for pieces in cuts_of(text):
        if (events := parsed(spec, pieces, tools=tools, inside=inside)) != whole:
            raise BrokenRule(f"{text!r} cut as {pieces!r} gives {events}, and whole it gives {whole}")


def check_apart(spec: ParserSpec, text: str, other: str, *, tools: Sequence[Tool] = ()) -> None:
    """Raises `BrokenRule` if a text gives other events where another is read by turns with it, by a parser of its own."""
    beside, turns = spec.make(ParserSetup(tools=tools)), itertools.zip_longest(text, other, fillvalue="")
    events = parsed(spec, (piece for piece, more in turns if beside.feed(more) is not None), tools=tools)
    if events != (alone := parsed(spec, [text], tools=tools)):
        raise BrokenRule(f"{text!r} read by turns with {other!r} gives {events}, and alone it gives {alone}")


def check_order(events: Sequence[ParserEvent], *, tools: Sequence[Tool] = ()) -> None:
    """Raises `BrokenRule` unless calls are begun, filled, ended in order, name tools, differ in ids; complete ones are objects."""
    order = _Order(frozenset(tool.name for tool in tools))
    for event in events:
        if not order.fits(event):
            raise BrokenRule(f"{event} is out of place, or not what it says, in {list(events)}")
    if order.open_call is not None:
        raise BrokenRule(f"call {order.open_call} is begun and never ended in {list(events)}")


class _Order:
    """Where the events of one answer are. open_call: the index of the call that is begun and not ended."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._num_calls = 0
        self._arguments = ""
        self._ids: set[str] = set()
        self.open_call: int | None = None

    def fits(self, event: ParserEvent) -> bool:
        """Take the next event. False: it is out of place, or says what is not so."""
        match event:
            case ToolCallBegun(index, call_id, name):
                fine = self.open_call is None and index == self._num_calls and name in self._names and call_id not in self._ids
                self._ids.add(call_id)
                self.open_call, self._num_calls, self._arguments = index, self._num_calls + 1, ""
                return fine
            case ArgumentsText(index, text):
                self._arguments += text
                return index == self.open_call
            case ToolCallEnded(index, complete):
                fine = index == self.open_call and not (complete and not _is_object(self._arguments))
                self.open_call = None
                return fine
        return self.open_call is None


def check_plain(spec: ParserSpec, text: str, *, tools: Sequence[Tool] = ()) -> None:
    """Raises `BrokenRule` unless a text with nothing of the format comes out as content, whole and once."""
    events = parsed(spec, [text], tools=tools)
    if events != ([ContentText(text)] if text else []):
        raise BrokenRule(f"{text!r} has nothing of the format, and gives {events} instead of itself as content")


def check_survives(spec: ParserSpec, texts: Sequence[str], *, tools: Sequence[Tool] = ()) -> None:
    """Raises what the parser raises, or `BrokenRule`, on every beginning of the texts and on pieces of them in any order."""
    chosen = random.Random(0)
    spliced = [
        "".join(chosen.choice(texts)[chosen.randrange(8) :][: chosen.randrange(40)] for _ in range(4)) for _ in range(_NUM_SPLICES)
    ]
    beginnings = [text[:end] for text in texts for end in range(len(text))]
    for text in [*beginnings, *spliced, "", "\x00\ud7ff😀\n"]:
        for inside in (False, True) if spec.is_inside is not None else (False,):
            check_order(parsed(spec, [text], tools=tools, inside=inside), tools=tools)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


class ParserSuite:
    """The rules as pytest tests. texts: with what the format has; plain: without. tools: those that the texts call."""

    parser: ClassVar[ParserSpec]
    texts: ClassVar[Sequence[str]]
    plain: ClassVar[Sequence[str]] = ("nothing of any format, on two\nlines",)
    tools: ClassVar[Sequence[Tool]] = ()

    def test_any_cut_gives_the_same_events(self) -> None:
        """However the text comes, what it means is the same."""
        for text, inside in itertools.product(self.texts, {False, self.parser.is_inside is not None}):
            check_cuts(self.parser, text, tools=self.tools, inside=inside)

    def test_answers_that_are_read_by_turns_do_not_mix(self) -> None:
        """Each has a parser of its own, which keeps nothing for others."""
        for text, other in itertools.permutations([*self.texts, *self.plain], 2):
            check_apart(self.parser, text, other, tools=self.tools)

    def test_calls_are_in_order_and_complete_ones_are_objects(self) -> None:
        """Begun, filled, ended, one after the other."""
        for text in self.texts:
            check_order(parsed(self.parser, [text], tools=self.tools), tools=self.tools)

    def test_what_is_not_of_the_format_is_content(self) -> None:
        """Nothing is lost, nothing comes twice."""
        for text in self.plain:
            check_plain(self.parser, text, tools=self.tools)
            check_cuts(self.parser, text, tools=self.tools)

    def test_nothing_is_raised_whatever_the_text(self) -> None:
        """Also where it ends in the middle of something."""
        check_survives(self.parser, self.texts, tools=self.tools)
