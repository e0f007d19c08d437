"""Grammars by llguidance: a lexer of derivatives and an Earley parser, which say at each position which tokens may come.

A step costs no more than the library's limits allow. What it does before that is not bounded, so each grammar is tried first, in a
process that can be killed (`trial`): for a moment, and if that is not enough, for longer when its turn has come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np
from llguidance import LLMatcher

from enginery.api import Grammar, GrammarKind, GrammarTokens, Overloaded, RequestError, UnfinishedGrammar
from enginery_grammar_llguidance.matching import matcher_of, tokenizer_of
from enginery_grammar_llguidance.trial import End, Trials
from enginery_grammar_llguidance.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHOICES: Final = 10_000
MOMENT_S: Final = 0.25  # of processor time; what people write takes a twentieth of it at the most
TRIAL_S: Final = 2.0
# JSON as models write it, on one line or indented. Without a bound, a model may write spaces until it is cut off. Overrides come
# last, so a schema's own `x-guidance` cannot make the compiler drop the keywords it does not know.
_JSON: Final[JsonCompileOptions] = {"whitespace_pattern": r"[ ]|\n[ ]{0,40}", "lenient": False}
_FORMAT: Final = re.compile(r'"format"\s*:\s*"([^"]*)"')
_BEYOND_AUTOMATA: Final = re.compile(r"\(\?<?[=!]|\\[1-9]")  # looking around, and what a group has matched
_SCHEMA_IN_LARK: Final = re.compile(r"%json\s*(?=\{)")
_STANDARD_FORMATS: Final = {  # JSON Schema 2020-12, validation, section 7.3
    *("date-time", "date", "time", "duration"),
    *("email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
    *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
}
_BACKSLASH_AT_END: Final = '\\\\"'  # of a text in JSON
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by names of any kind
_VALUES: Final = ("const", "enum", "default", "examples")  # no schemas


class Compiler:
    """Compiles for one vocabulary. Threads may share it."""

    def __init__(self, tokens: GrammarTokens) -> None:
        vocabulary = Vocabulary(
            tokens.tokens, special_ids=tokens.special_ids, eos_token_ids=tokens.eos_token_ids, encode=tokens.encode
        )
        self._trials = Trials(vocabulary)  # whose process takes the vocabulary in meanwhile
        self._tokenizer, self._ends = tokenizer_of(vocabulary), tokens.eos_token_ids

    def compile(self, grammar: Grammar) -> Compiled | UnfinishedGrammar:
        """Raises `RequestError` that says what is wrong, also where nothing satisfies the grammar or its beginning is too wide."""
        source = _json_schema(grammar.source, is_lenient=True) if grammar.lenient else _SOURCES[grammar.kind](grammar.source)

        def finish() -> Compiled:
            end = self._try(grammar.kind, source, TRIAL_S)
            if end is End.TOO_LONG:
                raise _unusable(grammar.kind, f"it takes more than {TRIAL_S:g} s to compile; make it simpler")
            if end is End.LATE:
                raise Overloaded(f"the machine is too busy to compile the {grammar.kind}; try again", param="grammar")
            return self._compiled(grammar.kind, source)

        if self._try(grammar.kind, source, MOMENT_S) is not End.GOOD:
            return UnfinishedGrammar(finish=finish)
        return self._compiled(grammar.kind, source)

    def _try(self, kind: GrammarKind, source: str, limit_s: float) -> End:
        """Raises `RequestError` for a grammar that is bad, or too large for any limit of time."""
        outcome = self._trials.attempt(source, limit_s)
        if outcome.end is End.TOO_LARGE:
            raise _unusable(kind, "it needs more memory or stack to compile than it may have")
        if outcome.end is End.BAD:
            raise _unusable(kind, _short(outcome.error))
        return outcome.end

    def _compiled(self, kind: GrammarKind, source: str) -> Compiled:
        matcher = matcher_of(self._tokenizer, source)
        if matcher.is_error():
            raise _unusable(kind, _short(matcher.get_error()))
        return Compiled(matcher, self._ends)


class Compiled:
    """A grammar, at its beginning."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher, self._ends = matcher, ends

    def start(self) -> State:
        """A copy, which shares what does not change."""
        return State(self._matcher, self._ends)


class State:
    """How far one answer has come. beginning: of its grammar; not changed. ends: tokens that end answers."""

    def __init__(self, beginning: LLMatcher, ends: frozenset[int]) -> None:
        self._beginning, self._ends = beginning, ends
        self._matcher = beginning.deep_copy()
        self._taken: list[int] = []

    def fill_mask(self, row: np.ndarray) -> None:
        """Raises `RequestError` when a limit is exceeded here."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise RequestError(f"the answer's grammar cannot go on: {_short(self._matcher.get_error())}", param="grammar")

    def accept(self, token_id: int) -> bool:
        """Takes the end-of-sequence token too, where the grammar may end."""
        is_taken = self._matcher.consume_token(token_id)
        if is_taken:
            self._taken.append(token_id)
        return is_taken

    def rollback(self, count: int) -> None:
        """A matcher does not go back behind an error, nor rightly behind a token that ends answers where it is text, so then the
        answer is read again.

        Raises `RequestError` if that fails. Lexer states that were made stay made: their limit is one for all answers to a grammar.
        """
        kept = len(self._taken) - count
        has_ended = not self._ends.isdisjoint(self._taken[kept:])
        del self._taken[kept:]
        if has_ended or self._matcher.is_error():
            self._matcher = self._beginning.deep_copy()
            self._matcher.consume_tokens(self._taken)
        elif count:
            self._matcher.rollback(count)
        if self._matcher.is_error():
            raise RequestError(f"the answer's grammar cannot go back: {_short(self._matcher.get_error())}", param="grammar")

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _json_schema(source: str, *, is_lenient: bool = False) -> str:
    plain, overrides = _without_remarks(source, is_lenient=is_lenient), _JSON | {"lenient": is_lenient}
    try:
        return LLMatcher.grammar_from_json_schema(plain, overrides=overrides)
    except ValueError as error:
        what = "nested too deeply; put what repeats into $defs" if "recursion limit" in str(error) else "no JSON object"
        raise RequestError(f"the JSON schema is {what}: {_short(str(error))}", param="grammar") from error


def _without_remarks(source: str, *, is_lenient: bool = False) -> str:
    """The schema without formats that no standard defines. Pydantic and OpenAPI write `path`, `password`, `binary` as remarks.

    A lenient one is also without patterns that no automaton matches, and without references to other documents: the library leaves
    out only keywords that it does not know.
    """
    if _BACKSLASH_AT_END in source:
        with suppress(ValueError, RecursionError):
            _plain(json.loads(source), _is_cut)
    if not is_lenient and set(_FORMAT.findall(source)) <= _STANDARD_FORMATS:
        return source
    with suppress(ValueError, RecursionError):  # what is wrong with it is told by the library
        return json.dumps(_plain(json.loads(source), _is_unknown if is_lenient else _is_remark), allow_nan=False)
    return source


def _plain(schema: object, is_left_out: Callable[[str, object], bool]) -> object:
    """is_left_out: of a keyword and its value."""
    if isinstance(schema, list):
        return [_plain(each, is_left_out) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, object] = {}
    for key, below in schema.items():
        if key in _NAMED and isinstance(below, dict):
            names = [name for name in below if key != "patternProperties" or not is_left_out("pattern", name)]
            kept[key] = {name: _plain(below[name], is_left_out) for name in names}
        elif not is_left_out(key, below):
            kept[key] = below if key in _VALUES else _plain(below, is_left_out)
    return kept


def _is_remark(key: str, value: object) -> bool:
    return key == "format" and isinstance(value, str) and value not in _STANDARD_FORMATS


def _is_unknown(key: str, value: object) -> bool:
    if key == "pattern":
        return isinstance(value, str) and bool(_BEYOND_AUTOMATA.search(value))
    return _is_remark(key, value) or (key == "$ref" and isinstance(value, str) and not value.startswith("#"))


def _is_cut(key: str, value: object) -> bool:
    """Raises `RequestError` for a pattern that cannot be one; nothing is left out."""
    if key == "pattern" and isinstance(value, str):
        _whole_regex(value)
    return False


def _whole_regex(source: str) -> str:
    """Raises `RequestError` for a backslash at its end, which the library would leave out."""
    if (len(source) - len(source.rstrip("\\"))) % 2:
        raise _unusable(
            GrammarKind.REGEX, f"{source[-200:]!r} ends with a backslash that nothing follows; double it, or leave it out"
        )
    return source


def _lark(source: str) -> str:
    """With the schemas in it as `_without_remarks` has them, such as those of tools' arguments."""
    parts, place = [], 0
    for found in _SCHEMA_IN_LARK.finditer(source):
        if found.start() < place:
            continue  # within another's text
        with suppress(ValueError, RecursionError):
            schema, end = json.JSONDecoder().raw_decode(source, found.end())
            guidance = schema.get("x-guidance")
            is_lenient = isinstance(guidance, dict) and guidance.get("lenient") is True
            parts += [source[place : found.end()], _without_remarks(source[found.end() : end], is_lenient=is_lenient)]
            place = end
    return LLMatcher.grammar_from_lark("".join(parts) + source[place:])


def _choice(source: str) -> str:
    try:
        choices = json.loads(source)
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise RequestError("the choices must be a list of at least one text", param="grammar")
        "".join(choices).encode()  # half a surrogate pair can be written in JSON, but is no text
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the choices are no JSON list of texts: {_short(str(error))}", param="grammar") from error
    if len(choices) > MAX_CHOICES:
        raise RequestError(f"there are {len(choices):,} choices, but at most {MAX_CHOICES:,} are compiled", param="grammar")
    # one terminal, not a rule: a rule of many that begin alike is too wide for the parser
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, dict.fromkeys(choices))))


_SOURCES: Final[Mapping[GrammarKind, Callable[[str], str]]] = {
    GrammarKind.JSON_OBJECT: lambda source: _json_schema('{"type": "object"}'),
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: lambda source: LLMatcher.grammar_from_regex(_whole_regex(source)),
    GrammarKind.GRAMMAR: _lark,
    GrammarKind.CHOICE: _choice,
}


def _unusable(kind: GrammarKind, why: str) -> RequestError:
    return RequestError(f"the {kind} cannot be used: {why}", param="grammar")


def _short(error: str) -> str:
    """Its first lines; the rest repeats the grammar."""
    if error.startswith("NoExtension"):
        return "nothing satisfies it"
    lines = [line[:200] for line in error.splitlines() if line.strip() and not line.startswith("<")]
    return " ".join(lines[:4])
