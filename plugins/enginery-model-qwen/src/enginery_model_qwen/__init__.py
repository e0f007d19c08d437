"""Qwen2 and Qwen3, dense and with experts, and Qwen3-Next, most of whose layers are recurrent."""

from enginery.api import ExpertNames, ModelSpec, hookimpl
from enginery_model_qwen.spec import build, describe

FAMILIES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen2-moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
}


@hookimpl
def register_models() -> list[ModelSpec]:
    """One decoder; `shape` says in what the families differ."""
    return [
        ModelSpec(
            name=name,
            api=(2, 0),
            architectures=(architecture,),
            describe=describe,
            build=build,
            stacked_weights=ExpertNames().stacked,
            ignored_weights=("mtp.*",) if name == "qwen3-next" else (),
        )
        for name, architecture in FAMILIES.items()
    ]
