"""DeepSeek-V2, the layers without experts."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_deepseek.spec import build, describe


@hookimpl
def register_models() -> list[ModelSpec]:
    """The Lite shape, whose queries have full rank, and the full one are the same family."""
    return [
        ModelSpec(
            name="deepseek-v2",
            api=(1, 0),
            architectures=("DeepseekV2ForCausalLM",),
            describe=describe,
            build=build,
            ignored_weights=("*.rotary_emb.inv_freq",),
        )
    ]
