"""What it reads: experts in MXFP4 (arXiv:2310.10537), two values of E2M1 to a byte and a power of two for each 32."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Final

from enginery.api import FormatNeeds, Reason, Scheme, WeightFormat, WeightFormatSpec

BLOCK: Final = 32
BLOCKS: Final = Scheme(values="mxfp4", block=(1, BLOCK))


def _refuse(needs: FormatNeeds) -> list[Reason]:
    return []


def _reads(config: Mapping[str, object], module: str) -> Scheme | None:
    """The experts alone, as transformers does, but for those that `modules_to_not_convert` names or has a pattern for."""
    listed = config.get("modules_to_not_convert")
    ignored = tuple(map(str, listed)) if isinstance(listed, list) else ()
    is_ignored = any(fnmatch(module, name) or fnmatch(module, f"{name}.*") for name in ignored)
    return BLOCKS if ".experts." in module and not is_ignored else None


def _load() -> WeightFormat:
    from enginery_format_mxfp4.packed import MicroscaledFloat4

    return MicroscaledFloat4()


MXFP4: Final = WeightFormatSpec(
    name="mxfp4",
    api=(2, 0),
    priority=0,
    summary="quant_method 'mxfp4', experts in blocks of 32",
    methods=("mxfp4",),
    reads=_reads,
    refuse=_refuse,
    load=_load,
)
