"""Llama 2 and 3.x, Mistral."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_llama.spec import build, describe


@hookimpl
def register_models() -> list[ModelSpec]:
    """Two families, one decoder: Mistral adds a sliding window to every layer."""
    ignored = ("*.rotary_emb.inv_freq",)
    return [
        ModelSpec(
            name="llama",
            api=(1, 0),
            architectures=("LlamaForCausalLM",),
            describe=describe,
            build=build,
            ignored_weights=ignored,
        ),
        ModelSpec(
            name="mistral",
            api=(1, 0),
            architectures=("MistralForCausalLM",),
            describe=describe,
            build=build,
            ignored_weights=ignored,
        ),
    ]
