"""All that a checkpoint says about text: its tokenizer, its chat template, and the sampling its authors recommend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from enginery.text.generation_defaults import GenerationDefaults
from enginery.text.template import ChatTemplate
from enginery.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class TextSide:
    """Owns the template's process; close the template when done."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults

    @classmethod
    def load(cls, folder: Path | str, *, use_generation_config: bool = True) -> TextSide:
        """Read it. Raises `CheckpointError`."""
        tokenizer = Tokenizer.from_folder(folder)
        defaults = GenerationDefaults.from_folder(folder) if use_generation_config else GenerationDefaults()
        return cls(tokenizer=tokenizer, template=ChatTemplate.from_folder(folder, tokenizer), defaults=defaults)
