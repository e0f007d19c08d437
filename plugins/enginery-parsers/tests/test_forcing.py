"""Grammars of calls: they accept a call in the family's format, and what they accept the parser reads as calls that are valid.

Where no call is required, all other text is accepted too.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from call_grammars import (
    CLOSING,
    JSON,
    ONE,
    SPECS,
    STRICT,
    TIME,
    WEATHER,
    accepts,
    compiler_of,
    free,
    gathered,
    matcher,
    read_freely,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import EVERYTHING, in_turn

from enginery.api import (
    ParserSetup,
    UnfinishedGrammar,
)
from enginery_parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR


def calls(name: str, text: str) -> list[tuple[str, object]]:
    parser = SPECS[name].make(ParserSetup(tools=(WEATHER, TIME), new_id=lambda: "call_0"))
    content, read = gathered([*parser.feed(text), *parser.finish()])
    assert not content
    return read


@pytest.mark.parametrize("name", SPECS)
def test_a_call_in_the_familys_format_is_accepted_and_read(name: str) -> None:
    text = ONE[name].replace("DAYS", "3")
    assert accepts(SPECS[name].force((WEATHER, TIME), None, parallel=True, required=True), text)
    assert calls(name, text) == [("get_weather", {"city": "Oslo", "days": 3, "unit": "C"})]


@pytest.mark.parametrize("name", SPECS)
def test_other_text_and_arguments_against_the_schema_are_refused(name: str) -> None:
    grammar = SPECS[name].force((WEATHER, TIME), None, parallel=True, required=True)
    assert not accepts(grammar, "It is warm in Oslo.")
    assert not accepts(grammar, "")
    assert not accepts(grammar, ONE[name].replace("DAYS", "3.5"))
    assert not accepts(
        grammar, ONE[name].replace("DAYS", "3").replace('"C"', '"K"').replace(">C<", ">K<").replace("\nC\n", "\nK\n")
    )


@pytest.mark.parametrize("name", SPECS)
def test_a_named_function_is_the_only_one(name: str) -> None:
    text = ONE[name].replace("DAYS", "3")
    assert accepts(SPECS[name].force((WEATHER, TIME), "get_weather", parallel=True, required=True), text)
    assert not accepts(SPECS[name].force((WEATHER, TIME), "get_time", parallel=True, required=True), text)
    assert SPECS[name].force((WEATHER, TIME), "fly", parallel=True, required=True) is None


@in_turn(("name", SPECS), ("parallel", [True, False]))
def test_what_the_grammar_allows_is_read_as_calls(name: str, *, parallel: bool) -> None:
    shapes = set()
    for seed in range(30 if EVERYTHING else 12):
        found, random_, text = (
            matcher(SPECS[name].force((WEATHER, TIME), None, parallel=parallel, required=True)),
            random.Random(seed),
            b"",
        )
        while not found.is_stopped() and len(text) < 1_500:
            mask = found.compute_logit_bias()
            allowed = [token for token in range(256) if mask[token]]
            plain = [token for token in allowed if token < 127] or allowed
            if found.is_accepting() and (not allowed or random_.random() < 0.5):
                break
            token = random_.choice([option for option in plain if option in CLOSING] * 5 + plain)
            assert found.consume_token(token)
            text += bytes([token])
        if found.is_accepting():
            read = calls(name, text.decode())
            assert read
            assert parallel or len(read) == 1
            shapes.add(len(read))
    assert shapes


TAGS = ("<think>", "</think>")
PROSE = [
    "",
    "It is warm in Oslo.",
    "a < b, <tool_",
    '{"a": 1}',
    'so:\n{\n  "city": "Oslo"\n}',
    "日本語 \U0001f600\n\n```json\n[]\n```",
    "<\uff5ctool",
]


@pytest.mark.parametrize("name", SPECS)
def test_text_without_a_call_is_free_where_none_is_required(name: str) -> None:
    for text in PROSE:
        assert accepts(free(name), text), text
        assert accepts(free(name, parallel=False), text), text
        assert read_freely(name, text) == (text, [])


@pytest.mark.parametrize("name", SPECS)
def test_a_call_in_the_midst_of_text_follows_its_schema(name: str) -> None:
    before, after = ("", "") if name == "llama3-json" else ("I look. ", " Done.")
    for days, is_valid in (("3", True), ("3.5", False), ('"x"', False)):
        text = before + ONE[name].replace("DAYS", days) + after
        assert accepts(free(name), text) is is_valid, text
    unknown = before + ONE[name].replace("get_weather", "get_money").replace("DAYS", "3")
    assert not accepts(free(name), unknown)


@pytest.mark.parametrize("name", SPECS)
def test_arguments_of_a_tool_that_is_not_strict_are_any_object(name: str) -> None:
    anything = json.dumps({"a": [1, {"b": None}], "city": 5})
    text = ONE[name].replace(JSON, anything).replace("DAYS", '"soon"')
    for before, after in (("arg_key>", "<"), ("=", ">"), ('="', '"'), ("(", "=")):
        text = text.replace(f"{before}city{after}", f"{before}other{after}")
    assert accepts(free(name, WEATHER), text)
    assert not accepts(free(name, STRICT), text)


@pytest.mark.parametrize("name", SPECS)
def test_one_call_at_most_where_they_are_not_parallel(name: str) -> None:
    text = ONE[name].replace("DAYS", "3")
    more = text + ("; " if name == "llama3-json" else "\n") + text
    assert accepts(free(name, parallel=False), text)
    assert accepts(free(name), more)
    assert not accepts(free(name, parallel=False), more)


@pytest.mark.parametrize("breaks", ["", "\n", "\n\n"])
def test_a_call_without_arguments_may_end_behind_a_blank_line_as_ling_writes_it(breaks: str) -> None:
    text = f"<tool_call>get_time{breaks}</tool_call>"
    assert accepts(SPECS["glm4"].force((WEATHER, TIME), None, parallel=True, required=True), text)
    assert accepts(free("glm4"), text)
    assert calls("glm4", text) == [("get_time", {})]


@pytest.mark.parametrize("name", SPECS)
def test_reasoning_is_free_even_if_it_speaks_of_calls(name: str) -> None:
    call, wrong = (ONE[name].replace("DAYS", days) for days in ("3", "no"))
    for tags, opening in ((TAGS, "\n<think>"), (("", TAGS[1]), "")):
        grammar = free(name, reasoning=tags)
        for text in ("hm", f"{wrong} hm", f"hm</think>\n\n{call}", f"{wrong}</think>It is warm."):
            assert accepts(grammar, opening + text), opening + text
        assert not accepts(grammar, f"{opening}hm</think>{wrong}")
    assert not accepts(free(name, reasoning=TAGS), wrong)
    assert not accepts(free(name, reasoning=TAGS), f"x<think></think>\n{wrong}")
    assert not accepts(free(name, reasoning=TAGS), f"{' ' * 17}<think>\n{wrong}"), "so far from the beginning it is content"


BAD = '{"city": 5}'
OBJECTS = [
    f'{{"name": "get_weather", "arguments": {BAD}}}',
    f'{{"parameters": {BAD}, "name": "get_weather"}}',
    f'{{ "id": 1, "name":"get_weather", "arguments": {BAD}}}',
    f'{{"type": "function", "name": "get_weather", "parameters": {BAD}}}',
    f'{{"\\u006eame": "get_weather", "arguments": {BAD}}}',
]
PAIR = "<arg_key>days</arg_key><arg_value>x</arg_value>"
QWEN_PAIR = "<parameter=days>x</parameter>"
MINIMAX_PAIR = '<parameter name="days">x</parameter>'
AGAINST = {  # calls that the parsers read, whose arguments are wrong
    "hermes": [f"<tool_call>{blank}{call}</tool_call>" for blank in ("", "\n", " ") for call in OBJECTS],
    "llama3-json": [begin + call for begin in ("", "\n", " ", "<|python_tag|>", "<|python_tag|> ") for call in OBJECTS],
    "mistral": [f"[TOOL_CALLS]{begin}{call}" for begin in ("[", " [", "", '[{"name": "get_time"}, ') for call in OBJECTS],
    "mistral-args": [f"[TOOL_CALLS]{head}[ARGS]{blank}{BAD}" for head in ("get_weather", " get_weather ") for blank in ("", " ")],
    "deepseek-v3": [
        f"{CALL_BEGIN}function{SEPARATOR}get_weather{fence}{BAD}" for fence in ("\n```json\n", "\n```\n", "\n", "```json")
    ],
    "deepseek-v3.1": [f"{CALL_BEGIN}{name}{SEPARATOR}{BAD}" for name in ("get_weather", " get_weather ", "get_weather\n")],
    "glm4": [f"<tool_call>{begin}{PAIR}</tool_call>" for begin in ("get_weather", "get_weather\n", "\n get_weather ")],
    "longcat": [f"<longcat_tool_call>{blank}{call}</longcat_tool_call>" for blank in ("", "\n", " ") for call in OBJECTS],
    "granite3": [f"<|tool_call|>{begin}{call}" for begin in ("[", "", " [ ", '[{"name": "get_time"}, ') for call in OBJECTS],
    "phi4-mini": [f"<|tool_call|>{begin}{call}" for begin in ("[", "", " [ ", '[{"name": "get_time"}, ') for call in OBJECTS],
    "nemotron": [f"<TOOLCALL>{begin}{call}" for begin in ("[", "", " [ ", '[{"name": "get_time"}, ') for call in OBJECTS],
    "jamba": [f"<tool_calls>{begin}{call}" for begin in ("[", "[\n    ", "", "\n") for call in OBJECTS],
    "minimax-m1": [f"<tool_calls>{begin}{call}" for begin in ("[", "\n", "", " ") for call in OBJECTS],
    "kimi-k2": [
        f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{BAD}"
        for head in ("functions.get_weather:0", "get_weather", " functions.get_weather:12 ", "get_weather:3\n")
    ],
    "minimax-text": [
        f"<function_call>{begin}get_weather({BAD})"
        for begin in ("```typescript\nfunctions.", "", "\n```functions.", "```ts functions.")
    ],
    "longcat-tags": [
        f"<longcat_tool_call>{begin}{PAIR.replace('arg_', 'longcat_arg_')}</longcat_tool_call>"
        for begin in ("get_weather", "get_weather\n", "\n get_weather ")
    ],
    "qwen3-xml": [
        f"{begin}<function=get_weather>{QWEN_PAIR}</function>" for begin in ("<tool_call>", "<tool_call>\n", "<tool_call> ", "")
    ],
    "mimo": [f"{begin}<function=get_weather>\n{QWEN_PAIR}</function>" for begin in ("<tool_call>", "<tool_call>\n", "")],
    "minimax-m2": [
        f'{begin}<invoke name="get_weather">{MINIMAX_PAIR}</invoke>'
        for begin in ("<minimax:tool_call>", "<minimax:tool_call>\n", '<minimax:tool_call><invoke name="get_time"></invoke>', "")
    ],
    "lfm2": [
        *(
            f"<|tool_call_start|>{begin}get_weather({given})"
            for begin in ("[", "", "[get_time(), ")
            for given in ("city=5", "days='x'")
        ),
        *(f"<|tool_call_start|>{begin}{call}" for begin in ("[", "") for call in OBJECTS),
    ],
}
BEGINS = {  # of a call, as the grammars write it
    "hermes": ["<tool_call>"],
    "longcat": ["<longcat_tool_call>"],
    "granite3": ["<|tool_call|>"],
    "phi4-mini": ["<|tool_call|>"],
    "nemotron": ["<TOOLCALL>"],
    "jamba": ["<tool_calls>"],
    "minimax-m1": ["<tool_calls>"],
    "llama3-json": ['{"name": "'],
    "mistral": ["[TOOL_CALLS]"],
    "mistral-args": ["[TOOL_CALLS]"],
    "kimi-k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    "minimax-text": ["<function_call>"],
    "glm4": ["<tool_call>"],
    "longcat-tags": ["<longcat_tool_call>"],
    "qwen3-xml": ["<tool_call>", "<function="],
    "mimo": ["<tool_call>", "<function="],
    "minimax-m2": ["<minimax:tool_call>", '<invoke name="'],
    "lfm2": ["<|tool_call_start|>"],
}
PARTS = [
    *("<tool_call>", "</tool_call>", '{"name": "', "get_weather", '", "arguments": ', "{}", "}", JSON.replace("DAYS", "3")),
    *(CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END, "function", "\n```json\n", "<|python_tag|>", "<think>", "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "city", "\n", " ", " " * 15, "; ", "{", '"', "x"),
]


@in_turn(("name", SPECS), ("tags", [("", ""), TAGS, ("", TAGS[1])]))
@given(st.data())
@settings(deadline=None, max_examples=80 if EVERYTHING else 32)
def test_no_text_that_is_accepted_has_a_call_against_its_schema(name: str, tags: tuple[str, str], data: st.DataObject) -> None:
    call = ONE[name].replace("DAYS", "3")
    around = st.lists(st.sampled_from([*PARTS, *BEGINS.get(name, [CALLS_BEGIN]), call, "<think>"]), max_size=4).map("".join)
    text = data.draw(around) + data.draw(st.sampled_from(AGAINST[name])) + data.draw(around)
    found, tokens = matcher(free(name, reasoning=tags)), list(text.encode())
    taken = tokens[: found.try_consume_tokens(tokens)]
    if found.is_accepting():
        read_freely(name, bytes(taken).decode(errors="ignore"), reasons=bool(tags[1]), inside=tags == ("", TAGS[1]))


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in AGAINST.items() for text in texts])
def test_a_call_against_its_schema_is_not_accepted_wherever_the_parser_reads_it(name: str, text: str) -> None:
    call = ONE[name].replace("DAYS", "3")
    num_read = 0
    for before in (
        "",
        "x",
        "x\n",
        "\n",
        " ",
        "x <tool_",
        f"{call}\n",
        f"{call}; ",
        f"{call} and\n",
        CALLS_BEGIN,
        f"x{CALLS_BEGIN}",
    ):
        try:
            read_freely(name, before + text)
        except jsonschema.ValidationError:
            num_read += 1
            assert not accepts(free(name), before + text), before + text
    assert num_read > 2


WORDS = [
    *PARTS[:15],
    *PARTS[19:27],
    "l>\n{",
    '{"',
    '"}',
    '"}}\n',
    "}\n</",
    " it",
    " the call",
    '": ',
    "Oslo",
    "ool_c",
    "</think>\n\n",
    *("<TOOLCALL>", "]</TOOLCALL>", "<longcat_", "</longcat_", "arg_value>", "tool_call>", "tool_calls>", "<|tool_", "_begin|>"),
    *(
        "_end|>",
        "</parameter>",
        "</function>",
        "</invoke>",
        "</minimax:tool_call>",
        "<parameter",
        "functions.",
        "```",
        ")\n",
        ")]<|",
    ),
]
ENDING = (
    *(
        '"',
        "}",
        '"}',
        "]",
        "</",
        CALL_END,
        CALLS_END,
        "</arg_value>",
        "</tool_call>",
        ")",
        "]</TOOLCALL>",
        "</longcat_",
        "arg_value>",
    ),
    *("tool_call>", "tool_calls>", "</parameter>", "</function>", "</invoke>", "</minimax:tool_call>", "_end|>", ")]<|"),
)


@pytest.fixture(scope="module")
def compiler() -> Any:
    """Of tokens within, at and across the markers."""
    return compiler_of(WORDS)


def walk(state: Any, texts: list[bytes], seed: int, begins: list[str]) -> bytes | None:
    """Tokens at random under the masks, leaning to end what is open, and at times to begin a call. None: too long."""
    rng, written, wish = random.Random(seed), b"", b""
    for _ in range(1_500):
        row = np.zeros(-(-len(texts) // 32), dtype=np.int32)
        state.fill_mask(row)
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        ending = [token for token in allowed if texts[token].decode(errors="ignore") in ENDING]
        wish = wish or (rng.choice(begins).encode() if rng.random() < (0.05 if written else 0.3) else b"")
        wished = [token for token in allowed if token and wish.startswith(texts[token])] if wish else []
        plain = [token for token in allowed if 32 <= token <= 127 or token > 257] or allowed
        token = rng.choice(wished or [*ending * (1 + len(plain) // (1 + len(ending))), *plain])
        if 0 in allowed and rng.random() < 0.05:
            token = 0
        assert state.accept(token)
        if token == 0:
            return written
        written += texts[token]
        wish = wish[len(texts[token]) :] if wished else b""
    return None


@pytest.mark.parametrize("name", SPECS)
def test_walks_under_the_masks_write_free_text_and_valid_calls(name: str, compiler: Any) -> None:
    begins = BEGINS.get(name, [CALLS_BEGIN, CALL_BEGIN])
    found = compiler.compile(free(name))
    compiled = found.finish() if isinstance(found, UnfinishedGrammar) else found
    texts = [b"", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]
    shapes = []
    for seed in range(60 if EVERYTHING else 30):
        written = walk(compiled.start(), texts, seed, begins)
        if written is not None:
            content, read = read_freely(name, written.decode())
            shapes.append((bool(content), len(read)))
    assert (True, 0) in shapes, "text alone"
    assert sum(num for _, num in shapes) > 5, "calls"
    assert name == "llama3-json" or any(has_text and num for has_text, num in shapes), "both"
