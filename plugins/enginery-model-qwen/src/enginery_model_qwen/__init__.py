"""Qwen2 and Qwen3, dense."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_qwen.spec import build, describe


@hookimpl
def register_models() -> list[ModelSpec]:
    """Qwen2 has biases on q, k and v; Qwen3 has a norm on each head of q and k instead."""
    return [
        ModelSpec(name="qwen2", api=(1, 0), architectures=("Qwen2ForCausalLM",), describe=describe, build=build),
        ModelSpec(name="qwen3", api=(1, 0), architectures=("Qwen3ForCausalLM",), describe=describe, build=build),
    ]
