"""Grammars that are bad, too large or too slow: refused in words, or compiled in time."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest
from grammars_compiled import BIG_STACK, allowed, compiled, vocabulary
from pairwise import EVERYTHING

from enginery.api import Grammar, GrammarKind, RequestError
from enginery_grammar_llguidance import compiler as compiler_module


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
