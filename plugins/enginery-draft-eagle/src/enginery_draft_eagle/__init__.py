"""EAGLE and EAGLE-3 heads (arXiv:2401.15077, arXiv:2503.01840) as drafters."""

from enginery.api import DrafterSpec, hookimpl
from enginery_draft_eagle.spec.eagle import EAGLE
from enginery_draft_eagle.spec.eagle3 import EAGLE3


@hookimpl
def register_drafters() -> list[DrafterSpec]:
    """For targets of the Llama and Qwen kind."""
    return [EAGLE, EAGLE3]
