"""The sampling that a checkpoint's authors recommend: generation_config.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from enginery.checkpoint.folder import read_json
from enginery.contracts.request import SamplingParams
from enginery.errors import CheckpointError, RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
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
