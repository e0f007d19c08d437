"""Grammars of answers that are calls, or JSON that satisfies a schema: nothing else, but for reasoning in front."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from call_grammars import JSON, ONE, REASONING, SPECS, STRICT, TIME, WEATHER, accepts, compiler_of, matcher, read_freely
from pairwise import in_turn

from enginery.api import ContentText, Grammar, GrammarKind, ParserSetup, ReasoningText, RequestError, Tool, UnfinishedGrammar

SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "cloudy"]}, "note": {"type": "string", "maxLength": 6}},
    "required": ["sky"],
    "additionalProperties": False,
}
ANSWERS = ['{"sky": "clear"}', '{"sky":"cloudy","note":"x"}', '{\n  "sky": "clear",\n  "note": "<tool>"\n}']
NAMES = [name for name in SPECS if name != "llama3-json"]
TAGS = REASONING.tags


def both(
    name: str,
    *tools: Tool,
    schema: str = json.dumps(SCHEMA),
    parallel: bool = True,
    required: bool = False,
    reasoning: tuple[str, str] = ("", ""),
) -> Grammar | None:
    force = SPECS[name].force_or_json(Grammar(kind=GrammarKind.JSON_SCHEMA, source=schema))
    return force(tools or (STRICT, TIME), None, parallel=parallel, required=required, reasoning=reasoning)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_calls_or_follows_the_schema(name: str) -> None:
    call = ONE[name].replace("DAYS", "3")
    grammar = both(name)
    for text in (call, *ANSWERS):
        assert accepts(grammar, text), text
        assert not accepts(grammar, f"So: {text}")
        assert not accepts(grammar, f"{text} Done.")
    for text in ("", "It is clear.", '{"sky": "red"}', "{}", "[]", ONE[name].replace("DAYS", '"x"')):
        assert not accepts(grammar, text), text
    for one, other in ((ANSWERS[0], call), (call, ANSWERS[0])):
        assert not accepts(grammar, f"{one}\n{other}")


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_a_tool_that_is_not_strict_are_any_object(name: str) -> None:
    anything = json.dumps({"a": [1, {"b": None}], "city": 5})
    text = ONE[name].replace(JSON, anything).replace("DAYS", '"soon"')
    assert accepts(both(name, WEATHER), text)
    assert not accepts(both(name, STRICT), text)
    odd = Tool(name="odd", parameters={"properties": {"v": {"type": "array", "uniqueItems": True}}})
    assert accepts(both(name, odd, TIME), ANSWERS[0]), "nothing is said of the arguments, so no schema is too odd"


@pytest.mark.parametrize("name", NAMES)
def test_one_call_at_most_where_they_are_not_parallel(name: str) -> None:
    call = ONE[name].replace("DAYS", "3")
    assert accepts(both(name, parallel=False), call)
    assert not accepts(both(name, parallel=False), f"{call}\n{call}")


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_is_free_and_the_answer_comes_behind_it(name: str) -> None:
    call, wrong = (ONE[name].replace("DAYS", days) for days in ("3", "no"))
    for tags, opening in ((TAGS, "\n<think>"), (("", TAGS[1]), "")):
        grammar = both(name, reasoning=tags)
        for text in (call, *ANSWERS):
            for between in ("</think>", "</think>\n", "</think>\n\n"):
                assert accepts(grammar, f"{opening}{wrong} {{ hm{between}{text}"), text
        for text in ("hm", "hm</think>", "hm</think>Clear.", f"hm</think>{wrong}", 'hm</think>{"sky": 1}'):
            assert not accepts(grammar, opening + text), text
    assert accepts(both(name, reasoning=TAGS), ANSWERS[0])
    assert accepts(both(name, reasoning=TAGS), call)


def test_a_call_in_reasoning_that_json_follows_is_reasoning() -> None:
    call = ONE["hermes"].replace("DAYS", "3")
    parser = REASONING.make(ParserSetup(tools=(WEATHER,), new_id=str, inside=True))
    events = [*parser.feed(f"Hm.\n{call}</think>\n\n"), *parser.feed(ANSWERS[0]), *parser.finish()]
    assert events[-1] == ContentText(ANSWERS[0])
    assert "".join(event.text for event in events[:-1] if isinstance(event, ReasoningText)) == f"Hm.\n{call}"


def test_a_format_whose_calls_begin_as_json_does_has_no_such_grammar() -> None:
    assert both("llama3-json") is None


@pytest.mark.parametrize("kind", [kind for kind in GrammarKind if kind is not GrammarKind.JSON_SCHEMA])
def test_of_other_grammars_only_that_of_json_objects_goes_with_calls(kind: GrammarKind) -> None:
    force = SPECS["hermes"].force_or_json(Grammar(kind=kind))
    grammar = force((STRICT, TIME), None, parallel=True, required=False)
    if kind is GrammarKind.JSON_OBJECT:
        assert accepts(grammar, '{"any": ["thing"]}')
        assert not accepts(grammar, "[]")
    else:
        assert grammar is None


@pytest.mark.parametrize("name", SPECS)
def test_an_answer_that_must_call_is_only_calls(name: str) -> None:
    grammar = both(name, required=True)
    assert accepts(grammar, ONE[name].replace("DAYS", "3"))
    assert not accepts(grammar, ANSWERS[0])


@in_turn(("name", NAMES), ("parallel", [True, False]))
def test_what_the_grammar_allows_is_calls_or_an_answer(name: str, *, parallel: bool) -> None:
    shapes = set()
    for seed in range(16):
        found, rng, text = matcher(both(name, parallel=parallel)), random.Random(seed), b""
        while not found.is_stopped() and len(text) < 1_500:
            mask = found.compute_logit_bias()
            allowed = [token for token in range(256) if mask[token]]
            plain = [token for token in allowed if token < 127] or allowed
            if found.is_accepting() and (not allowed or rng.random() < 0.5):
                break
            token = rng.choice([option for option in plain if option in b'"}]</'] * 5 + plain)
            assert found.consume_token(token)
            text += bytes([token])
        if found.is_accepting() and text.lstrip().startswith(b"{"):
            jsonschema.validate(json.loads(text), SCHEMA)
            shapes.add("an answer")
        elif found.is_accepting():
            content, calls = read_freely(name, text.decode())
            assert not content.strip()
            assert len(calls) == 1 or (calls and parallel)
            shapes.add("calls")
    assert shapes == {"an answer", "calls"}


HOSTILE = {
    "no object": "[1]",
    "no JSON": "{",
    "deep": '{"items": ' * 2_000 + "{}" + "}" * 2_000,
    "never": '{"type": "integer", "minimum": 3, "maximum": 2}',
    "hidden by x-guidance": '{"not": {}, "x-guidance": {"lenient": true}}',
    "a line of Lark": '{"properties": {"v\\"\\nstart: \\"x": {"type": "integer", "not": {}}}}',
    "half a character": '{"properties": {"\\ud800": {"type": "integer"}}}',
    "long": json.dumps({"enum": ["x" * 1_000] * 300}),
}


@pytest.fixture(scope="module")
def compiler() -> Any:
    return compiler_of()


def compile_whole(compiler: Any, schema: str) -> None:
    """To the end, on a busy machine too."""
    found = compiler.compile(both("hermes", schema=schema))
    if isinstance(found, UnfinishedGrammar):
        found.finish()


@pytest.mark.parametrize("about", HOSTILE)
def test_a_schema_that_cannot_be_kept_to_is_refused(about: str, compiler: Any) -> None:
    with pytest.raises(RequestError) as refused:
        compile_whole(compiler, HOSTILE[about])
    assert refused.value.param == "grammar"
    assert len(str(refused.value)) < 1_500
