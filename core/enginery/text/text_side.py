"""All that a checkpoint says about text: its tokenizer, its chat template, the sampling its authors recommend, its pooling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from enginery.checkpoint.folder import read_json
from enginery.contracts.request import SamplingParams
from enginery.errors import CheckpointError, RequestError
from enginery.text.template import ChatTemplate
from enginery.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What a request gets for a field that it leaves out; None where the file says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_folder(cls, folder: Path | str) -> GenerationDefaults:
        """Read generation_config.json of a folder. Raises `CheckpointError` for what no request could use."""
        path = Path(folder) / "generation_config.json"
        try:
            found = msgspec.convert(read_json(path), type=cls)
            SamplingParams(**found.given())
            return found
        except (msgspec.ValidationError, RequestError) as error:
            raise CheckpointError(f"{path}: {error}; correct it, or start with --generation-config none") from error

    def given(self) -> dict[str, Any]:
        """The fields that the file has."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class TextSide:
    """Owns the template's process; close the template when done.

    pooling: what an embedding is made of, as sentence-transformers names it: `lasttoken`, `mean_tokens`; None: no file says it.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults
    pooling: str | None = None

    def check_pooling(self) -> None:
        """Raises `RequestError` for a checkpoint whose embeddings are not the hidden state of the last token."""
        if self.pooling not in (None, "lasttoken"):
            asks = f"1_Pooling/config.json of this checkpoint asks for {self.pooling}"
            raise RequestError(f"{asks}, but only the last token's hidden state is given", param="model")

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        tokenizer_folder: Path | str | None = None,
        chat_template: str | None = None,
        use_generation_config: bool = True,
    ) -> TextSide:
        """Read it. tokenizer_folder: has the tokenizer and its template, if not the folder itself. chat_template: a file instead.

        Raises `CheckpointError`, and `ConfigError` for that file.
        """
        source = tokenizer_folder or folder
        tokenizer = Tokenizer.from_folder(source)
        defaults = GenerationDefaults.from_folder(folder) if use_generation_config else GenerationDefaults()
        template = ChatTemplate.from_folder(source, tokenizer, file=chat_template)
        modes = read_json(Path(folder) / "1_Pooling" / "config.json")
        on = [name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True]
        pooling = on[0].removeprefix("pooling_mode_") if on else None
        return cls(tokenizer=tokenizer, template=template, defaults=defaults, pooling=pooling)
