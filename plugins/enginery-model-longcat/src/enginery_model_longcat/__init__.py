"""LongCat-Flash."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_longcat.spec import NAMES, build, describe

# transformers gives zero experts a gate and an up that it never uses, and stores them; in float8 they have scales. They have no
# down, so a real expert that config.json does not count is found by its own.
UNUSED = tuple(f"model.layers.*.mlp.experts.*.{name}_proj.weight*" for name in ("gate", "up"))


@hookimpl
def register_models() -> list[ModelSpec]:
    """The layer `model.mtp` predicts a second token: nobody asks for its weights."""
    return [
        ModelSpec(
            name="longcat-flash",
            api=(2, 0),
            architectures=("LongcatFlashForCausalLM",),
            describe=describe,
            build=build,
            lanes=True,
            ignored_weights=("model.mtp.*", *UNUSED),
            stacked_weights=NAMES.stacked,
        )
    ]
