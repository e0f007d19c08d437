"""MXFP4 checkpoints."""

from enginery.api import WeightFormatSpec, hookimpl
from enginery_format_mxfp4.spec import MXFP4


@hookimpl
def register_weight_formats() -> list[WeightFormatSpec]:
    """One."""
    return [MXFP4]
