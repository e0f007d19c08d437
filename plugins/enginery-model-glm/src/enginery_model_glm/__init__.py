"""GLM-4 (0414) and GLM-4.5."""

from enginery.api import DrafterSpec, ExpertNames, ModelSpec, hookimpl
from enginery_model_glm.spec import MTP, build, describe, ignored_weights


@hookimpl
def register_models() -> list[ModelSpec]:
    """GLM-4.5 has a layer behind the last that only a drafter asks for."""
    return [
        ModelSpec(name="glm4", api=(2, 0), architectures=("Glm4ForCausalLM",), describe=describe, build=build, lanes=True),
        ModelSpec(
            name="glm4-moe",
            api=(2, 0),
            architectures=("Glm4MoeForCausalLM",),
            describe=describe,
            build=build,
            lanes=True,
            ignored_weights=ignored_weights,
            stacked_weights=ExpertNames().stacked,
        ),
    ]


@hookimpl
def register_drafters() -> list[DrafterSpec]:
    """The layer behind the last, in checkpoints that have it."""
    return [MTP]
