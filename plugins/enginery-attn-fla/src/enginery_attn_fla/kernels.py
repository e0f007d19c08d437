"""fla-core's chunked kernels, none of which waits for the device.

Its public functions find out from `cu_seqlens` which chunks there are, and upload that from pageable memory or read it back, for
which the host waits until the device has nothing left to do. So what is called is what those call, with what the plan uploaded.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

CHUNK: Final = 64  # tokens
_LOG2_E: Final = 1 / math.log(2.0)  # its kernels take powers of 2

Results = tuple[torch.Tensor, torch.Tensor]
Kernel = Callable[..., Results]


class Kernels(NamedTuple):
    """Each q, k, v [1, S, heads, dim] and keywords -> outputs [1, S, H, V], states after each of N requests [N, H, V, K].

    Queries and keys of delta rules have length 1, and what they are given is contiguous.

    All take scale, initial_state [N, H, V, K], cu_seqlens [N + 1] there and on the host, and of the chunks `Chunks.indices` and
    `offsets`; delta rules also g, [1, S, H] or [1, S, H, K], and beta, [1, S, H]; the linear one g [1, S, H] or g_gamma [H].
    """

    gated_delta_rule: Kernel
    kda: Kernel
    simple_gla: Kernel


def load_kernels() -> Kernels:
    """Import them: 17 s when nothing is cached. What fla-core warns of then is about parts of it that nobody uses here.

    Unless the user says otherwise, it does not ask at each call whether another backend than Triton's would compute it.
    """
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fla.ops.gated_delta_rule.chunk import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            chunk_gated_delta_rule_fwd,
        )
        from fla.ops.kda.chunk_fwd import chunk_kda_fwd  # type: ignore[import-not-found,import-untyped,unused-ignore]

        simple_gla = _load_simple_gla()

    def delta(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        chunk_offsets: torch.Tensor,
        cu_seqlens_cpu: torch.Tensor,
        **given: Any,
    ) -> Results:
        _, made, _, after, *_ = chunk_gated_delta_rule_fwd(q, k, v, output_final_state=True, state_v_first=True, **given)
        return made.to(q.dtype), after

    def kda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Results:
        made, after, *_ = chunk_kda_fwd(q, k, v, output_final_state=True, state_v_first=True, **given)
        return made.to(q.dtype), after

    return Kernels(delta, kda, simple_gla)


def _load_simple_gla() -> Kernel:
    from fla.ops.common.chunk_h import chunk_fwd_kernel_h  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from fla.ops.common.chunk_o import chunk_fwd_o  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from fla.ops.utils import chunk_local_cumsum  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def simple_gla(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        initial_state: torch.Tensor,
        cu_seqlens: torch.Tensor,
        cu_seqlens_cpu: torch.Tensor,
        chunk_indices: torch.Tensor,
        chunk_offsets: torch.Tensor,
        g: torch.Tensor | None = None,
        g_gamma: torch.Tensor | None = None,
    ) -> Results:
        q, k, v = (part.contiguous() for part in (q, k, v))
        if g is not None:
            g = chunk_local_cumsum(g, CHUNK, scale=_LOG2_E, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
        if g_gamma is not None:
            g_gamma = g_gamma * _LOG2_E
        num_rows, heads, key_dim, value_dim = *k.shape[1:], v.shape[-1]
        before = k.new_empty(1, len(chunk_indices), heads, value_dim, key_dim)
        after = torch.empty_like(initial_state)

        def grid(meta: dict[str, int]) -> tuple[int]:
            return (-(-key_dim // meta["BK"]) * -(-value_dim // meta["BV"]) * len(initial_state) * heads,)

        chunk_fwd_kernel_h[grid](
            k=k,
            v=v,
            h=before,
            g=g,
            g_gamma=g_gamma,
            gk=None,
            gv=None,
            h0=initial_state,
            ht=after,
            cu_seqlens=cu_seqlens,
            split_offsets=chunk_offsets,
            T=num_rows,
            H=heads,
            K=key_dim,
            V=value_dim,
            BT=CHUNK,
            BS=CHUNK,
            USE_G=g is not None,
            USE_G_GAMMA=g_gamma is not None,
            USE_GK=False,
            USE_GV=False,
            STATE_V_FIRST=True,
        )
        made = chunk_fwd_o(
            q,
            k,
            v,
            h=before,
            g=g,
            g_gamma=g_gamma,
            scale=scale,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
            chunk_size=CHUNK,
            chunk_indices=chunk_indices,
        )
        return made.to(q.dtype), after

    return simple_gla
