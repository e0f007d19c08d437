"""Mamba2, hybrids of it and attention, Jamba and LFM2."""

from enginery.api import ExpertNames, ModelSpec, hookimpl
from enginery_model_mamba.spec import falcon, hybrids, jamba, lfm2, mamba2, nemotron

FAMILIES = {
    "bamba": ("BambaForCausalLM", hybrids),
    "falcon-h1": ("FalconH1ForCausalLM", falcon),
    "granite-hybrid": ("GraniteMoeHybridForCausalLM", hybrids),
    "jamba": ("JambaForCausalLM", jamba),
    "lfm2": ("Lfm2ForCausalLM", lfm2),
    "lfm2-moe": ("Lfm2MoeForCausalLM", lfm2),
    "mamba2": ("Mamba2ForCausalLM", mamba2),
    "nemotron-h": ("NemotronHForCausalLM", nemotron),
}
TIED = ("lm_head.weight",)  # of files that hold the embedding once more, and of which config.json need not say that it is the head
IGNORED = {"nemotron-h": ("mtp.*",), "lfm2": TIED, "lfm2-moe": TIED}


def stacked(names: ExpertNames) -> dict[str, tuple[str, ...]]:
    """How transformers 5 has a layer's experts in memory, and stores them where it is told to."""
    stem = f".{names.block}.experts"
    return {
        f"{stem}.gate_up_proj": (f"{stem}.{{}}.{names.gate}.weight", f"{stem}.{{}}.{names.up}.weight"),
        f"{stem}.down_proj": (f"{stem}.{{}}.{names.down}.weight",),
    }


STACKED: dict[str, dict[str, tuple[str, ...]]] = {
    "granite-hybrid": hybrids.STACKED | stacked(hybrids.EXPERTS),
    "jamba": stacked(jamba.EXPERTS),
    "lfm2-moe": stacked(lfm2.EXPERTS),
    "nemotron-h": nemotron.STACKED,
}


@hookimpl
def register_models() -> list[ModelSpec]:
    """A module for each kind of family; blocks beside `spec` are what they share."""
    return [
        ModelSpec(
            name=name,
            api=(2, 1),
            architectures=(architecture,),
            describe=family.describe,
            build=family.build,
            lanes=True,
            ignored_weights=IGNORED.get(name, ()),
            stacked_weights=STACKED.get(name, {}),
        )
        for name, (architecture, family) in FAMILIES.items()
    ]
