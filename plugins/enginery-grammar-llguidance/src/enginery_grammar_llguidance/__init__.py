"""Grammars of structured output, by llguidance."""

from enginery.api import GrammarSpec, hookimpl
from enginery_grammar_llguidance.spec import LLGUIDANCE


@hookimpl
def register_grammars() -> list[GrammarSpec]:
    """One compiler, of every kind."""
    return [LLGUIDANCE]
