"""Kimi-Linear."""

from enginery.api import ModelSpec, hookimpl
from enginery_model_kimi.spec import NAMES, build, describe

PROJECTIONS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
# transformers stores the dense layers' MLP so
MISNAMED = {f".block_sparse_moe.{name}": (f".mlp.{name}",) for name in PROJECTIONS}
# As transformers has them in memory, where the convolutions of q, k and v are one
OWN_NAMES = {f".mlp.shared_experts.{name}": (f".{NAMES.block}.shared_experts.{name}",) for name in PROJECTIONS} | {
    f".self_attn.forget_gate.{name}": (f".self_attn.{name}",) for name in ("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias")
}


@hookimpl
def register_models() -> list[ModelSpec]:
    """Most layers are recurrent, the others have latents."""
    return [
        ModelSpec(
            name="kimi-linear",
            api=(2, 0),
            architectures=("KimiLinearForCausalLM",),
            describe=describe,
            build=build,
            lanes=True,
            stacked_weights=NAMES.stacked | MISNAMED | OWN_NAMES,
        )
    ]
