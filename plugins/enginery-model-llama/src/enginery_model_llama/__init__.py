"""Llama 2 and 3.x, Mistral, Mixtral, and those that differ in a detail: Phi 3 and 4-mini, SmolLM3, Granite 3."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_llama.spec import MIXTRAL_NAMES, build, describe

FAMILIES = {
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM", "MinistralForCausalLM"),
    "mixtral": ("MixtralForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
    "smollm3": ("SmolLM3ForCausalLM",),
    "granite": ("GraniteForCausalLM",),
}


@hookimpl
def register_models() -> list[ModelSpec]:
    """One decoder: Mistral adds a sliding window to every layer, Mixtral has experts, Phi 3 stores products in one piece, some
    layers of SmolLM3 have no positions, and Granite multiplies what is added and what is told."""
    return [
        ModelSpec(
            name=name,
            api=(2, 0),
            architectures=architectures,
            describe=describe,
            build=build,
            lanes=True,
            ignored_weights=("lm_head.weight",) if name == "smollm3" else (),  # tied where the file does not say
            stacked_weights=MIXTRAL_NAMES.stacked if name == "mixtral" else {},
        )
        for name, architectures in FAMILIES.items()
    ]
