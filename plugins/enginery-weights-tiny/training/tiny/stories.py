"""Short stories: a plan of who, where, what for and what is in the way; sentences that follow from it; and a recogniser.

What agrees: names with pronouns, animals and wishes throughout, a problem with its failed attempt and its way out, a trait with
what the story teaches. `STORIES.problem` checks all of it on any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tiny import story_lines as lines
from tiny.template import Template
from tiny.words import ANIMALS, BOYS, GIRLS, WORDS

Values = Mapping[str, str]
PRONOUNS: Final = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}


@dataclass(frozen=True)
class Line:
    """A sentence, for plans that have these values."""

    template: Template
    pattern: re.Pattern[str]
    fits: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Section:
    """Lines of which one is used. chance: of the section being there at all."""

    lines: tuple[Line, ...]
    chance: float = 1.0
    by_value: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)  # where all lines fit one slot's value each


def article(word: str) -> str:
    """a or an, by spelling; of h-words, honest alone is silent here."""
    return "an" if word[0] in "aeiou" or word == "honest" else "a"


def plan_tables() -> list[tuple[tuple[str, ...], Iterable[tuple[str, ...]]]]:
    """Slots that belong together, with the values that they may have together."""
    heroes = {
        (name, *PRONOUNS[he], he.capitalize(), PRONOUNS[he][2].capitalize())
        for names, he in ((GIRLS, "she"), (BOYS, "he"))
        for name in names
    }
    kinds = {(kind, he, f"{article(kind)} {kind}") for kind in ANIMALS for he in PRONOUNS} | {
        ("girl", "she", "a girl"),
        ("boy", "he", "a boy"),
    }
    wants = {
        (wish, f"{wish[0].upper()}{wish[1:]}", thing, reason)
        for pattern, thing, reason in lines.WANTS
        for wish in (pattern.replace("{c}", colour) for colour in lines.WANT_COLOURS)
    }
    return [
        (("hero", "he", "him", "his", "He", "His"), heroes),
        (("kind", "he", "a_kind"), kinds),
        (("want", "want_cap", "thing", "reason"), wants),
        (("place", "place_cap"), {(place, f"{place[0].upper()}{place[1:]}") for place in lines.PLACES}),
        (("there",), {(there,) for there in lines.THERE}),
        (("a_helper", "the_helper", "The_helper"), {(a, the, f"T{the[1:]}") for a, the in lines.HELPERS}),
        (("hhe", "hhim", "hhis"), set(PRONOUNS.values())),
        (("trait", "a_trait"), {(trait, f"{article(trait)} {trait}") for trait in lines.TRAITS}),
        (("obstacle",), {(name,) for name in lines.OBSTACLES}),
        (("obstacle2",), {(name,) for name in lines.OBSTACLES}),
    ]


class Stories:
    """Writes and recognises stories."""

    def __init__(self) -> None:
        self.tables = [(slots, sorted(rows)) for slots, rows in plan_tables()]
        self.domains = {slot: sorted({row[at] for row in rows}) for slots, rows in self.tables for at, slot in enumerate(slots)}
        self.kinds_of = {he: [row for row in self.tables[1][1] if row[1] == he] for he in PRONOUNS}
        self.outlines = self._outlines()

    def plan(self, random: Random, **wished: str) -> dict[str, str]:
        """Who, where, what for, what is in the way. wished: values that it must have, of slots that head a table."""
        values: dict[str, str] = {}
        for at, (slots, rows) in enumerate(self.tables):
            if at != 1:
                head = wished.get(slots[0])
                row = next((row for row in rows if row[0] == head), None) if head else random.choice(rows)
                values |= zip(slots, row or random.choice(rows), strict=True)
        of_pronoun = self.kinds_of[values["he"]]
        kind = next((row for row in of_pronoun if row[0] == wished.get("kind")), None) or random.choice(of_pronoun)
        values |= zip(self.tables[1][0], kind, strict=True)
        while values["obstacle2"] == values["obstacle"]:
            values["obstacle2"] = random.choice(rows)[0]
        return values

    def key(self, values: Values) -> str:
        """What makes a plan another story, for the held-out part."""
        return "/".join(("story", values["kind"], values["want"], values["place"], values["obstacle"], values["a_helper"]))

    def write(self, random: Random, values: Values) -> str:
        """One story of the plan."""
        draw = random.random
        text = ""
        for section in self.outlines[int(draw() ** 2 * len(self.outlines))]:
            if section.chance < 1 and draw() >= section.chance:
                continue
            options = section.lines
            if section.by_value:
                slot = section.lines[0].fits[0][0]
                options = section.by_value[values[slot]]
            if text:
                text += "\n\n" if draw() < 0.12 else " "
            text += options[int(draw() * len(options))].template.write(draw, values)
        return text

    def problem(self, text: str) -> str | None:
        """Why this is no story of the grammar; None if it is one."""
        furthest = 0
        for outline in self.outlines:
            for at, found in self._parses(outline, text, 0, 0, {}):
                furthest = max(furthest, at)
                if found:
                    return None
        return f"nothing follows {text[max(0, furthest - 40) : furthest]!r} with {text[furthest : furthest + 40]!r}"

    def _parses(
        self, outline: tuple[Section, ...], text: str, index: int, at: int, known: dict[str, str]
    ) -> Iterator[tuple[int, bool]]:
        """How far each attempt to read `text` from `at` on as the sections from `index` on comes, and whether to the end."""
        if index == len(outline):
            yield at, at == len(text)
            return
        section = outline[index]
        start = at + len(gap[0]) if at and (gap := re.compile(r"\n\n| ").match(text, at)) else at
        if start > at or not at:
            for line in section.lines:
                match = line.pattern.match(text, start)
                if match and (merged := self._merge(known, match, line)) is not None:
                    yield from self._parses(outline, text, index + 1, match.end(), merged)
        if section.chance < 1:
            yield from self._parses(outline, text, index + 1, at, known)
        yield at, False

    def _merge(self, known: dict[str, str], match: re.Match[str], line: Line) -> dict[str, str] | None:
        """What is known with what this sentence says; None if that contradicts."""
        said = [(name.rpartition("_")[0], value) for name, value in match.groupdict().items() if value is not None] + list(
            line.fits
        )
        merged = dict(known)
        for slot, value in said:
            if merged.setdefault(slot, value) != value:
                return None
        if len(merged) == len(known):
            return known
        for slots, rows in self.tables:
            asked = [(at, merged[slot]) for at, slot in enumerate(slots) if slot in merged]
            if asked and not any(all(row[at] == value for at, value in asked) for row in rows):
                return None
        return None if merged.get("obstacle2") is not None and merged["obstacle2"] == merged.get("obstacle") else merged

    def _section(self, texts: list[str], chance: float = 1.0) -> Section:
        return Section(lines=tuple(self._line(text) for text in texts), chance=chance)

    def _line(self, text: str, *fits: tuple[str, str]) -> Line:
        template = Template(text, WORDS)
        return Line(template=template, pattern=template.pattern(self.domains), fits=fits)

    def _valued(self, slot: str, texts: Mapping[str, list[str]], chance: float = 1.0) -> Section:
        by_value = {value: tuple(self._line(text, (slot, value)) for text in each) for value, each in texts.items()}
        return Section(lines=tuple(line for each in by_value.values() for line in each), chance=chance, by_value=by_value)

    def _outlines(self) -> list[tuple[Section, ...]]:
        """The orders in which stories are told, the commonest first."""

        def of(part: int, slot: str = "obstacle", chance: float = 1.0) -> Section:
            return self._valued(slot, {name: parts[part] for name, parts in lines.OBSTACLES.items()}, chance)

        section: Callable[..., Section] = self._section
        opening, habit, want = section(lines.OPENINGS), section(lines.HABITS, 0.6), section(lines.WANT_LINES)
        want_first = section(lines.WANT_FIRST)
        out, feeling, fail = section(lines.SETTING_OUT), section(lines.FEELINGS, 0.5), of(1, chance=0.5)
        meeting, talk, arrival = section(lines.MEETINGS), section(lines.TALKS, 0.8), section(lines.ARRIVALS)
        thanks, ending = section(lines.THANKS, 0.8), section(lines.ENDINGS)
        moral, closing = self._valued("trait", lines.TRAITS, 0.4), section(lines.CLOSINGS, 0.25)
        helped = (of(0), feeling, fail, meeting, talk, of(3))
        alone = (of(0), fail, feeling, of(2))
        more = (section(lines.SECOND), of(0, "obstacle2"), section(lines.FEELINGS, 0.5))
        end = (ending, moral, closing)
        return [
            (opening, habit, want, out, *helped, arrival, thanks, *end),
            (opening, habit, want, out, *alone, arrival, *end),
            (opening, want, out, *helped, *more, of(2, "obstacle2"), arrival, thanks, *end),
            (want_first, opening, out, *alone, arrival, *end),
            (opening, want, out, *alone, *more, meeting, talk, of(3, "obstacle2"), arrival, thanks, *end),
            (opening, habit, want, out, of(0), meeting, of(3), arrival, ending),
        ]


STORIES: Final = Stories()
