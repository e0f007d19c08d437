"""What it can do, and what plugins that decode beside it have in common."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from enginery.api import AttnBackendSpec, AttnNeeds, Capabilities, LatentFacts, Phase, Reason

NAME: Final = "flashinfer-mla"
DTYPES: Final = frozenset({"bfloat16", "float16"})
LATENT_DIMS: Final = frozenset({(512, 64)})  # DeepSeek-V2 and all that follow it
RAGGED_DIMS: Final = (192, 128)  # of a head's key and value
HEADS: Final = frozenset({1, 2, 4, 8, 16, 32, 64, 128})
WORKSPACE_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class FlashInferMlaOptions:
    """kernels: `fa3` is for compute capability 9.x, where `auto` takes it.

    skip_prefill: for a drafter, which only decodes: nothing for ragged prefills is loaded, and they are denied. chunked_prefix: a
    cached prefix may be cut into chunks.
    """

    kernels: Literal["auto", "fa2", "fa3"] = "auto"
    skip_prefill: bool = False
    chunked_prefix: bool = True


def make_spec() -> AttnBackendSpec:
    """Before Triton, which is slower in all but decoding one or two requests with few heads: see the README."""
    from enginery_attn_flashinfer.store import ModuleStore

    return AttnBackendSpec(
        name=NAME,
        api=(2, 1),
        priority=60,
        summary="FlashInfer's kernels for MLA on CUDA devices",
        refuse_also=refuse_also,
        options=FlashInferMlaOptions,
        kernel_store=ModuleStore(_modules),
        capabilities=Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=DTYPES,
            kv_dtypes=DTYPES,
            head_dims=frozenset(),
            min_compute_capability=(8, 0),
            phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY}),
            mla=True,
            mla_ragged=True,
            latent_dims=LATENT_DIMS,
            graphs=True,
            lse_base="2",
            needs_jit=True,
            workspace_bytes=WORKSPACE_BYTES,
        ),
    )


def refuse_also(needs: AttnNeeds) -> list[Reason]:
    """A machine without FlashInfer or a compiler for it, and layers that its kernels are not for."""
    return missing_software() + refuse_layers(needs, heads=HEADS)


def blackwell_spec(
    *,
    name: str,
    priority: int,
    summary: str,
    dtypes: frozenset[str],
    page_sizes: frozenset[int],
    heads: frozenset[int],
    modules: Mapping[str, str],
) -> AttnBackendSpec:
    """Of a plugin that decodes with a kernel of its own on compute capability 10.x, and leaves the rest to this one.

    modules: what its kernel is imported from, and the distributions that have it.
    """
    plain = make_spec()
    can = dataclasses.replace(
        plain.capabilities,
        dtypes=dtypes,
        kv_dtypes=dtypes,
        page_sizes=page_sizes,
        min_compute_capability=(10, 0),
        max_compute_capability=(10, 9),
        phases=plain.capabilities.phases - {Phase.VERIFY},
    )
    refuse = partial(_refuse_blackwell, heads=heads, modules=modules)
    return dataclasses.replace(plain, name=name, priority=priority, summary=summary, refuse_also=refuse, capabilities=can)


def _refuse_blackwell(needs: AttnNeeds, *, heads: frozenset[int], modules: Mapping[str, str]) -> list[Reason]:
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    reasons = [
        Reason(rule=module, text=f"the package {module} is not installed; `pip install {modules[module]}`") for module in absent
    ]
    return reasons + missing_software() + refuse_layers(needs, heads=heads)


def _modules(needs: AttnNeeds, options: object | None) -> Sequence[Any]:
    from enginery_attn_flashinfer_mla.modules import needed_modules

    return needed_modules(needs, options)


def missing_software() -> list[Reason]:
    """Why FlashInfer's kernels cannot be had here; empty if they can."""
    from enginery_attn_flashinfer import spec

    return spec.missing_software()


def refuse_layers(needs: AttnNeeds, *, heads: frozenset[int]) -> list[Reason]:
    """Layers without latents, numbers of heads, and dims of ragged prefills where those are asked for."""
    reasons: list[Reason] = []
    if needs.dtype != needs.kv_dtype:
        reasons.append(Reason(rule="kv dtype", text=f"latents are {needs.kv_dtype}, the model is {needs.dtype}"))
    for layer in needs.layers:
        if layer.latent is None:
            reasons.append(Reason(rule="MLA", text="it is for MLA alone, and the model has attention over keys and values"))
            continue
        if layer.num_heads not in heads:
            names = ", ".join(map(str, sorted(heads)))
            reasons.append(Reason(rule="heads", text=f"{layer.num_heads} query heads are not among {names}"))
        if needs.mla_ragged and (dims := ragged_dims(layer.latent)) != RAGGED_DIMS:
            reasons.append(Reason(rule="ragged MLA prefill", text=f"head dims {dims} of keys and values are not {RAGGED_DIMS}"))
    return list(dict.fromkeys(reasons))


def ragged_dims(latent: LatentFacts) -> tuple[int, int]:
    """Of a head's key and value, made from latents."""
    return latent.nope_dim + latent.rope_dim, latent.value_dim
