"""How its tensors become weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from enginery.api import Scheme, StoredPart, StoredWeight
from enginery_format_mxfp4.spec import BLOCK


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
        return StoredWeight(scheme=scheme, values=parts["_blocks"], scales=parts["_scales"].view(torch.float8_e8m0fnu))
