"""fla-core's chunked kernels, none of which waits for the device.

Its public functions find out from `cu_seqlens` which chunks there are, and upload that from pageable memory or read it back, for
which the host waits until the device has nothing left to do. So what is called is what those call, with what the plan uploaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

CHUNK: Final = 64  # tokens

Results = tuple[torch.Tensor, torch.Tensor]
Kernel = Callable[..., Results]


class Kernels(NamedTuple):
    """Each q, k, v [1, S, heads, dim] and keywords -> outputs [1, S, H, V], states after each of N requests [N, H, V, K].

    Queries and keys have length 1, and what they are given is contiguous.

    All take scale, initial_state [N, H, V, K], cu_seqlens [N + 1] there and on the host, of the chunks `Chunks.indices` and
    `offsets`, g, [1, S, H] or [1, S, H, K], and beta, [1, S, H].
    """

    gated_delta_rule: Kernel
    kda: Kernel


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

    return Kernels(delta, kda)
