"""Schemas of two public collections: what compiles leads to documents that validate, and the rest is refused with a reason.

The JSON Schema Test Suite (`pack_json_schema_test_suite.py` says where from) has documents to each schema, valid and not. The
package `check-jsonschema` has 26 schemas of programs' configuration files; each of their definitions is one more schema.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from pairwise import EVERYTHING

from enginery.api import CompiledGrammar, Grammar, GrammarKind, GrammarState, GrammarTokens, RequestError
from enginery_grammar_llguidance import compiler
from enginery_grammar_llguidance.matching import error_of, matcher_of, tokenizer_of
from enginery_grammar_llguidance.trial import End, Outcome, Trials
from enginery_grammar_llguidance.vocabulary import Vocabulary

HERE = Path(__file__).parent
EOS = 0
PIECES = (
    '{"',
    '":',
    '": ',
    '","',
    '"}',
    '"]',
    "[]",
    "{}",
    "}}",
    ", ",
    "\n  ",
    "\n    ",
    "null",
    "true",
    "fa",
    "lse",
    "12",
    " the",
    "é",
)
TOKENS = GrammarTokens(
    tokens=(b"<end>", *(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)),
    special_ids=frozenset({EOS}),
    eos_token_ids=frozenset({EOS}),
    encode=lambda text: [1 + byte for byte in text.encode()],
)
# a draft is what `$schema` says, and 2020-12 if nothing says it
DRAFTS = {"draft 2020-12": None, "draft 7": "http://json-schema.org/draft-07/schema#", "formats": None}
LEAST_COMPILED = {"draft 2020-12": 163, "draft 7": 160, "formats": 11, "real life": 371}
PARTS = list(DRAFTS)
# what llguidance lets a date or time be although there is none: 29 February in any year, a leap second in any minute
LEAPS = re.compile(r"-02-29|:60")


@dataclass(frozen=True)
class Case:
    """tests: of the suite, documents and whether they are valid."""

    name: str
    schema: dict | bool
    tests: tuple[dict, ...] = ()


@functools.cache
def suite(part: str) -> list[Case]:
    files = json.loads((HERE / "json_schema_test_suite.json").read_text())[part]
    cases = []
    for name, case in ((name, case) for name, found in files.items() for case in found):
        schema = case["schema"]
        if DRAFTS[part] and isinstance(schema, dict):
            schema = {"$schema": DRAFTS[part], **schema}
        cases.append(Case(f"{name}: {case['description']}", schema, tuple(case["tests"])))
    return cases


@functools.cache
def real_life() -> list[Case]:
    """Whole schemas, and their definitions, except of the two that are longer than what is compiled."""
    cases = []
    folder = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    for path in sorted((path for path in folder.iterdir() if path.name.endswith(".json")), key=lambda path: path.name):
        schema = json.loads(path.read_text())
        cases.append(Case(path.name, schema))
        places = [("definitions", name) for name in schema.get("definitions", ())] + [
            ("$defs", name) for name in schema.get("$defs", ())
        ]
        for place, name in places if len(json.dumps(schema)) < 300_000 else ():
            pointer = name.replace("~", "~0").replace("/", "~1")
            rest = {key: schema[key] for key in ("$schema", "$id", place) if key in schema}
            cases.append(Case(f"{path.name}: {name}", {"allOf": [{"$ref": f"#/{place}/{pointer}"}], **rest}))
    return cases


CASES = {**{part: functools.partial(suite, part) for part in PARTS}, "real life": real_life}


@pytest.fixture(scope="module")
def compiled() -> Iterator[Callable[[str], list[tuple[Case, CompiledGrammar | str]]]]:
    """Of a part, each case with its grammar or why there is none. Tried in this process, which is quicker for 1,300 schemas."""
    with pytest.MonkeyPatch.context() as patch:
        vocabulary = Vocabulary(
            TOKENS.tokens, special_ids=TOKENS.special_ids, eos_token_ids=TOKENS.eos_token_ids, encode=TOKENS.encode
        )
        tokenizer = tokenizer_of(vocabulary)

        def here(trials: Trials, source: str, limit_s: float) -> Outcome:
            error = error_of(matcher_of(tokenizer, source), vocabulary)
            return Outcome(End.BAD if error else End.GOOD, error)

        patch.setattr(Trials, "attempt", here)
        build = compiler.Compiler(TOKENS)

        @functools.cache
        def compile_all(part: str) -> list[tuple[Case, CompiledGrammar | str]]:
            return [(case, attempted(build, case.schema)) for case in CASES[part]()]

        yield compile_all


def attempted(build: compiler.Compiler, schema: dict | bool) -> CompiledGrammar | str:
    try:
        return build.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema)))
    except RequestError as error:
        return str(error)


def allowed(state: GrammarState) -> np.ndarray:
    """Token ids."""
    row = np.zeros(-(-TOKENS.vocab_size // 32), dtype=np.int32)
    state.fill_mask(row)
    return np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0]


def compact(document: object) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """To the end."""
    state = grammar.start()
    return all(state.accept(1 + byte) for byte in text.encode()) and bool(state.is_finished or EOS in allowed(state))


def walk(grammar: CompiledGrammar, seed: int, *, patience: int = 40, most: int = 1000) -> bytes | None:
    """What chance writes under the masks: anything at first, later what closes strings, lists and objects. None: without end."""
    state, chance, written = grammar.start(), np.random.default_rng(seed), b""
    closing = [1 + ord(char) for char in '"]}']
    for step in range(most):
        choice = allowed(state)
        assert choice.size, f"nothing may follow {written!r}"
        if EOS in choice and (step > patience or choice.size == 1 or chance.random() < 0.3):
            return written
        choice = choice[choice != EOS]
        ends = [token for token in closing if token in choice]
        hurry = step > patience and ends and (ends[0] == closing[0] or chance.random() < 0.5)
        token = ends[0] if hurry else int(chance.choice(choice))
        assert state.accept(token)
        written += TOKENS.tokens[token]
        if state.is_finished:
            return written
    return None


@pytest.mark.parametrize("part", CASES)
def test_what_chance_writes_under_the_masks_validates(compiled, part: str) -> None:
    found = [(case, grammar) for case, grammar in compiled(part) if not isinstance(grammar, str)]
    assert len(found) >= LEAST_COMPILED[part], f"of {len(compiled(part))}"
    endless = []
    for case, grammar in found:
        validator = jsonschema.validators.validator_for(case.schema, default=jsonschema.Draft202012Validator)
        checked = validator(case.schema, format_checker=validator.FORMAT_CHECKER)
        for seed in range((2 if part == "real life" else 4) // (1 if EVERYTHING else 2)):
            text = walk(grammar, seed)
            if text is None:
                endless.append(case.name)
            else:
                checked.validate(json.loads(text))
    assert len(endless) <= 0.04 * len(found), endless  # where a pattern asks for a word that chance does not find


@pytest.mark.parametrize("part", PARTS)
def test_an_invalid_document_is_never_written_to_its_end(compiled, part: str) -> None:
    num_tests = 0
    for case, grammar in compiled(part):
        for test in () if isinstance(grammar, str) else case.tests:
            text = compact(test["data"])
            if not test["valid"] and not (part == "formats" and LEAPS.search(text)):
                num_tests += 1
                assert not accepts(grammar, text), (case.name, test["description"], text)
    assert num_tests >= {"draft 2020-12": 237, "draft 7": 235, "formats": 122}[part]


@pytest.mark.parametrize("part", PARTS)
def test_a_valid_document_can_be_written_unless_it_is_spelt_unusually(compiled, part: str) -> None:
    accepted, refused = 0, Counter[str]()
    for case, grammar in compiled(part):
        for test in () if isinstance(grammar, str) else case.tests:
            if not test["valid"]:
                continue
            if accepts(grammar, compact(test["data"])):
                accepted += 1
            else:
                refused[unusual(grammar, case, test["data"])] += 1
    expected = {
        "draft 2020-12": {"a text without its format": 10, "a whole number with a point": 9, "properties in another order": 3},
        "draft 7": {"a whole number with a point": 9, "properties in another order": 3, "keywords beside $ref count": 1},
        "formats": {"an address in brackets, quotes or with dots": 8},
    }[part]
    assert refused <= Counter(expected)
    assert accepted >= {"draft 2020-12": 321, "draft 7": 294, "formats": 154}[part]


def unusual(grammar: CompiledGrammar, case: Case, data: object) -> str:
    """Why a valid document cannot be written."""
    if case.name.startswith("format: "):
        return "a text without its format"
    if case.name.startswith(("email", "ipv6")):
        return "an address in brackets, quotes or with dots"
    if "$ref" in case.name or case.name == "ref: ref overrides any sibling keywords":
        return "keywords beside $ref count"
    if re.search(r"\d\.0\b", json.dumps(data)):
        return "a whole number with a point"
    orders = itertools.permutations(data.items()) if isinstance(data, dict) else ()
    assert any(accepts(grammar, compact(dict(order))) for order in orders), (case.name, data)
    return "properties in another order"


def refused_keywords(why: str) -> list[str]:
    """What a refusal names, as the README lists it."""
    if found := re.search(r"Unimplemented keys: (\[.*?\])", why):
        return json.loads(found[1])
    patterns = {
        "oneOf": "oneOf constraints are not supported",
        "format": "Unknown format",
        "$ref to another document": "is not present in a registry",
        "nothing satisfies it": "Unsatisfiable|nothing satisfies",
        "a length or count written with a point": "Expected positive integer",
        "patternProperties": "are not disjoint",
        "multipleOf": "'multipleOf' has too many digits",
        "a schema that is no object": "no JSON object",
        "minProperties, maxProperties": "min/maxProperties only supported",
        "longer than 262,144 bytes": "at most 262,144",
        "$ref": "ircular references",
    }
    return [keyword for keyword, pattern in patterns.items() if re.search(pattern, why)]


def listed() -> dict[str, list[int]]:
    """The README's table: per keyword, how many schemas of each part are refused for it."""
    rows = re.findall(r"^\| `?(.+?)`? \|((?: *\d* *\|){4})$", (HERE.parent / "README.md").read_text(), re.MULTILINE)
    return {keyword: [int(cell.strip() or 0) for cell in cells.split("|")[:4]] for keyword, cells in rows}


@pytest.mark.parametrize("part", CASES)
def test_a_refusal_names_its_reason_and_the_readme_lists_it(compiled, part: str) -> None:
    counts = Counter[str]()
    for case, why in compiled(part):
        if isinstance(why, str):
            keywords = refused_keywords(why)
            assert keywords, (case.name, why)
            assert len(why) < 1_000
            counts.update(keywords)
    column = list(CASES).index(part)
    assert counts <= Counter({keyword: cells[column] for keyword, cells in listed().items()}), counts


TRIED = Trials.attempt


def test_a_trial_comes_to_the_same_conclusion(compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [*compiled("draft 2020-12")[::40], *compiled("real life")[::90]]
    assert {isinstance(grammar, str) for _, grammar in some} == {True, False}
    monkeypatch.setattr(Trials, "attempt", TRIED)
    build = compiler.Compiler(TOKENS)
    for case, grammar in some:
        assert isinstance(attempted(build, case.schema), str) == isinstance(grammar, str), case.name
