"""The checkpoint that is served when no model is named."""

from pathlib import Path

from enginery.api import CheckpointSpec, hookimpl


@hookimpl
def register_checkpoints() -> list[CheckpointSpec]:
    """A Llama of 0.2 million random parameters, until a trained one takes its place."""
    return [
        CheckpointSpec(
            name="enginery-tiny",
            api=(1, 0),
            priority=0,
            folder=Path(__file__).parent / "checkpoint",
            note="the embedded default: its weights are random and its answers noise; name a model to get sense",
            random_weights=True,
        )
    ]
