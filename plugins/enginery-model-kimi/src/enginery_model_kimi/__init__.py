"""Kimi-Linear."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_kimi.spec import NAMES, build, describe

# transformers stores the dense layers' MLP so
MISNAMED = {f".block_sparse_moe.{name}_proj.weight": (f".mlp.{name}_proj.weight",) for name in ("gate", "up", "down")}


@hookimpl
def register_models() -> list[ModelSpec]:
    """Most layers are recurrent, the others have latents."""
    return [
        ModelSpec(
            name="kimi-linear",
            api=(2, 0),
            architectures=("KimiLinearForCausalLM",),
            describe=describe,
            build=build,
            lanes=True,
            stacked_weights=NAMES.stacked | MISNAMED,
        )
    ]
