"""Ring-2.5 and Ling-3.0, which both call themselves `bailing_hybrid`."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_bailing.spec import ling, ring


@hookimpl
def register_models() -> list[ModelSpec]:
    """Most layers are recurrent, the others have latents."""
    return [
        ModelSpec(
            name="ring-2.5",
            api=(2, 0),
            architectures=("BailingMoeV2_5ForCausalLM",),
            describe=ring.describe,
            build=ring.build,
            lanes=True,
            stacked_weights=ring.STACKED,
            ignored_weights=ring.ignored_weights,
        ),
        ModelSpec(
            name="ling-3",
            api=(2, 0),
            architectures=("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"),
            describe=ling.describe,
            build=ling.build,
            lanes=True,
            stacked_weights=ling.STACKED,
            ignored_weights=ring.ignored_weights,
        ),
    ]
