"""Masks against a brute force over the tokens' texts, and grammars that are refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import EVERYTHING

from enginery.api import Grammar, GrammarKind, GrammarNeeds, GrammarTokens, Overloaded, RequestError, UnfinishedGrammar
from enginery_grammar_llguidance import compiler as compiler_module
from enginery_grammar_llguidance.compiler import MAX_CHOICES, Compiled, Compiler, State
from enginery_grammar_llguidance.spec import LLGUIDANCE
from enginery_grammar_llguidance.vocabulary import Vocabulary

EOS = 0
BIG_STACK = 512 << 20


def vocabulary(texts: list[str]) -> GrammarTokens:
    """End, every byte, these texts, and an id without a token."""
    return vocabulary_of(tuple(texts))


@functools.lru_cache(64)
def vocabulary_of(texts: tuple[str, ...]) -> GrammarTokens:
    tokens = (b"<end>", *(bytes([byte]) for byte in range(256)), *(text.encode() for text in texts), b"")
    return GrammarTokens(
        tokens=tokens,
        special_ids=frozenset({EOS}),
        eos_token_ids=frozenset({EOS}),
        encode=lambda text: [1 + byte for byte in text.encode()],
    )


@functools.lru_cache(4)
def compiler(tokens: GrammarTokens) -> Compiler:
    return Compiler(tokens)


def compiled(tokens: GrammarTokens, grammar: Grammar) -> Compiled:
    """However long it takes, and however busy the machine is."""
    for _ in range(5):
        found = compiler(tokens).compile(grammar)
        try:
            return found.finish() if isinstance(found, UnfinishedGrammar) else found
        except Overloaded:
            continue
    raise AssertionError("the machine is too busy")


def speller(tokens: GrammarTokens) -> Vocabulary:
    return Vocabulary(tokens.tokens, special_ids=tokens.special_ids, eos_token_ids=tokens.eos_token_ids, encode=tokens.encode)


def allowed(state: State, vocab_size: int) -> set[int]:
    row = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    state.fill_mask(row)
    return set(np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def walk(tokens: GrammarTokens, grammar: Grammar, seed: int, most: int = 60) -> tuple[bytes, bool, set[int]]:
    """What a random walk under the masks writes, whether it came to the end, and what was allowed last."""
    state, rng, written, choice = compiled(tokens, grammar).start(), random.Random(seed), b"", set[int]()
    for _ in range(most):
        choice = allowed(state, tokens.vocab_size)
        token = rng.choice(sorted(choice))
        assert state.accept(token)
        written += b"" if token == EOS else tokens.tokens[token]
        if state.is_finished:
            return written, True, choice
    return written, False, choice


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


def test_answers_to_one_grammar_are_independent() -> None:
    tokens = vocabulary([])
    found = compiled(tokens, Grammar(kind=GrammarKind.REGEX, source="ab|cd"))
    first, second = found.start(), found.start()
    assert first.accept(1 + ord("a"))
    assert allowed(second, tokens.vocab_size) == {1 + ord("a"), 1 + ord("c")}
    assert allowed(first, tokens.vocab_size) == {1 + ord("b")}


def chain(count: int) -> str:
    """A schema that refers on and on."""
    links = {f"r{index}": {"items": {"$ref": f"#/$defs/r{index + 1}"}} for index in range(count)}
    return json.dumps({"$ref": "#/$defs/r0", "$defs": {**links, f"r{count}": {"type": "integer"}}})


def rules(count: int) -> str:
    """A grammar of rules that call each other, one after the other."""
    return "start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(count)) + f'r{count}: "a"'


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


TOO_SLOW = "s to compile; make it simpler"
HOSTILE = {
    "no JSON": (GrammarKind.JSON_SCHEMA, "{bad", "no JSON"),
    "no schema": (GrammarKind.JSON_SCHEMA, "[]", "no JSON object"),
    "true": (GrammarKind.JSON_SCHEMA, "true", "no JSON object"),
    "deep schema": (GrammarKind.JSON_SCHEMA, '{"items": ' * 900 + "{}" + "}" * 900, "nested too deeply"),
    "an unknown type": (GrammarKind.JSON_SCHEMA, '{"type": "banana"}', "banana"),
    "a keyword that is not supported": (GrammarKind.JSON_SCHEMA, '{"not": {}}', "not"),
    "a keyword hidden by the schema": (GrammarKind.JSON_SCHEMA, '{"not": {}, "x-guidance": {"lenient": true}}', "not"),
    "a reference to itself": (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "nothing satisfies it"),
    "nothing": (GrammarKind.JSON_SCHEMA, '{"type": "string", "minLength": 5, "maxLength": 3}', "greater"),
    "deep": (GrammarKind.JSON_SCHEMA, nested(20_000), "recursion limit"),
    "wide": (GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(900)}}), "items"),
    "very wide": (GrammarKind.JSON_SCHEMA, json.dumps({"properties": {f"p{index}": {} for index in range(18_000)}}), TOO_SLOW),
    "a large multiple": (GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 10000019}', TOO_SLOW),
    "patterns that all must match": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"allOf": [{"type": "string", "pattern": f"^.*a.{{{index}}}b.*$"} for index in range(40)]}),
        TOO_SLOW,
    ),
    "an intersection of patterns": (
        GrammarKind.GRAMMAR,
        "start: A\nA: " + " & ".join(f"/.*a.{{{index}}}b.*/" for index in range(60)),
        TOO_SLOW,
    ),
    "a huge list of values": (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"v{index}" for index in range(24_000)]}), None),
    "a bad pattern in a schema": (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "[["}', "regex"),
    "a bad pattern": (GrammarKind.REGEX, "((", "unclosed group"),
    "a pattern that ends in its escape": (GrammarKind.REGEX, "[0-9]{3}\\", "ends with a backslash that nothing follows"),
    "the same in a schema": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"type": "string", "pattern": "a\\\\\\"}),
        "ends with a backslash",
    ),
    "an escape that is whole": (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "a\\\\"}), None),
    "look-around": (GrammarKind.REGEX, "(?=a)b", "look-around"),
    "deep brackets": (GrammarKind.REGEX, "(" * 100_000 + "a" + ")" * 100_000, "nest"),
    "a catastrophic pattern": (GrammarKind.REGEX, "(a+)+$", None),
    "many states": (GrammarKind.REGEX, "(a|b)*a(a|b){40}", None),
    "repeats of repeats": (GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}", None),
    "an endless list": (GrammarKind.JSON_SCHEMA, '{"type": "array", "maxItems": 1000000000}', None),
    "a bad grammar": (GrammarKind.GRAMMAR, 'start: "a', "lexer error"),
    "an unknown rule": (GrammarKind.GRAMMAR, "start: thing", "thing"),
    "deep grammar": (GrammarKind.GRAMMAR, "start: " + "(" * 50_000, "nested"),
    "a long chain of rules": (GrammarKind.GRAMMAR, rules(16_000), None),
    "a long chain of references": (GrammarKind.JSON_SCHEMA, chain(5_000), None),
    "no choices": (GrammarKind.CHOICE, "[]", "at least one"),
    "choices that are no texts": (GrammarKind.CHOICE, "[1]", "at least one"),
    "deep choices": (GrammarKind.CHOICE, "[" * 100_000, "no JSON"),
    "half a character": (GrammarKind.CHOICE, '["\\ud800"]', "surrogates"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_compiled_in_time_and_steps_stay_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, source, refusal = HOSTILE[name]
    if not EVERYTHING and refusal == TOO_SLOW:
        monkeypatch.setattr(compiler_module, "TRIAL_S", 0.5)  # they take minutes: half a second of them is enough
    tokens, said = vocabulary(["aaaa", "bbbb", "[[", '{"']), list[str]()
    slowest = [0.0]

    def use() -> None:
        try:
            state = compiled(tokens, Grammar(kind=kind, source=source)).start()
            rng = random.Random(0)
            for _ in range(100):
                begun = time.thread_time()
                choice = sorted(allowed(state, tokens.vocab_size))
                assert state.accept(rng.choice(choice))
                slowest[0] = max(slowest[0], time.thread_time() - begun)
                if state.is_finished:
                    break
        except RequestError as error:
            said.append(str(error))

    usual = threading.stack_size(BIG_STACK)  # as the engine compiles
    try:
        worker = threading.Thread(target=use)
        worker.start()
    finally:
        threading.stack_size(usual)
    worker.join(50)
    assert not worker.is_alive(), "still compiling"
    assert slowest[0] < 0.25
    if refusal is None:
        return
    assert said
    assert refusal in said[0]
    assert len(said[0]) < 1_200


def test_a_grammar_that_grows_beyond_the_limits_on_the_way_is_an_error_there() -> None:
    tokens, rng = vocabulary([]), random.Random(1)
    state = compiled(tokens, Grammar(kind=GrammarKind.REGEX, source="(a|b)*a(a|b){60}")).start()

    def write(count: int) -> None:
        for _ in range(count):
            allowed(state, tokens.vocab_size)
            state.accept(1 + ord(rng.choice("ab")))

    with pytest.raises(RequestError, match="cannot go on"):
        write(200_000)


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
