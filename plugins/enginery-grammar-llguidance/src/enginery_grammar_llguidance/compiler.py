"""Grammars by llguidance: a lexer of derivatives and an Earley parser, which say at each position which tokens may come.

A step costs no more than the library's limits allow. What it does before that is not bounded, so each grammar is tried first, in a
process that can be killed (`trial`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from enginery.api import Grammar, GrammarKind, GrammarTokens, RequestError
from enginery_grammar_llguidance.trial import LIMITS, attempt, error_of

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHOICES: Final = 10_000
# JSON as models write it, on one line or indented. Without a bound, a model may write spaces until it is cut off. Overrides come
# last, so a schema's own `x-guidance` cannot make the compiler drop the keywords it does not know.
_JSON: Final[JsonCompileOptions] = {"whitespace_pattern": r"[ ]|\n[ ]{0,40}", "lenient": False}


class Compiler:
    """Compiles for one vocabulary. Threads may share it."""

    def __init__(self, tokens: GrammarTokens) -> None:
        ends = sorted(tokens.eos_token_ids)
        self._tokenizer = LLTokenizer(TokenizerWrapper(Vocabulary(tokens)), n_vocab=tokens.vocab_size, eos_token=ends)

    def compile(self, grammar: Grammar) -> Compiled:
        """Raises `RequestError` that says what is wrong, also where nothing satisfies the grammar or its beginning is too wide."""
        source = _SOURCES[grammar.kind](grammar.source)
        error = attempt(source)
        if not error:
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
            error = error_of(matcher)
        if error:
            raise RequestError(f"the {grammar.kind} cannot be used: {_short(error)}", param="grammar")
        return Compiled(matcher)


class Compiled:
    """A grammar, at its beginning."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> State:
        """A copy, which shares what does not change."""
        return State(self._matcher.deep_copy())


class State:
    """How far one answer has come."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill_mask(self, row: np.ndarray) -> None:
        """Raises `RequestError` when a limit is exceeded here."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise RequestError(f"the answer's grammar cannot go on: {_short(self._matcher.get_error())}", param="grammar")

    def accept(self, token_id: int) -> bool:
        """Takes the end-of-sequence token too, where the grammar may end."""
        return self._matcher.consume_token(token_id)

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class Vocabulary:
    """What `TokenizerWrapper` reads. It has the texts that a grammar leaves no choice about spelt in tokens."""

    bos_token_id = None

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens.tokens
        self.special_token_ids = sorted(token for token in tokens.special_ids if token < tokens.vocab_size)
        self.eos_token_id = min(tokens.eos_token_ids)
        self._encode = tokens.encode
        self._special = tokens.special_ids | tokens.eos_token_ids
        self._id_of = {raw: token for token, raw in enumerate(tokens.tokens) if raw and token not in self._special}
        self._longest = max(map(len, self._id_of), default=1)

    def __call__(self, text: str) -> list[int]:
        """The model's own spelling, where that is exactly the text; else the longest tokens first."""
        wanted = text.encode()
        for anchor in ("", "\x02"):  # SentencePiece puts a space before the first character, whatever that is
            ids = self._encode(anchor + text)
            for begin in range(len(anchor) * 3 + 1):
                spelt = ids[begin:]
                if b"".join(self._bytes(token) for token in spelt) == wanted and self._special.isdisjoint(spelt):
                    return spelt
        return self._spell(wanted)

    def _bytes(self, token: int) -> bytes:
        return self.tokens[token] if token < len(self.tokens) else b"\xff"

    def _spell(self, wanted: bytes) -> list[int]:
        """As far as there are tokens for it."""
        ids, at = [], 0
        while at < len(wanted):
            sizes = range(min(self._longest, len(wanted) - at), 0, -1)
            size = next((size for size in sizes if wanted[at : at + size] in self._id_of), None)
            if size is None:
                break
            ids.append(self._id_of[wanted[at : at + size]])
            at += size
        return ids


def _json_schema(source: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(source, overrides=_JSON)
    except ValueError as error:
        raise RequestError(f"the JSON schema is no JSON object: {_short(str(error))}", param="grammar") from error


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
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, dict.fromkeys(choices))))


_SOURCES: Final[Mapping[GrammarKind, Callable[[str], str]]] = {
    GrammarKind.JSON_OBJECT: lambda source: _json_schema('{"type": "object"}'),
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
    GrammarKind.GRAMMAR: LLMatcher.grammar_from_lark,
    GrammarKind.CHOICE: _choice,
}


def _short(error: str) -> str:
    """Its first lines; the rest repeats the grammar."""
    if error.startswith("NoExtension"):
        return "nothing satisfies it"
    lines = [line[:200] for line in error.splitlines() if line.strip() and not line.startswith("<")]
    return " ".join(lines[:4])
