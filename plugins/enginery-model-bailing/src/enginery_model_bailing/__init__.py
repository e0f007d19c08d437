"""Ling 1, Ling 2.0, Ring-2.5 and Ling-3.0."""

from enginery.api import DrafterSpec, ExpertNames, ModelSpec, hookimpl, next_layers
from enginery_model_bailing.spec import ling, ling3, ring


@hookimpl
def register_models() -> list[ModelSpec]:
    """Of Ring-2.5 and Ling-3.0 most layers are recurrent, the others have latents. Earlier Lings have keys and values in all."""
    return [
        ModelSpec(
            name="ling",
            api=(2, 0),
            architectures=("BailingMoeForCausalLM",),
            describe=ling.describe,
            build=ling.build,
            lanes=True,
            stacked_weights=ExpertNames().stacked,
        ),
        ModelSpec(
            name="ling-2",
            api=(2, 0),
            architectures=("BailingMoeV2ForCausalLM",),
            describe=ling.describe,
            build=ling.build,
            lanes=True,
            stacked_weights=ring.STACKED,
            ignored_weights=next_layers,
        ),
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
            describe=ling3.describe,
            build=ling3.build,
            lanes=True,
            stacked_weights=ling3.STACKED,
            ignored_weights=ring.ignored_weights,
        ),
    ]


@hookimpl
def register_drafters() -> list[DrafterSpec]:
    """The layer behind the last, in checkpoints of Ling 2.0 that have it."""
    return [ling.MTP]
