"""MiMo-V2-Flash."""

from enginery.api import ExpertNames, ModelSpec, hookimpl
from enginery_model_mimo.spec import build, describe

SINKS = {".self_attn.attention_sink_bias": (".self_attn.sinks",)}  # the hub's name, and ours


@hookimpl
def register_models() -> list[ModelSpec]:
    """One family."""
    return [
        ModelSpec(
            name="mimo-v2-flash",
            api=(2, 0),
            architectures=("MiMoV2FlashForCausalLM",),
            describe=describe,
            build=build,
            stacked_weights=ExpertNames().stacked | SINKS,
            ignored_weights=("model.mtp.*", "mtp.*"),
        )
    ]
