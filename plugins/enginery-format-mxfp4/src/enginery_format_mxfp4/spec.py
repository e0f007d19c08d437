"""What it reads: experts in MXFP4, two values of E2M1 to a byte and a power of two for each 32 (arXiv:2310.10537), as gpt-oss has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Final

from enginery.api import FormatNeeds, Reason, Scheme, StoredPart, StoredWeight, WeightFormat, WeightFormatSpec

if TYPE_CHECKING:
    import torch

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


class MicroscaledFloat4:
    """Implements `enginery.api.WeightFormat`. The files have what kernels take: nothing is converted."""

    def parts(self, scheme: Scheme) -> Sequence[StoredPart]:
        """Two values to a byte, the low half first, and the exponents of the scales that they are multiplied by, plus 127."""
        return (
            StoredPart(suffix="_blocks", dtype="U8", per_element=(1, 2)),
            StoredPart(suffix="_scales", dtype="U8", per_element=(1, BLOCK), role="scales"),
        )

    def unpack(self, parts: Mapping[str, torch.Tensor], scheme: Scheme) -> StoredWeight:
        """[N, C / 2] bytes as they are, [N, C / 32] bytes as E8M0."""
        import torch

        return StoredWeight(scheme=scheme, values=parts["_blocks"], scales=parts["_scales"].view(torch.float8_e8m0fnu))


def _load() -> WeightFormat:
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
