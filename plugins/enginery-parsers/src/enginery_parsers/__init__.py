"""Parsers of tool calls and of reasoning."""

from enginery.api import ParserSpec, hookimpl
from enginery_parsers.spec import PARSERS


@hookimpl
def register_parsers() -> list[ParserSpec]:
    """One for each format; README.md has the table."""
    return list(PARSERS)
