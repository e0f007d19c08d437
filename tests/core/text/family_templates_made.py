"""Chat templates in the manner of model families, each with the features of jinja that the family's own template uses."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("family_templates")


def template_of(family: str) -> str:
    """Without the newline that ends a file."""
    return (FOLDER / f"{family}.jinja").read_text(encoding="utf-8").removesuffix("\n")


NAMES = (
    "gemma",  # refuses roles that do not alternate
    "gpt-oss",
    "qwen3.5",  # of Nemotron 3 too
    "kimi",
    "minimax",
    "nemotron",
    "lfm2",
    "granite",  # of Bamba's kind too
    "ling",
    "jamba",
    "mimo",  # thinks only if it is asked to, and opens the reasoning itself
    "glm4.7-flash",  # closes reasoning that it does not open
    "longcat",
    "longcat-thinking",
    "falcon-h1",  # arguments come before the name
)
FAMILIES = {name: template_of(name) for name in NAMES}
MINIMAX_TEXT = template_of("minimax-text")  # takes no text as content
