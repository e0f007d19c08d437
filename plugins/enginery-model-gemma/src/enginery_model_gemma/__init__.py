"""Gemma 1, 2 and 3 (text)."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_gemma.spec import build, describe

FAMILIES = {
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
}
# Of the model for images, in both layouts, and the head, which programs for training store beside the embedding that it is.
IGNORED = (
    *("vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*"),
    "lm_head.weight",
)


@hookimpl
def register_models() -> list[ModelSpec]:
    """One decoder: Gemma 3 has norms of heads and a rotary table for each kind of layer, Gemma 2 soft caps."""
    return [
        ModelSpec(
            name=name,
            api=(2, 0),
            architectures=architectures,
            describe=describe,
            build=build,
            ignored_weights=IGNORED,
            stacked_weights={"language_model.lm_head.weight": ("lm_head.weight",)},
            lanes=True,
        )
        for name, architectures in FAMILIES.items()
    ]
