"""What it compiles."""

from __future__ import annotations

from enginery.api import GrammarCompiler, GrammarKind, GrammarNeeds, GrammarSpec, GrammarTokens, Reason


def _refuse(needs: GrammarNeeds) -> list[Reason]:
    if not needs.num_eos:
        return [Reason(rule="eos", text="the checkpoint names no end-of-sequence token, by which an answer could end")]
    return []


def _load(tokens: GrammarTokens) -> GrammarCompiler:
    from enginery_grammar_llguidance.compiler import Compiler

    return Compiler(tokens)


LLGUIDANCE = GrammarSpec(
    name="llguidance",
    api=(2, 1),
    priority=50,
    summary="JSON schemas, patterns, Lark grammars and choices (llguidance)",
    kinds=frozenset(GrammarKind),
    refuse=_refuse,
    load=_load,
)
