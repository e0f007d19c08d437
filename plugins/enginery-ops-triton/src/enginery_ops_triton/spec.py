"""What it offers and where."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from enginery.api import OpNeeds, OpSpec, PeerMemory, PeerOps, PeerOpsSpec, Reason, Scheme

DTYPES = ("float32", "bfloat16", "float16")
FLOAT8_BLOCKS = Scheme(values="f8e4m3", block=(128, 128))
FLOAT4_BLOCKS = Scheme(values="mxfp4", block=(1, 32))
OLDEST = (8, 0)  # bfloat16 and asynchronous copies came with it
DEPENDENT_LAUNCH = (9, 0)
PEER_BYTES = 38_312_192  # `peer_ops.NUM_BYTES`, without its imports
SENT_BYTES = 536_870_912  # `sent_rows.PART_BYTES`


def _refuse(needs: OpNeeds) -> list[Reason]:
    reasons = []
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if needs.device == "cpu" and not interpreted:
        reasons.append(Reason(rule="device", text="runs on a CPU only in Triton's interpreter, for tests: TRITON_INTERPRET=1"))
    elif needs.device == "cuda" and interpreted:
        reasons.append(Reason(rule="device", text="TRITON_INTERPRET=1 is set: kernels would run on the CPU, the device is cuda"))
    elif needs.device not in ("cpu", "cuda"):
        reasons.append(Reason(rule="device", text=f"runs on CUDA devices, the device is {needs.device}"))
    if needs.dtype not in DTYPES:
        reasons.append(Reason(rule="dtype", text=f"has kernels for {', '.join(DTYPES)}, the model runs in {needs.dtype}"))
    capability = needs.compute_capability
    if needs.device == "cuda" and capability is not None and capability < OLDEST:
        text = f"needs compute capability {OLDEST[0]}.{OLDEST[1]}, the device has {capability[0]}.{capability[1]}"
        reasons.append(Reason(rule="compute_capability", text=text))
    if find_spec("triton") is None:
        reasons.append(Reason(rule="installed", text="triton is not installed; torch's CUDA builds bring it, or pip does"))
    return reasons


PROVIDES = (
    "embed",
    "bind_linear",
    "rms_norm",
    "add_rms_norm",
    "gated_rms_norm",
    "gated_group_norm",
    "qk_norm_rotary",
    "qk_norm_rotary_write",
    "latent_norm_rotary_write",
    "gated_silu",
    "gated_gelu",
    "gated_sigmoid",
    "route",
    "route_gated",
    "bind_router",
    "bind_experts",
    "bind_squared_experts",
    "greedy",
    "draw_rows",
)


def _load(needs: OpNeeds) -> Mapping[str, Callable[..., Any]]:
    from enginery_ops_triton.gluon_kernels import warn_without_gluon
    from enginery_ops_triton.ops import TritonOps

    chained = needs.device == "cuda" and (needs.compute_capability or OLDEST) >= DEPENDENT_LAUNCH
    if chained:
        warn_without_gluon()
    ops = TritonOps(dependent_launch=chained)
    return {name: getattr(ops, name) for name in PROVIDES}


def _bind_peer_ops(memory: PeerMemory) -> PeerOps:
    from enginery_ops_triton.peer_ops import bind_peer_ops

    return bind_peer_ops(memory, dependent_launch_from=DEPENDENT_LAUNCH)


TRITON = OpSpec(
    name="triton",
    api=(2, 7),
    priority=20,
    provides=PROVIDES,
    refuse=_refuse,
    load=_load,
    schemes={"bind_experts": frozenset({FLOAT8_BLOCKS, FLOAT4_BLOCKS})},
    narrow_logits=True,
    peer_ops=PeerOpsSpec(num_bytes=PEER_BYTES, more_of_two=SENT_BYTES, bind=_bind_peer_ops),
)
