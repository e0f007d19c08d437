"""Masks against a brute force over the tokens' texts, and grammars that are refused."""

from __future__ import annotations

import dataclasses
import json
import random
import re

import pytest
from grammars_compiled import EOS, allowed, compiled, compiler, speller, vocabulary, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import EVERYTHING

from enginery.api import Grammar, GrammarKind, GrammarNeeds, GrammarTokens, RequestError, UnfinishedGrammar
from enginery_grammar_llguidance.compiler import MAX_CHOICES, Compiled, State
from enginery_grammar_llguidance.spec import LLGUIDANCE

WORDS = st.text("abé", min_size=1, max_size=4)


@given(st.lists(WORDS, max_size=8), st.lists(st.text("abé", max_size=5), min_size=1, max_size=5), st.integers(0, 99))
@settings(deadline=None, max_examples=25 if EVERYTHING else 10)
def test_a_mask_is_what_a_search_over_all_texts_finds(texts: list[str], choices: list[str], seed: int) -> None:
    tokens, wanted = vocabulary(texts), [choice.encode() for choice in choices]
    state = compiled(tokens, Grammar(kind=GrammarKind.CHOICE, source=json.dumps(choices))).start()
    rng, written = random.Random(seed), b""
    while not state.is_finished:
        fits = {
            token
            for token, raw in enumerate(tokens.tokens)
            if raw and token != EOS and any(choice.startswith(written + raw) for choice in wanted)
        }
        found, may_end = allowed(state, tokens.vocab_size), written in wanted
        assert (EOS in found) == may_end
        assert found - {EOS} <= fits, "a token that leads nowhere"
        if may_end or len({choice[len(written)] for choice in wanted if choice.startswith(written) and choice != written}) > 1:
            assert found - {EOS} == fits, "a way was left out"  # a text without a choice is spelt in the model's way alone
        assert found
        token = rng.choice(sorted(found))
        assert state.accept(token)
        written += b"" if token == EOS else tokens.tokens[token]
    assert written in wanted


@pytest.mark.parametrize("pattern", ["a+", "[a-c]{2,5}x?", "(ab|b)*c", "^a$", r"\d{3}-\d{2}", "(yes|no|né)?", "é{1,3}"])
def test_patterns_give_texts_that_match_them(pattern: str) -> None:
    for seed in range(5):
        text, ended, _ = walk(vocabulary(["aa", "ab", "12", "yes"]), Grammar(kind=GrammarKind.REGEX, source=pattern), seed)
        assert not ended or re.fullmatch(pattern, text.decode()), text


def test_a_lark_grammar_is_followed() -> None:
    source = 'start: sum\nsum: NUMBER ("+" NUMBER)+\nNUMBER: /[1-9][0-9]{0,2}/'
    for seed in range(5):
        text, _, _ = walk(vocabulary(["1+", "+2"]), Grammar(kind=GrammarKind.GRAMMAR, source=source), seed)
        assert re.fullmatch(r"[1-9][0-9]{0,2}(\+([1-9][0-9]{0,2})?)*", text.decode())


@pytest.mark.parametrize("kind", [GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA])
def test_spaces_between_json_are_few(kind: GrammarKind) -> None:
    tokens = vocabulary([])
    state = compiled(tokens, Grammar(kind=kind, source='{"type": "object"}' * (kind is GrammarKind.JSON_SCHEMA))).start()
    assert state.accept(1 + ord("{"))
    spaces = 0
    while spaces < 1000 and (blank := allowed(state, tokens.vocab_size) & {1 + ord(char) for char in " \n\t\r"}):
        assert state.accept(min(blank))
        spaces += 1
    assert spaces <= 45


@pytest.mark.parametrize("text", ["<end>", "a<end>b"])
def test_the_name_of_a_special_token_is_plain_text(text: str) -> None:
    tokens = vocabulary(["a<end>b"[:4]])
    spelling = dataclasses.replace(tokens, encode=lambda text: [EOS])
    ids = speller(spelling)(text)
    assert EOS not in ids
    assert b"".join(tokens.tokens[token] for token in ids) == text.encode()
    written, ended, _ = walk(spelling, Grammar(kind=GrammarKind.CHOICE, source=json.dumps([text])), 0)
    assert (written, ended) == (text.encode(), True)


def test_a_tokenizer_that_puts_a_space_first_is_understood() -> None:
    tokens = vocabulary([" {", " \x02", "{"])
    space_first = {"{": [257], "\x02{": [258, 259]}
    assert speller(dataclasses.replace(tokens, encode=lambda text: space_first[text]))("{") == [259]


def test_a_token_that_is_not_allowed_is_not_accepted() -> None:
    state = compiled(vocabulary([]), Grammar(kind=GrammarKind.REGEX, source="a")).start()
    assert not state.accept(1 + ord("b"))


@pytest.mark.parametrize("wrong", ["", "!", "bad", "cc!"])
def test_a_state_goes_back_behind_what_it_took_and_what_it_refused(wrong: str) -> None:
    tokens = vocabulary([])
    state = compiled(tokens, Grammar(kind=GrammarKind.REGEX, source="[a-c]{1,3}d|xyz")).start()
    assert state.accept(1 + ord("a"))
    expected = allowed(state, tokens.vocab_size)
    for _ in range(3):
        state.rollback(sum(state.accept(1 + ord(letter)) for letter in wrong))
        assert allowed(state, tokens.vocab_size) == expected
    assert [state.accept(1 + ord(letter)) for letter in "cd"] == [True, True]
    assert state.is_finished
    state.rollback(1)
    assert not state.is_finished


@pytest.mark.parametrize("seed", range(8))
def test_a_state_goes_back_behind_a_token_that_is_text_and_ends_answers(seed: int) -> None:
    """As small models have it. Combs of guesses try one way, go back, and try the next."""
    plain = vocabulary([])
    ends = 1 + ord("#")
    tokens = dataclasses.replace(plain, special_ids=frozenset(), eos_token_ids=frozenset({ends}))
    grammar, draw = compiled(tokens, Grammar(kind=GrammarKind.REGEX, source='[^"]{3,12}"')), random.Random(seed)
    tried = grammar.start()
    for _ in range(20):
        first, second = ([draw.choice((ends, 1 + ord("a"), 1 + ord("b"))) for _ in range(4)] for _ in range(2))
        tried.rollback(_along(tried, first)[0])
        count, masks = _along(tried, second)
        assert masks == _along(grammar.start(), second)[1]
        tried.rollback(count)


def _along(state: State, way: list[int]) -> tuple[int, list[set[int]]]:
    """How many of its tokens a state takes, and what it allows before each and behind the last."""
    masks = [allowed(state, 258)]
    for token in way:
        if token not in masks[-1] or not state.accept(token) or state.is_finished:
            break
        masks.append(allowed(state, 258))
    return len(masks) - 1, masks


def test_answers_to_one_grammar_are_independent() -> None:
    tokens = vocabulary([])
    found = compiled(tokens, Grammar(kind=GrammarKind.REGEX, source="ab|cd"))
    first, second = found.start(), found.start()
    assert first.accept(1 + ord("a"))
    assert allowed(second, tokens.vocab_size) == {1 + ord("a"), 1 + ord("c")}
    assert allowed(first, tokens.vocab_size) == {1 + ord("b")}


def test_an_end_is_needed() -> None:
    needs = GrammarNeeds(kind=GrammarKind.REGEX, vocab_size=9, num_eos=0)
    assert "end-of-sequence" in LLGUIDANCE.refuse(needs)[0].text
    assert LLGUIDANCE.refuse(GrammarNeeds(kind=GrammarKind.REGEX, vocab_size=9, num_eos=2)) == []


SPECIAL = ("<|im_start|>", "<|tool|>")


def with_special_tokens() -> GrammarTokens:
    plain = vocabulary(["start"])
    first = plain.vocab_size
    return dataclasses.replace(
        plain,
        tokens=(*plain.tokens, *(name.encode() for name in SPECIAL)),
        special_ids=plain.special_ids | {first, first + 1},
    )


@pytest.mark.parametrize(
    "source", ['start: <|tool|> "a" <|im_start|>', f"start: <[{vocabulary([]).vocab_size + 2}]> /a/ <|im_start|>"]
)
def test_lark_may_name_special_tokens(source: str) -> None:
    tokens = with_special_tokens()
    state = compiled(tokens, Grammar(kind=GrammarKind.GRAMMAR, source=source)).start()
    for token in (tokens.vocab_size - 1, 1 + ord("a"), tokens.vocab_size - 2):
        assert allowed(state, tokens.vocab_size) == {token}
        assert state.accept(token)
    assert state.is_finished


def test_lark_that_names_a_token_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(RequestError, match="unknown special token"):
        compiled(with_special_tokens(), Grammar(kind=GrammarKind.GRAMMAR, source="start: <|nobody|>"))


@pytest.mark.parametrize("shape", ["alike", "random", "numbers"])
def test_ten_thousand_choices_compile(shape: str) -> None:
    tokens, rng = vocabulary(["choice", "ab", "12"]), random.Random(0)
    shapes = {
        "alike": [f"choice no {number}" for number in range(MAX_CHOICES)],
        "random": ["".join(rng.choices("abcdefgh ijkl", k=12)) for _ in range(MAX_CHOICES)],
        "numbers": [str(number) for number in range(MAX_CHOICES)],
    }
    choices = shapes[shape]
    for count in (2_000, MAX_CHOICES):
        state = compiled(tokens, Grammar(kind=GrammarKind.CHOICE, source=json.dumps(choices[:count]))).start()
        written = b""
        while not state.is_finished:
            choice = sorted(allowed(state, tokens.vocab_size))
            token = rng.choice(choice)
            assert state.accept(token)
            written += b"" if token == EOS else tokens.tokens[token]
        assert written.decode() in choices[:count]
    with pytest.raises(RequestError, match="at most 10,000"):
        compiled(tokens, Grammar(kind=GrammarKind.CHOICE, source=json.dumps([*map(str, range(MAX_CHOICES + 1))])))


def test_what_takes_longer_than_a_moment_is_left_unfinished_and_what_people_write_is_not() -> None:
    tokens = vocabulary([])
    slow = compiler(tokens).compile(Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type": "integer", "multipleOf": 1000003}'))
    assert isinstance(slow, UnfinishedGrammar)
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(50)}}
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))
    found = [compiler(tokens).compile(grammar) for _ in range(5)]  # one of them is in time on any machine
    assert any(isinstance(each, Compiled) for each in found)


def test_a_long_text_without_a_choice_is_written_as_it_is() -> None:
    tokens = vocabulary(["aaaa", "ab"])
    text = "a" * 2_500 + "b"
    state, written = compiled(tokens, Grammar(kind=GrammarKind.REGEX, source="a{2500}b")).start(), b""
    while not state.is_finished:
        (token,) = allowed(state, tokens.vocab_size)
        assert state.accept(token)
        written += tokens.tokens[token]
    assert written.decode() == text


def test_a_format_of_no_standard_is_a_remark() -> None:
    """Pydantic writes path, password, binary and uuid4, OpenAPI byte and decimal; JSON Schema has unknown formats ignored."""
    tokens = vocabulary([])
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "path"},
            "fixed": {"const": {"format": "path"}},
            "many": {"type": "array", "items": {"anyOf": [{"type": "string", "format": "uuid4"}, {"$ref": "#/$defs/format"}]}},
        },
        "required": ["format", "fixed", "many"],
        "additionalProperties": False,
        "$defs": {"format": {"type": "string", "format": "binary", "minLength": 1}},
    }
    text = '{"format": "/a", "fixed": {"format": "path"}, "many": ["x"]}'
    within = f'start: "<" call ">" | other\ncall: %json {json.dumps(schema)}\nother: %json\n {json.dumps(schema)}\n'
    for kind, source, written in (
        (GrammarKind.JSON_SCHEMA, json.dumps(schema), text),
        (GrammarKind.GRAMMAR, within, f"<{text}>"),
        (GrammarKind.GRAMMAR, within, text),
    ):
        state = compiled(tokens, Grammar(kind=kind, source=source)).start()
        assert all(state.accept(1 + byte) for byte in written.encode())
        assert state.is_finished
    for known in ("regex", "uri-reference"):
        with pytest.raises(RequestError, match=f"Unknown format: {known}"):
            compiled(tokens, Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps({"type": "string", "format": known})))
