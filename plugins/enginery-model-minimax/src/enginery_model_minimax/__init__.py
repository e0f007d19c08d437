"""MiniMax-M2 and MiniMax-Text-01."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_minimax.spec import M2, M2_NAMES, TEXT, TEXT_NAMES, build, describe, ignored_by_m2

BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # which transformers stores beside the weights


@hookimpl
def register_models() -> list[ModelSpec]:
    """M2 has softmax attention in all layers; most layers of Text-01, and of M1, which is its successor, are recurrent."""
    return [
        ModelSpec(
            name="minimax-m2",
            api=(2, 0),
            architectures=(M2,),
            describe=describe,
            build=build,
            lanes=True,
            stacked_weights=M2_NAMES.stacked,
            ignored_weights=ignored_by_m2,
        ),
        ModelSpec(
            name="minimax-text",
            api=(2, 0),
            architectures=TEXT,
            describe=describe,
            build=build,
            lanes=True,
            stacked_weights=TEXT_NAMES.stacked,
            ignored_weights=tuple(f"*.self_attn.{name}" for name in BUFFERS),
        ),
    ]
