"""The checkpoint that is served when no model is named."""

from pathlib import Path

from enginery.api import CheckpointSpec, hookimpl

HERE = Path(__file__).parent
FOLDER = HERE / "checkpoint"
DRAFTERS = {"eagle": HERE / "eagle", "standalone": HERE / "draft"}


@hookimpl
def register_checkpoints() -> list[CheckpointSpec]:
    """The tiny Llama, trained by `training/`."""
    note = "the embedded default: a tiny model for trying things out; name a larger one with -m MODEL"
    return [CheckpointSpec(name="enginery-tiny", api=(2, 0), priority=0, folder=FOLDER, note=note, drafters=DRAFTERS)]
