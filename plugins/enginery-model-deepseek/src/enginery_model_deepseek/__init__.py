"""DeepSeek-V2 and V3, and GLM-4.7-Flash, which has V3's layers."""

from enginery.api import ExpertNames, ModelSpec, hookimpl
from enginery_model_deepseek.spec import build, describe

FAMILIES = {
    "deepseek-v2": "DeepseekV2ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "glm4-moe-lite": "Glm4MoeLiteForCausalLM",
}
SECOND_TOKEN = {"glm4-moe-lite": "model.layers.47.*"}


@hookimpl
def register_models() -> list[ModelSpec]:
    """V3 and Flash have another router, and a layer behind the last for a second token: nobody asks for that one's weights."""
    return [
        ModelSpec(
            name=name,
            api=(2, 0),
            architectures=(architecture,),
            describe=describe,
            build=build,
            ignored_weights=("*.rotary_emb.inv_freq", SECOND_TOKEN.get(name, "model.layers.61.*")),
            stacked_weights=ExpertNames().stacked,
        )
        for name, architecture in FAMILIES.items()
    ]
