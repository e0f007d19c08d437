"""DeepSeek-V2 and V3, and GLM-4.7-Flash, which has V3's layers."""

from enginery.api import DrafterSpec, ExpertNames, ModelSpec, hookimpl
from enginery_model_deepseek.spec import MTP, build, describe, ignored_weights

FAMILIES = {
    "deepseek-v2": "DeepseekV2ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "glm4-moe-lite": "Glm4MoeLiteForCausalLM",
}


@hookimpl
def register_models() -> list[ModelSpec]:
    """V3 and Flash have another router, and a layer behind the last that only a drafter asks for."""
    return [
        ModelSpec(
            name=name,
            api=(2, 0),
            architectures=(architecture,),
            describe=describe,
            build=build,
            lanes=True,
            ignored_weights=ignored_weights,
            stacked_weights=ExpertNames().stacked,
        )
        for name, architecture in FAMILIES.items()
    ]


@hookimpl
def register_drafters() -> list[DrafterSpec]:
    """The layer behind the last, in checkpoints that have it."""
    return [MTP]
