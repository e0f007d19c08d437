"""Grammars over small vocabularies, compiled to their end, and what their masks allow."""

from __future__ import annotations

import functools
import random

import numpy as np

from enginery.api import Grammar, GrammarTokens, Overloaded, UnfinishedGrammar
from enginery_grammar_llguidance.compiler import Compiled, Compiler, State
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
