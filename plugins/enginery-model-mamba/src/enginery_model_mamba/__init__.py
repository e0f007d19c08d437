"""Mamba2, hybrids of it and attention, Jamba and LFM2."""

from enginery.api import ModelSpec, hookimpl
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


@hookimpl
def register_models() -> list[ModelSpec]:
    """A module for each kind of family; blocks beside `spec` are what they share."""
    return [
        ModelSpec(
            name=name,
            api=(2, 0),
            architectures=(architecture,),
            describe=family.describe,
            build=family.build,
            lanes=True,
            ignored_weights=IGNORED.get(name, ()),
            stacked_weights=hybrids.STACKED if name == "granite-hybrid" else {},
        )
        for name, (architecture, family) in FAMILIES.items()
    ]
