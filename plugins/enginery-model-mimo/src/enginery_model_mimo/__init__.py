"""MiMo-V2-Flash."""

from enginery.api import DrafterSpec, ExpertNames, ModelSpec, hookimpl
from enginery_model_mimo.spec import MTP, SINKS, build, describe


@hookimpl
def register_models() -> list[ModelSpec]:
    """One family. Only a drafter asks for the layers of `model.mtp`."""
    return [
        ModelSpec(
            name="mimo-v2-flash",
            api=(2, 0),
            architectures=("MiMoV2FlashForCausalLM",),
            describe=describe,
            build=build,
            lanes=True,
            stacked_weights=ExpertNames().stacked | SINKS,
            ignored_weights=("model.mtp.*", "mtp.*"),
        )
    ]


@hookimpl
def register_drafters() -> list[DrafterSpec]:
    """The layers of `model.mtp`, in checkpoints that have them."""
    return [MTP]
