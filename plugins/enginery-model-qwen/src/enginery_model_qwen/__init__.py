"""Qwen2, Qwen3 and Qwen3.5, dense and with experts, and Qwen3-Next; most layers of the last two are recurrent."""

from enginery.api import DrafterSpec, ExpertNames, ModelSpec, hookimpl
from enginery_model_qwen.spec import DENSE_35, MOE_35, MTP, build, describe

FAMILIES = {
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen2-moe": ("Qwen2MoeForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3-moe": ("Qwen3MoeForCausalLM",),
    "qwen3-next": ("Qwen3NextForCausalLM",),
    "qwen3.5": DENSE_35,
    "qwen3.5-moe": MOE_35,
}
OF_35 = ("mtp.*", "model.visual.*", "lm_head.weight")  # a head that is asked for is not ignored: one of a tied model is
GATE = "*.mlp.shared_expert_gate.weight"  # asked for but beside a shared expert of size 0, which transformers gives one
IGNORED = {"qwen2-moe": (GATE,), "qwen3-next": ("mtp.*", GATE), "qwen3.5": OF_35, "qwen3.5-moe": (*OF_35, GATE)}


@hookimpl
def register_models() -> list[ModelSpec]:
    """One decoder; `shape` says in what the families differ."""
    return [
        ModelSpec(
            name=name,
            api=(2, 0),
            architectures=architectures,
            describe=describe,
            build=build,
            lanes=True,
            stacked_weights=ExpertNames().stacked,
            ignored_weights=IGNORED.get(name, ()),
        )
        for name, architectures in FAMILIES.items()
    ]


@hookimpl
def register_drafters() -> list[DrafterSpec]:
    """The module `mtp`, in checkpoints that have it."""
    return [MTP]
