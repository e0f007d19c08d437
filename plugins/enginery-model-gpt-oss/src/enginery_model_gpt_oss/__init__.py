"""gpt-oss."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_gpt_oss.spec import STACKED, build, describe


@hookimpl
def register_models() -> list[ModelSpec]:
    """One family, plain and in MXFP4."""
    return [
        ModelSpec(
            name="gpt-oss",
            api=(2, 0),
            architectures=("GptOssForCausalLM",),
            describe=describe,
            build=build,
            lanes=True,
            stacked_weights=STACKED,
        )
    ]
