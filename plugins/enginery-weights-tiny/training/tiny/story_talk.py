"""Stories on request, and questions about them."""

# Texts are easier to compare in one line each.
# ruff: noqa: E501
from __future__ import annotations

from random import Random
from typing import Final

from tiny.stories import STORIES
from tiny.tasks import Exchange
from tiny.template import Template

PLEASE: Final = "[Tell me|Write|Please tell me|I want to hear|Can you tell me|Please write|Make up]"
# the slots of the plan that a request fixes
REQUESTS: Final = [
    Template(f"{PLEASE} a [short story|story|bedtime story|fairy tale]{rest}[.|, please.|]", {})
    for rest in (
        "", "", " about {a_kind}", " about {a_kind} [named|called] {hero}", " about {hero}", " about {hero}, who wants {want}", " about {want}",
        " about {a_trait} {kind}", " about {a_kind} who [lives|lived] {place}", " about {hero}, {a_kind} who wants {want}", " in which {a_helper} helps {hero}",
    )
]  # fmt: skip
IN_THE_WAY: Final = dict(
    river="A river", wall="A wall", dark="The dark", price="The price: it cost ten coins", storm="A storm", guard="A guard", lost="The path: it was hard to find", broken="It was broken",
    height="It was too high to reach", rival="Someone else wanted it too", cold="The cold", fear="A strange noise",
)  # fmt: skip
# question, answer
QUESTIONS: Final = [
    (Template("What did {hero} [want|wish for]?", {}), Template("{hero} wanted {want}.", {})),
    (Template("Where did {hero} live?", {}), Template("{hero} lived {place}.", {})),
    (Template("[Who|What kind of creature] was {hero}?", {}), Template("{hero} was {a_kind}.", {})),
    (Template("What did {hero} want {want} for?", {}), Template("{He} wanted it {reason}.", {})),
    (Template("[What was in the way|What was the problem|What went wrong]?", {}), Template("{problem}.", {})),
    (Template("[Who helped|Did anybody help] {hero}?", {}), Template("{help}", {})),
    (Template("What was the [name|hero's name]?", {}), Template("{hero}.", {})),
]  # fmt: skip


def story(random: Random, plan: dict[str, str]) -> list[Exchange]:
    """A request that the plan fulfils, the story, and up to three questions about it."""
    text = STORIES.write(random, plan)
    key = STORIES.key(plan)
    exchanges = [Exchange(key, random.choice(REQUESTS).write(random.random, plan), text)]
    if random.random() < 0.4:
        exchanges += [Exchange(key, *question(random, plan, text)) for _ in range(random.randint(1, 3))]
    return exchanges


def reading(random: Random, plan: dict[str, str]) -> list[Exchange]:
    """A story that is given, with a question about it."""
    text = STORIES.write(random, plan)
    asked, answered = question(random, plan, text)
    given = random.choice((f"{text}\n\n{asked}", f"Read this story and answer: {asked}\n\n{text}", f"{asked}\n{text}"))
    return [Exchange(STORIES.key(plan), given, answered)]


def question(random: Random, plan: dict[str, str], text: str) -> tuple[str, str]:
    """One that the text answers, and the answer."""
    helped = plan["the_helper"] in text
    said = f"{plan['the_helper'].capitalize()} helped {plan['him']}." if helped else f"Nobody: {plan['hero']} found a way alone."
    values = {**plan, "problem": IN_THE_WAY[plan["obstacle"]], "help": said}
    asked, answered = random.choice(QUESTIONS)
    return asked.write(random.random, values), answered.write(random.random, values)
