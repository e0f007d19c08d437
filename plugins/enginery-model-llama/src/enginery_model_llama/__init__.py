"""Llama 2 and 3.x, Mistral, Mixtral."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_llama.spec import MIXTRAL_NAMES, build, describe

FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}


@hookimpl
def register_models() -> list[ModelSpec]:
    """One decoder: Mistral adds a sliding window to every layer, Mixtral has experts."""
    return [
        ModelSpec(
            name=name,
            api=(2, 0),
            architectures=(architecture,),
            describe=describe,
            build=build,
            lanes=True,
            ignored_weights=("*.rotary_emb.inv_freq",),
            stacked_weights=MIXTRAL_NAMES.stacked if name == "mixtral" else {},
        )
        for name, architecture in FAMILIES.items()
    ]
