"""Small tasks with one right answer: sums with their steps, JSON records, lists. Each maker gives a key, a request and its answer.

Keys name the content, so that the same content is held out in whatever words it is asked. Those that begin with `table/` are
what has to be learnt by heart (sums of digits, the multiplication table, the days of the week) and are never held out.
"""

# Texts are easier to compare in one line each.
# ruff: noqa: E501
from __future__ import annotations

import json
from random import Random
from typing import Any, Final, NamedTuple

from tiny import words as w
from tiny.template import Template

NAMES: Final = w.GIRLS + w.BOYS


class Exchange(NamedTuple):
    """A request and its answer. key: of the content."""

    key: str
    asked: str
    answered: str


class Sum(NamedTuple):
    """a op b; result >= 0."""

    op: str
    a: int
    b: int

    @property
    def result(self) -> int:
        return {"+": self.a + self.b, "-": self.a - self.b, "x": self.a * self.b}[self.op]

    @property
    def key(self) -> str:
        """The same for a + b and b + a."""
        a, b = (self.a, self.b) if self.op == "-" else sorted((self.a, self.b))
        by_heart = {"+": b < 10, "-": a < 20 and b < 10, "x": b <= 12}[self.op]
        return f"{'table' if by_heart else 'sum'}/{self.op}/{a}/{b}"

    def __str__(self) -> str:
        return f"{self.a} {self.op} {self.b}"


def draw_sum(random: Random) -> Sum:
    """Small ones as often as large ones."""
    op = random.choice("++--x")
    if op == "x":
        return (
            Sum("x", random.randint(0, 12), random.randint(0, 12))
            if random.random() < 0.4
            else Sum("x", random.randint(11, 99), random.randint(2, 9))
        )
    most = random.choice((9, 20, 99, 99, 999))
    a, b = random.randint(0, most), random.randint(0, most)
    return Sum(op, max(a, b), min(a, b)) if op == "-" else Sum(op, a, b)


def steps(it: Sum) -> str:
    """How one does it on paper, ending in the result."""
    said = []
    if it.key.startswith("table/"):
        return f"{it} = {it.result}."
    if it.op == "x":
        a, b = (it.a, it.b) if it.a > it.b else (it.b, it.a)
        tens, ones = a // 10 * 10, a % 10
        said = [f"{tens} x {b} = {tens * b}.", f"{ones} x {b} = {ones * b}.", f"{tens * b} + {ones * b} = {a * b}."]
    else:
        a, b, carry = it.a, it.b, 0
        while a or b:
            x, y = a % 10, b % 10
            plus = f" {it.op} {carry}" if carry else ""
            value = x + y + carry if it.op == "+" else x - y - carry
            if it.op == "+" and value > 9:
                said.append(f"{x} + {y}{plus} = {value}, write {value % 10}, carry 1.")
            elif value < 0:
                said.append(f"1{x} - {y}{plus} = {value + 10}, borrow 1.")
            else:
                said.append(f"{x} {it.op} {y}{plus} = {value}.")
            carry = int(value > 9) if it.op == "+" else int(value < 0)
            a, b = a // 10, b // 10
        if carry:
            said.append("Carry 1.")
    return f"{' '.join(said)} So {it} = {it.result}."


def _templates(*texts: str) -> list[Template]:
    return [Template(text, w.WORDS) for text in texts]


ASK_SUM: Final = _templates(
    "What is {sum}?", "[Compute|Calculate|Work out] {sum}[.|]", "{sum}[ = ?| =|?|]", "How much is {sum}?", "Please do this: {sum}",
    "What does {sum} [give|make]?", "[Tell me|I need to know] what {sum} is.",
)  # fmt: skip
ASK_NUMBER: Final = _templates(
    "What is {sum}? [Only the number|Just the result|Answer with the number only], please.",
    "{sum}? [Only the number|Just the number].",
)
SPOKEN: Final = {"+": (" + ", " + ", "+", " plus "), "-": (" - ", " - ", "-", " minus "), "x": (" x ", " * ", "*", " times ")}
PROBLEMS: Final = {
    "+": _templates("{name} has {a} {things} and [gets|finds|buys] {b} more. How many {things} does {name} have[ now|]?", "There are {a} {things} in one [box|basket] and {b} in another. How many {things} are there[ in all|]?"),
    "-": _templates("{name} has {a} {things} and [gives away|eats|loses|sells] {b} of them. How many {things} does {name} have left?", "There were {a} {things}. {name} took {b}. How many are left?"),
    "x": _templates("{name} has {a} [boxes|bags|baskets] with {b} {things} in each. How many {things} does {name} have?", "{b} {things} [lie|are] in each of {a} [boxes|bowls]. How many {things} are there?"),
}  # fmt: skip


def arithmetic(random: Random) -> Exchange:
    """A sum, bare or in a story of one line."""
    it = draw_sum(random)
    form = random.random()
    if form < 0.2:
        values = dict(name=random.choice(NAMES), things=random.choice(w.FRUITS), a=str(it.a), b=str(it.b))
        return Exchange(
            it.key, random.choice(PROBLEMS[it.op]).write(random.random, values), f"{steps(it)} The answer is {it.result}."
        )
    asked = f"{it.a}{random.choice(SPOKEN[it.op])}{it.b}"
    if form < 0.3:
        return Exchange(it.key, random.choice(ASK_NUMBER).write(random.random, {"sum": asked}), str(it.result))
    return Exchange(it.key, random.choice(ASK_SUM).write(random.random, {"sum": asked}), steps(it))


# kind: fields with how to draw them, and how to describe one
RECORDS: Final[dict[str, tuple[list[str], list[Template]]]] = {
    "person": (["name", "age", "job", "town", "hobby"], _templates(
        "{name} is {age} years old, a {job} from {town} who [likes|loves] {hobby}.", "This is {name}: {age} years old, {job}, from {town}. {name} likes {hobby}.", "{name}, {age}, [works as a|is a] {job}, lives in {town} and likes {hobby}.",
        "[In {town} lives|From {town} comes] {name}, a {job} of {age} years. Hobby: {hobby}.")),
    "animal": (["name", "kind", "age", "colour", "food"], _templates(
        "{name} is a {colour} {kind}, {age} years old, and eats {food}.", "My {kind} is [called|named] {name}. It is {colour}, {age} years old and likes {food}.")),
    "object": (["item", "colour", "material", "price"], _templates(
        "[This is a|There is a|I sell a] {colour} {item} made of {material}. It costs {price} [coins|euros].", "A {item} of {material}, {colour}, for {price} [coins|euros].")),
    "order": (["name", "fruit", "number", "day"], _templates(
        "{name} orders {number} {fruit} for {day}.", "On {day}, {name} [wants|needs|will get] {number} {fruit}.", "Please send {number} {fruit} to {name} on {day}.")),
    "meeting": (["title", "day", "hour", "people"], _templates(
        "The {title} [is on|takes place on] {day} at {hour} with {people}.", "On {day} at {hour}, {people} meet for the {title}.")),
}  # fmt: skip
ASK_RECORD: Final = _templates(
    "[Turn this into|Write this as|Convert this to] JSON: {text}", "{text} [Give me|Write] that as JSON.", "[Make|Write] a JSON record [of|for] this {kind}: {text}",
    "[Extract|Give me] the {fields} as JSON: {text}", "[Write|Give me] JSON with the {fields}. {text}", "{text} As JSON with the {fields}, please.",
)  # fmt: skip
ASK_INVENTED: Final = _templates(
    "[Make up|Invent] a {kind} as JSON with the {fields}.",
    "[Give me|Write] a JSON [object|record] of {a_kind} with the {fields}.",
    "Describe {a_kind} in JSON[, with the {fields}| ({names})].",
)


def _field(random: Random, name: str) -> Any:
    match name:
        case "age" | "number":
            return random.randint(1, 90)
        case "price":
            return random.randint(1, 99) + random.choice((0, 0.5, 0.25))
        case "hour":
            return random.randint(1, 12)
        case "people":
            return random.sample(NAMES, random.randint(2, 3))
    lists = dict(
        name=NAMES,
        job=w.JOBS,
        town=w.TOWNS,
        hobby=w.HOBBIES,
        kind=w.ANIMALS,
        colour=w.COLOURS,
        food=w.FRUITS,
        item=w.OBJECTS,
        material=w.MATERIALS,
        fruit=w.FRUITS,
        day=w.DAYS,
    )
    return random.choice(lists.get(name) or ("choir", "lesson", "picnic", "market", "race", "concert", "party"))


def in_words(items: list[str]) -> str:
    """a, b and c."""
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]


def record(random: Random) -> Exchange:
    """A description and the JSON that says the same, all of it or the fields asked for; or an invented one."""
    kind = random.choice(list(RECORDS))
    fields, descriptions = RECORDS[kind]
    values = {name: _field(random, name) for name in fields}
    chosen = sorted(random.sample(fields, random.randint(1, len(fields))), key=fields.index) if random.random() < 0.5 else fields
    spoken = {name: in_words(value) if isinstance(value, list) else str(value) for name, value in values.items()}
    slots = dict(kind=kind, a_kind=f"{'an' if kind[0] in 'aeo' else 'a'} {kind}", names=", ".join(chosen))
    slots["fields"] = f"field{'s' if len(chosen) > 1 else ''} {in_words(chosen)}"
    if random.random() < 0.2:
        asked = random.choice(ASK_INVENTED).write(random.random, slots)
    else:
        slots["text"] = random.choice(descriptions).write(random.random, spoken)
        asked = random.choice(ASK_RECORD[3:] if chosen is not fields else ASK_RECORD).write(random.random, slots)
    indent = None
    if random.random() < 0.15:
        asked, indent = f"{asked} {random.choice(('Indent it.', 'Use several lines.', 'Pretty, please.'))}", 2
    key = f"record/{kind}/" + "/".join(spoken[name] for name in fields[:3])
    return Exchange(key, asked, json.dumps({name: values[name] for name in chosen}, indent=indent))


KINDS_OF_THINGS: Final = dict(
    colours=w.COLOURS, fruits=w.FRUITS, animals=[f"{each}s" for each in w.ANIMALS if each not in ("mouse", "goose", "pony", "fox", "wolf", "deer")], foods=w.FOODS, jobs=w.JOBS, hobbies=w.HOBBIES,
    materials=w.MATERIALS, girls=w.GIRLS, boys=w.BOYS,
)  # fmt: skip
ASK_LIST: Final = _templates("[List|Name|Give me|Tell me] {number} {kind}[.|, please.]", "[Can you name|What are] {number} {kind}?")
STYLES: Final = {"": ", ", " One per line.": "\n", " As a bullet list.": "- ", " As a numbered list.": "1"}


def _listed(items: list[str], style: str) -> str:
    if style == "- ":
        return "\n".join(f"- {item}" for item in items)
    if style == "1":
        return "\n".join(f"{at}. {item}" for at, item in enumerate(items, 1))
    return f"{style.join(items)}." if style == ", " else style.join(items)


def listing(random: Random) -> Exchange:
    """Some of a kind, in the form asked for."""
    kind = random.choice(list(KINDS_OF_THINGS))
    number = random.randint(2, 7)
    ask = random.choice(ASK_LIST).write(
        random.random,
        dict(
            number=w.NUMBERS[number] if random.random() < 0.7 else str(number),
            kind=f"names of {kind}" if kind in ("girls", "boys") else kind,
        ),
    )
    suffix = random.choice(list(STYLES))
    items = random.sample(KINDS_OF_THINGS[kind], number)
    return Exchange(f"listing/{'/'.join(items)}", ask + suffix, _listed(items, STYLES[suffix]))


ASK_SORT: Final = _templates(
    "[Sort these words|Put these words|Sort this] [alphabetically|in alphabetical order]: {items}",
    "[Alphabetical order|Alphabetically], please: {items}",
    "[Order|Sort] {items} [by the alphabet|from a to z].",
)
ASK_COUNT: Final = _templates(
    "Count from {a} to {b}{by}.",
    "[Can you count|Please count] from {a} to {b}{by}?",
    "[List|Write] the numbers from {a} to {b}{by}.",
)


def sequence(random: Random) -> Exchange:
    """Words in alphabetical order, or numbers counted up or down."""
    if random.random() < 0.5:
        items = random.sample(w.SORTABLE, random.randint(2, 6))
        asked = random.choice(ASK_SORT).write(random.random, {"items": ", ".join(items)})
        return Exchange("sort/" + "/".join(sorted(items)), asked, ", ".join(sorted(items)) + ".")
    step, a = random.choice((1, 1, 1, 2, 3, 5, 10)), random.randint(0, 100)
    b = a + step * random.randint(2, 12)
    a, b, by = (b, a, -step) if random.random() < 0.3 else (a, b, step)
    asked = random.choice(ASK_COUNT).write(random.random, dict(a=str(a), b=str(b), by=f" in steps of {step}" if step > 1 else ""))
    return Exchange(f"count/{a}/{b}", asked, ", ".join(map(str, range(a, b + (1 if by > 0 else -1), by))) + ".")


RINGS: Final = {"day": w.DAYS, "month": w.MONTHS, "season": w.SEASONS}


def small_fact(random: Random) -> Exchange:
    """What comes after Tuesday, the opposite of hot, which number is larger: small, and mostly by heart."""
    match random.randrange(7):
        case 0:
            kind = random.choice(list(RINGS))
            ring, at, ahead = RINGS[kind], random.randrange(12), random.random() < 0.6
            at %= len(ring)
            other = ring[(at + (1 if ahead else -1)) % len(ring)]
            word = "after" if ahead else "before"
            asked = random.choice(
                (f"What {kind} comes {word} {ring[at]}?", f"Which {kind} is {word} {ring[at]}?", f"What comes {word} {ring[at]}?")
            )
            return Exchange(
                f"table/ring/{asked}",
                asked,
                f"{other[0].upper()}{other[1:]}."
                if random.random() < 0.4
                else f"{other[0].upper()}{other[1:]} comes {word} {ring[at]}.",
            )
        case 1:
            kind = random.choice(list(RINGS))
            asked = random.choice(
                (
                    f"What are the {kind}s{' of the week' if kind == 'day' else ' of the year'}?",
                    f"List the {kind}s.",
                    f"Name all {kind}s.",
                )
            )
            return Exchange("table/ring", asked, ", ".join(RINGS[kind]) + ".")
        case 2:
            a, b = random.choice(list(w.OPPOSITES.items()))[:: random.choice((1, -1))]
            asked = random.choice(
                (f"What is the opposite of {a}?", f"What is the opposite of '{a}'?", f"Give me the opposite of {a}.")
            )
            return Exchange("table/opposite", asked, random.choice((f"The opposite of {a} is {b}.", f"{b.capitalize()}.")))
        case 3:
            pair = random.sample(range(1000), 2)
            larger = random.random() < 0.5
            word = random.choice(("larger", "bigger", "greater") if larger else ("smaller", "less"))
            asked = f"Which is {word}, {pair[0]} or {pair[1]}?"
            return Exchange(f"compare/{min(pair)}/{max(pair)}", asked, f"{(max if larger else min)(pair)}.")
        case 4:
            word = random.choice(w.SORTABLE)
            asked = random.choice((f"Spell {word}.", f"How do you spell {word}?", f"What are the letters of {word}?"))
            return Exchange(f"spell/{word}", asked, "-".join(word) + ".")
        case 5:
            word, last = random.choice(w.SORTABLE), random.random() < 0.5
            which = "last" if last else "first"
            return Exchange(
                f"letter/{word}/{which}",
                f"What is the {which} letter of {word}?",
                f"The {which} letter of {word} is {word[-1 if last else 0]}.",
            )
        case _:
            number = random.randint(0, 999)
            asked = random.choice((f"Is {number} even or odd?", f"Is {number} {random.choice(('even', 'odd'))}?"))
            kind = "odd" if number % 2 else "even"
            yes = "" if "or" in asked else "Yes, " if kind in asked else "No, "
            return Exchange(f"parity/{number}", asked, f"{yes}{number} is {kind}.")
