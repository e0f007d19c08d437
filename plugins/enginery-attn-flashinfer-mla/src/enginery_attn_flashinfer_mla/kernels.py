"""FlashInfer's wrappers; nothing of FlashInfer is known elsewhere in this package.

A wrapper's `plan` runs on the host, writes tables into pinned memory of the wrapper, and starts a copy of them to the device; `run`
launches kernels that read the copy. The pinned memory must not be written again before the copy has been made, so an event is
recorded behind it, and the next `plan` of the same wrapper waits for that. As a rule nobody waits: a wrapper whose copy is pending
is not leased while there is another.

FlashInfer takes the scale when it plans, and a layer states it when it runs, so it is put where `run` reads it. Planned with NaN: a
FlashInfer that reads it elsewhere gives NaN instead of plausible numbers.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import flashinfer
import torch
from flashinfer.mla import get_batch_mla_module
from flashinfer.prefill import get_batch_prefill_module

from enginery_attn_flashinfer.store import compile_missing
from enginery_attn_flashinfer_mla.contract import KernelSettings
from enginery_attn_flashinfer_mla.modules import modules_of, paged_arguments, ragged_arguments
from enginery_attn_flashinfer_mla.pages import PageLists
from enginery_attn_flashinfer_mla.spec import ragged_dims

_log: Final = logging.getLogger(__name__)
_NAN: Final = float("nan")


class FlashInferKernels:
    """Implements `contract.Kernels`."""

    def __init__(self, settings: KernelSettings) -> None:
        self.settings = settings
        _load(settings)

    def paged(self, workspace: torch.Tensor) -> PagedLatents:
        """See `contract.Kernels`."""
        return PagedLatents(self.settings, workspace)

    def ragged(self, workspace: torch.Tensor) -> RaggedKeysValues:
        """See `contract.Kernels`."""
        return RaggedKeysValues(self.settings, workspace)


class _Planned:
    """The event behind the copy of a plan."""

    def __init__(self, settings: KernelSettings) -> None:
        self._settings = settings
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def is_pending(self) -> bool:
        """Whether the copy of the last plan is still to be made."""
        return not self._copied.query()  # type: ignore[no-untyped-call]


class PagedLatents(_Planned):
    """Keys are split among blocks for all requests alike, so one kernel is for decoding and for prefills."""

    def __init__(self, settings: KernelSettings, workspace: torch.Tensor) -> None:
        super().__init__(settings)
        self._wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace, backend=settings.kernels)

    def plan(self, pages: PageLists, *, indices: torch.Tensor | None = None) -> None:
        """See `contract.PagedWrapper`. Of one row per request, nothing is masked but what lies past its last token."""
        settings = self._settings
        self._copied.synchronize()
        self._wrapper.plan(
            pages.q_indptr,
            pages.kv_indptr,
            pages.indices if indices is None else indices,  # those on the device are read where they are
            pages.kv_lens,
            settings.num_heads,
            settings.latent.rank,
            settings.latent.rope_dim,
            settings.page_size,
            pages.causal,
            _NAN,
            settings.dtype,
            settings.dtype,
        )
        self._copied.record()

    def run(self, q: torch.Tensor, latents: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
        """See `contract.PagedWrapper`."""
        rank = self._settings.latent.rank
        self._wrapper._sm_scale = scale
        self._wrapper.run(q[..., :rank], q[..., rank:], latents[..., :rank], latents[..., rank:], out=out)


class RaggedKeysValues(_Planned):
    """FlashAttention over keys and values in one piece."""

    def __init__(self, settings: KernelSettings, workspace: torch.Tensor) -> None:
        super().__init__(settings)
        self._launch_early = torch.cuda.get_device_capability(settings.device) >= (9, 0)  # programmatic dependent launch
        self._wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=settings.kernels)

    def plan(self, q_indptr: torch.Tensor, kv_indptr: torch.Tensor, *, causal: bool) -> None:
        """See `contract.RaggedWrapper`."""
        settings, (key_dim, value_dim) = self._settings, ragged_dims(self._settings.latent)
        self._copied.synchronize()
        self._wrapper.plan(
            q_indptr,
            kv_indptr,
            settings.num_heads,
            settings.num_heads,
            key_dim,
            value_dim,
            causal=causal,
            sm_scale=_NAN,
            q_data_type=settings.dtype,
            kv_data_type=settings.dtype,
        )
        self._copied.record()

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, scale: float, lse: torch.Tensor | None
    ) -> None:
        """See `contract.RaggedWrapper`."""
        self._wrapper._sm_scale = scale
        self._wrapper.run(q, k, v, out=out, lse=lse, return_lse=lse is not None, enable_pdl=self._launch_early)


def _load(settings: KernelSettings) -> None:
    """Before the first request: what is not on disk is compiled, and FlashInfer keeps it there."""
    began = time.perf_counter()
    count = compile_missing(modules_of(settings))
    get_batch_mla_module(*paged_arguments(settings))
    if settings.ragged:
        get_batch_prefill_module(*ragged_arguments(settings))
    _log.info("FlashInfer's MLA kernels were ready after %.1f s, %d modules of them compiled", time.perf_counter() - began, count)
