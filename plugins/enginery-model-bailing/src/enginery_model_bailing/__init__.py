"""Ring-2.5."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_bailing.spec import STACKED, build, describe, ignored_weights


@hookimpl
def register_models() -> list[ModelSpec]:
    """Most layers are recurrent, the others have latents."""
    return [
        ModelSpec(
            name="ring-2.5",
            api=(2, 0),
            architectures=("BailingMoeV2_5ForCausalLM",),
            describe=describe,
            build=build,
            lanes=True,
            stacked_weights=STACKED,
            ignored_weights=ignored_weights,
        )
    ]
