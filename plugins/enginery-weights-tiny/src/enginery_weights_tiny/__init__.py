"""The checkpoint that is served when no model is named."""

from pathlib import Path

from enginery.api import CheckpointSpec, hookimpl

FOLDER = Path(__file__).parent / "checkpoint"


@hookimpl
def register_checkpoints() -> list[CheckpointSpec]:
    """The tiny Llama: trained, if its weights are in the folder; a smaller one of random parameters until then."""
    trained = (FOLDER / "model.safetensors").exists()
    note = (
        "the embedded default: a tiny model for trying things out; name a larger one with -m MODEL"
        if trained
        else "the embedded default: its weights are random and its answers noise; name a model to get sense"
    )
    return [CheckpointSpec(name="enginery-tiny", api=(1, 0), priority=0, folder=FOLDER, note=note, random_weights=not trained)]
