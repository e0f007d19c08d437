"""The generated texts: reproducible, distinct, held apart, and by a grammar that tells them from others."""

from __future__ import annotations

import json
import re
from itertools import islice
from random import Random

import jinja2
import pytest
from tiny import tasks
from tiny.corpus import HELD_OUT, MAKERS, documents, drawn, exchanges, held_out, prompt, story_plan
from tiny.facts import FACTS
from tiny.stories import STORIES
from tiny.template import Template
from tiny.tokenizer import CHAT_TEMPLATE


def some_stories(count: int, seed: int = 0) -> list[str]:
    random = Random(seed)
    return [STORIES.write(random, STORIES.plan(random)) for _ in range(count)]


def test_a_template_writes_what_its_pattern_matches_and_counts_its_ways() -> None:
    template = Template("[A|The [small|]] <thing> of {name}[.|!]", {"thing": ["hat", "cup", "key"]})
    pattern, random = template.pattern({"name": ["Ada", "Adam"]}), Random(0)
    texts = {template.write(random.random, {"name": "Adam"}) for _ in range(500)}
    assert all(pattern.fullmatch(text) for text in texts)
    assert len(texts) == template.count() == 18
    assert not pattern.fullmatch("A hat of Eve.")


def test_equal_seeds_give_equal_documents_and_other_seeds_others() -> None:
    first, again, other = (list(islice(documents(seed), 200)) for seed in ("a", "a", "b"))
    assert first == again
    assert len(set(first) & set(other)) < 20  # "Thanks!" is said by both


def test_documents_seldom_repeat_and_stories_never_do() -> None:
    drawn_documents = list(islice(documents("distinct"), 3000))
    assert len(set(drawn_documents)) > 0.95 * len(drawn_documents)
    stories = some_stories(2000)
    assert len(set(stories)) == len(stories)
    sentences = {sentence for story in stories for sentence in re.split(r"(?<=[.!?])\s", story)}
    assert len(sentences) > 8000


def test_the_grammar_accepts_its_own_stories() -> None:
    assert [problem for story in some_stories(150, seed=1) if (problem := STORIES.problem(story))] == []


def swapped_words(story: str, random: Random) -> str:
    words = story.split(" ")
    at = random.randrange(len(words) - 1)
    words[at], words[at + 1] = words[at + 1], words[at]
    return " ".join(words)


def another_pronoun(story: str, random: Random) -> str:
    hers = " she " in story or " She " in story
    mine, yours = (("she", "he"), ("her", "his")) if hers else (("he", "she"), ("his", "her"))
    found = list(re.finditer(rf"\b({mine[0]}|{yours[0]})\b", story, re.IGNORECASE))
    other = {mine[0]: mine[1], yours[0]: yours[1]}
    match = random.choice(found) if found else None
    return story if match is None else story[: match.start()] + other[match[0].lower()] + story[match.end() :]


def another_name(story: str, random: Random) -> str:
    names = [name for name in tasks.NAMES if re.search(rf"\b{name}\b", story)]
    places = list(re.finditer(rf"\b{names[0]}\b", story))
    match = random.choice(places)
    return story if len(places) == 1 else story[: match.start()] + "Zeno" * (names[0] != "Zeno") + story[match.end() :]


def cut_short(story: str, random: Random) -> str:
    return story[: random.randrange(20, len(story) - 60)].rstrip(".!? ")


@pytest.mark.parametrize("mutate", [swapped_words, another_pronoun, another_name, cut_short], ids=lambda mutate: mutate.__name__)
def test_the_grammar_rejects_mutations(mutate: object) -> None:
    random, rejected = Random(2), []
    for story in some_stories(60, seed=3):
        if (mutated := mutate(story, random)) != story:
            rejected.append(STORIES.problem(mutated) is not None)
    assert len(rejected) > 30
    assert sum(rejected) >= 0.9 * len(rejected)  # now and then the mutation is a story too: a helper may be he or she


def test_the_grammar_ties_a_way_out_to_its_problem_and_a_moral_to_its_hero() -> None:
    plan = STORIES.plan(Random(4), hero="Ada", obstacle="river", trait="brave")
    story = next(
        text for seed in range(200) if "built a ladder" not in (text := STORIES.write(Random(seed), plan)) and "raft" in text
    )
    assert STORIES.problem(story) is None
    raft = re.search(r"Ada (?:found|gathered) [^.]*raft\.", story)
    assert raft
    assert STORIES.problem(story.replace(raft[0], "Ada built a ladder from branches, and went up step by step.")) is not None


def test_training_never_draws_what_is_held_out_and_evaluation_draws_nothing_else() -> None:
    for held in (False, True):
        random = Random(5)
        keys = [exchange.key for _ in range(300) for exchange in exchanges(random, held=held)]
        assert {held_out(key) for key in keys} == {held}
        assert {held_out(STORIES.key(story_plan(random, held=held))) for _ in range(30)} == {held}


@pytest.mark.parametrize("kind", list(MAKERS))
def test_every_kind_has_about_its_share_held_out(kind: str) -> None:
    random = Random(6)
    keys = {MAKERS[kind][1](random).key for _ in range(4000)}
    hashed = {key for key in keys if not key.startswith("table/")}
    share = sum(map(held_out, keys)) / len(hashed)
    assert 0.3 / HELD_OUT < share < 2.5 / HELD_OUT


def test_a_sum_is_held_out_in_either_order() -> None:
    assert tasks.Sum("+", 417, 58).key == tasks.Sum("+", 58, 417).key
    assert not held_out(tasks.Sum("x", 7, 8).key)


def test_worked_sums_are_right() -> None:
    random = Random(7)
    for _ in range(2000):
        it = tasks.draw_sum(random)
        text = tasks.steps(it)
        assert text.endswith(f"{it} = {eval(str(it).replace('x', '*'))}.")
        for left, right in re.findall(r"(\d+ [-+x] \d+(?: [-+] \d+)?) = (\d+)", text):
            assert eval(left.replace("x", "*")) == int(right), text


def test_records_are_json_with_the_fields_and_values_of_the_request() -> None:
    random = Random(8)
    for _ in range(500):
        exchange = tasks.record(random)
        record = json.loads(exchange.answered)
        assert record
        if "field" in exchange.asked:
            assert all(name in exchange.asked for name in record)


@pytest.mark.parametrize("kind", list(MAKERS))
def test_texts_are_plain_ascii_without_slips_of_templates(kind: str) -> None:
    random = Random(9)
    for _ in range(1500):
        exchange = drawn(random, MAKERS[kind][1], held=False)
        for text in (exchange.asked, exchange.answered):
            assert text
            assert text.isascii()
            assert text == text.strip()
            assert kind == "json" or not re.search(r"  | ,|\.\.|[{}]", text), text


def test_stories_have_no_slips_of_templates() -> None:
    for story in some_stories(1000, seed=10):
        assert not re.search(r" {2}| [.,?!]|\.\.|[][{}|<>]|\ba [aeiou]", story), story


def test_there_are_facts_of_every_table_of_the_docs() -> None:
    kinds = [fact.name.split("/")[0] for fact in FACTS]
    least = {
        "word": 50,
        "flag": 30,
        "default": 15,
        "reverse": 15,
        "command": 10,
        "package": 12,
        "plugin": 10,
        "status": 7,
        "part": 8,
    }
    assert {kind: kinds.count(kind) >= number for kind, number in least.items()} == dict.fromkeys(least, True)


def test_conversations_are_in_the_chat_templates_form() -> None:
    turns = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi!"), ("user", "1 + 1?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = jinja2.Template(CHAT_TEMPLATE, keep_trailing_newline=True).render(
        bos_token="<|begin|>", messages=messages, add_generation_prompt=True
    )
    assert prompt(turns) == rendered
