"""gpt-oss' format: both parsers together, the grammar with its special tokens, and the library that defines the format.

`openai-harmony` downloads its vocabulary, or takes o200k_base.tiktoken from the folder TIKTOKEN_ENCODINGS_BASE: here the copy that
litellm brings. Without the library or the vocabulary, the comparison with it is left out.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import EVERYTHING

from enginery.api import (
    ArgumentsText,
    ContentText,
    Grammar,
    GrammarKind,
    GrammarTokens,
    ParserSetup,
    ReasoningText,
    RequestError,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
    UnfinishedGrammar,
)
from enginery_parsers.spec import PARSERS

TOOLS = {spec.name: spec for spec in PARSERS}["harmony"]
REASONING = {spec.name: spec for spec in PARSERS}["harmony-analysis"]
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions."
UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}
WEATHER = Tool(name="get_weather", parameters=UNIT, strict=True)
TIME = Tool(name="get_time")


def read(pieces: Any, *, inside: bool = True) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """Reasoning, content and calls, each with its arguments and whether it is complete, as the server reads them."""
    numbers = count()
    setup = ParserSetup(tools=(WEATHER, TIME), new_id=lambda: f"call_{next(numbers)}", inside=inside)
    first, second = REASONING.make(setup), TOOLS.make(setup)
    events: list[Any] = []
    for found in [*map(first.feed, pieces), first.finish()]:
        for event in found:
            events += second.feed(event.text) if isinstance(event, ContentText) else [event]
    events += second.finish()
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ArgumentsText):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    ended = {event.index: event.complete for event in events if isinstance(event, ToolCallEnded)}
    return (
        "".join(event.text for event in events if isinstance(event, ReasoningText)),
        "".join(event.text for event in events if isinstance(event, ContentText)),
        [(e.name, arguments.get(e.index, ""), ended[e.index]) for e in events if isinstance(e, ToolCallBegun)],
    )


ANSWERS = [
    (f"{ANALYSIS}Hm.{NEXT}<|channel|>final<|message|>Yes.<|return|>", ("Hm.", "Yes.", [])),
    (
        f'{ANALYSIS}Hm.{NEXT}{TO}get_weather <|constrain|>json<|message|>{{"unit": "C"}}',
        ("Hm.", "", [("get_weather", '{"unit": "C"}', True)]),
    ),
    (
        f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{TO}get_time<|message|>{{}}<|call|>",
        ("Hm.", "I look.", [("get_time", "{}", True)]),
    ),
    (" to=functions.get_time<|channel|>commentary json<|message|>{}", ("", "", [("get_time", "{}", True)])),
    (f'{ANALYSIS}A{NEXT}{TO}get_weather<|message|>{{"unit": "', ("A", "", [("get_weather", '{"unit": "', False)])),
    (f"{ANALYSIS}A{NEXT}{TO}fly <|message|>{{}}", ("A", f"<|start|>assistant{TO}fly <|message|>{{}}", [])),
    (f"{ANALYSIS}still thinking of {TO}", ("still thinking of ", TO, [])),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
def test_an_answer_is_read_by_both_parsers_however_it_is_cut(text: str, expected: Any) -> None:
    assert read([text]) == expected
    assert read(text) == expected
    for place in range(len(text)):
        assert read([text[:place], text[place:]]) == expected


def test_a_prompt_that_begins_an_answer_leaves_the_header_to_the_model() -> None:
    assert REASONING.is_inside("<|end|><|start|>assistant")
    assert not REASONING.is_inside("<|start|>assistant" + REASONING.close)
    assert read(["Yes."], inside=False) == ("", "Yes.", [])


@pytest.fixture(scope="module")
def compiled() -> Any:
    """Of a grammar, for a vocabulary of every byte and the format's special tokens: whether it accepts a text."""
    found = pytest.importorskip("enginery_grammar_llguidance.compiler")
    names = [b"<|start|>", b"<|end|>", b"<|message|>", b"<|channel|>", b"<|constrain|>", b"<|return|>", b"<|call|>"]
    texts = (*(bytes([byte]) for byte in range(256)), *names)
    ids = {name: 256 + place for place, name in enumerate(names)}

    def encode(text: str) -> list[int]:
        return list(text.encode())

    compiler = found.Compiler(
        GrammarTokens(
            tokens=texts,
            special_ids=frozenset(ids.values()),
            eos_token_ids=frozenset({ids[b"<|return|>"], ids[b"<|call|>"]}),
            encode=encode,
        )
    )

    def accepts(grammar: Grammar | None, text: str, spelt: str = "") -> bool:
        """spelt: behind the text, without special tokens."""
        assert grammar is not None
        found = compiler.compile(grammar)
        state = (found.finish() if isinstance(found, UnfinishedGrammar) else found).start()  # unfinished on a busy machine
        tokens, rest = [], text.encode()
        while rest:
            name = next((name for name in names if rest.startswith(name)), rest[:1])
            tokens.append(ids.get(name, rest[0]))
            rest = rest[len(name) :]
        return all(state.accept(token) for token in (*tokens, *spelt.encode(), ids[b"<|call|>"]))

    return accepts


def test_a_required_call_follows_its_schema(compiled: Any) -> None:
    grammar = TOOLS.force((WEATHER, TIME), None, parallel=True, required=True)
    good = f'{TO}get_weather <|constrain|>json<|message|>{{"unit": "C"}}'
    assert compiled(grammar, good)
    assert compiled(grammar, NEXT + good), "the prompt has begun a final message"
    assert read([good])[2] == read([NEXT + good], inside=False)[2] == [("get_weather", '{"unit": "C"}', True)]
    assert not compiled(grammar, good.replace('"C"', '"K"'))
    assert not compiled(grammar, "", spelt=good)
    assert not compiled(grammar, "<|channel|>final<|message|>Hi.")
    assert not compiled(grammar, "")
    named = TOOLS.force((WEATHER, TIME), "get_time", parallel=True, required=True)
    assert compiled(named, f"{TO}get_time <|constrain|>json<|message|>{{}}")
    assert not compiled(named, good)
    assert TOOLS.force((WEATHER, TIME), "fly", parallel=True, required=True) is None


@pytest.mark.parametrize("tags", [("", ""), REASONING.tags, ("", REASONING.tags[1])])
def test_a_free_answer_says_what_it_likes_but_calls_strict_tools_as_they_want(compiled: Any, tags: tuple[str, str]) -> None:
    grammar = TOOLS.force((WEATHER, TIME), None, parallel=True, required=False, reasoning=tags)
    call = f'{TO}get_weather <|constrain|>json<|message|>{{"unit": "C"}}'
    for begin in ("", f"{ANALYSIS}Hm 日, to=functions.{NEXT}", f"{ANALYSIS}a{NEXT}<|channel|>commentary<|message|>I look.{NEXT}"):
        assert compiled(grammar, begin + call), begin
        assert compiled(grammar, f'{begin}{TO}get_time <|constrain|>json<|message|>{{"a": [1]}}')
        assert compiled(grammar, f"{begin}<|channel|>final<|message|>It is warm.\n1 < 2")
        assert not compiled(grammar, begin + call.replace('"C"', '"K"'))
        assert not compiled(grammar, begin + call.replace("get_weather", "fly"))
    final = "<|channel|>final<|message|>"
    assert compiled(grammar, final, spelt="I call <|this|>")
    assert not compiled(grammar, final, spelt=call.replace('"C"', '"K"')), "the parsers see no difference"


@pytest.mark.parametrize("tags", [("", ""), REASONING.tags, ("", REASONING.tags[1])])
def test_an_answer_is_a_call_or_a_final_message_that_follows_a_schema(compiled: Any, tags: tuple[str, str]) -> None:
    assert TOOLS.force_or_json
    force = TOOLS.force_or_json(Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(UNIT)))
    grammar = force((WEATHER, TIME), None, parallel=True, required=False, reasoning=tags)
    call, final = f'{TO}get_weather <|constrain|>json<|message|>{{"unit": "C"}}', "<|channel|>final<|message|>"
    for begin in ("", f"{ANALYSIS}Hm 日, to=functions.{NEXT}"):
        assert compiled(grammar, begin + call), begin
        assert compiled(grammar, f'{begin}{TO}get_time <|constrain|>json<|message|>{{"a": [1]}}')
        assert compiled(grammar, f'{begin}{final}{{\n  "unit": "F"\n}}')
        for wrong in (
            call.replace('"C"', '"K"'),
            f"{final}It is warm.",
            f'{final}{{"unit": "K"}}',
            f"{ANALYSIS}Hm",
            '{"unit": "F"}',
        ):
            assert not compiled(grammar, begin + wrong), wrong
    assert not compiled(grammar, f"<|channel|>commentary<|message|>I look.{NEXT}{call}")
    assert read([f'{ANALYSIS}Hm{NEXT}{final}{{"unit": "F"}}'])[:2] == ("Hm", '{"unit": "F"}')
    required = force((WEATHER,), None, parallel=True, required=True)
    assert compiled(required, call)
    assert not compiled(required, f'{final}{{"unit": "F"}}')


def test_another_models_vocabulary_is_refused(compiled: Any) -> None:
    found = pytest.importorskip("enginery_grammar_llguidance.compiler")
    texts = (b"<end>", *(bytes([byte]) for byte in range(256)))
    other = found.Compiler(
        GrammarTokens(
            tokens=texts,
            special_ids=frozenset({0}),
            eos_token_ids=frozenset({0}),
            encode=lambda text: [1 + byte for byte in text.encode()],
        )
    )
    with pytest.raises(RequestError, match="cannot be used"):
        other.compile(TOOLS.force((WEATHER,), None, parallel=True, required=True))


O200K_BASE = "fb374d419588a4632f3f557e76b4b70aebbca790"  # as tiktoken names its cached file: the SHA-1 of the address


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Reads a text by openai-harmony: reasoning, content, and calls."""
    harmony = pytest.importorskip("openai_harmony")
    brings = find_spec("litellm")
    folder = tmp_path_factory.mktemp("vocabulary")
    if brings is not None and brings.origin is not None:
        stored = Path(brings.origin).with_name("litellm_core_utils") / "tokenizers" / O200K_BASE
        (folder / "o200k_base.tiktoken").symlink_to(stored)
    try:
        with pytest.MonkeyPatch.context() as patched:
            if brings is not None and "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
                patched.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
            encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except harmony.HarmonyError as error:
        pytest.skip(f"its vocabulary is not here: {error}")

    def messages(text: str) -> tuple[str, str, list[tuple[str, str]]]:
        parser = harmony.StreamableParser(encoding, role=harmony.Role.ASSISTANT)
        for token in encoding.encode(text, allowed_special="all"):
            parser.process(token)
        parser.process_eos()
        thought, said, calls = "", "", []
        for message in parser.messages:
            content = "".join(part.text for part in message.content)
            if (message.recipient or "").startswith("functions."):
                calls.append((message.recipient.removeprefix("functions."), content))
            elif message.channel == "analysis":
                thought += content
            else:
                said += content
        return thought, said, calls

    return messages


HEADERS = [
    "<|channel|>analysis",
    "<|channel|>commentary",
    "<|channel|>final",
    f"{TO}get_time <|constrain|>json",
    f"{TO}get_weather<|constrain|>json",
    f"{TO}get_time json",
    " to=functions.get_time<|channel|>commentary json",
    " to=functions.get_weather<|channel|>commentary <|constrain|>json",
]
TEXTS = st.text(alphabet="ab <|\n日🙂é'\"{}:=/", max_size=20)


@settings(deadline=None, max_examples=300 if EVERYTHING else 100)
@given(data=st.data())
def test_answers_are_read_as_the_library_reads_them(library: Any, data: st.DataObject) -> None:
    parts = []
    for header in data.draw(st.lists(st.sampled_from(HEADERS), min_size=1, max_size=5)):
        body = data.draw(TEXTS)
        if "to=" in header:
            body = json.dumps({data.draw(TEXTS): data.draw(st.lists(TEXTS, max_size=3))}, ensure_ascii=data.draw(st.booleans()))
        parts.append(f"{header}<|message|>{body}")
    text = NEXT.join(parts)
    thought, said, calls = library(text)
    ours = read([text])
    assert ours == (thought, said, [(name, arguments, True) for name, arguments in calls])
    assert read(text) == ours


@pytest.mark.parametrize(("text", "expected"), ANSWERS[:5])
def test_the_cases_here_are_the_librarys_too(library: Any, text: str, expected: Any) -> None:
    thought, said, calls = expected
    assert library(text) == (thought, said, [(name, arguments) for name, arguments, _ in calls])
