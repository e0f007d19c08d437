"""FlashInfer's wrappers; nothing of FlashInfer is known elsewhere.

A wrapper's `plan` runs on the host, writes tables into pinned memory of the wrapper, and starts a copy of them to the device; `run`
launches kernels that read the copy. The pinned memory must not be written again before the copy has been made, and that is when the
kernels before it on the stream are done. So an event is recorded behind the copy, and the next `plan` of the same wrapper waits for
it. As a rule nobody waits: a wrapper whose copy is pending is not given out while there is another (`leases.py`), and the copy of a
captured step is behind the step before, which is over when the step after is planned.

What kernels read on the device, tables and page lists, is written again by copies on the same stream, behind those kernels.
Results of split requests are written and read within one `run`, and planning writes nothing there: all wrappers of a stream share
that memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import flashinfer
import torch
from flashinfer.cascade import get_cascade_module
from flashinfer.decode import fast_decode_plan
from flashinfer.page import get_seq_lens
from flashinfer.prefill import get_batch_prefill_module

from enginery.api import LayerKV
from enginery_attn_flashinfer.contract import KernelSettings
from enginery_attn_flashinfer.cuts import Cut
from enginery_attn_flashinfer.gather import gather_pages
from enginery_attn_flashinfer.modules import module_arguments, modules_of
from enginery_attn_flashinfer.pages import GatherLists, PageLists
from enginery_attn_flashinfer.store import compile_missing

_log: Final = logging.getLogger(__name__)
_DECODE_TABLE_BYTES: Final = 1 << 20  # prefill has FlashInfer's usual 8 MiB


class FlashInferKernels:
    """Implements `contract.Kernels`."""

    def __init__(self, settings: KernelSettings, cuts: Sequence[Cut]) -> None:
        self.settings = settings
        with_launch = torch.cuda.get_device_capability(settings.device) >= (9, 0)
        self._launch = {"enable_pdl": with_launch}  # programmatic dependent launch
        _load(settings, cuts)

    def decode(self, workspace: torch.Tensor) -> DecodeWrapper:
        """See `contract.Kernels`."""
        return DecodeWrapper(self.settings, workspace, None, self._launch)

    def captured(self, workspace: torch.Tensor, pages: PageLists) -> DecodeWrapper:
        """See `contract.Kernels`."""
        return DecodeWrapper(self.settings, workspace, pages, self._launch)

    def prefill(self, workspace: torch.Tensor) -> PrefillWrapper:
        """See `contract.Kernels`."""
        return PrefillWrapper(self.settings, workspace, None, self._launch, causal=True)

    def ragged(self, workspace: torch.Tensor) -> RaggedPrefillWrapper:
        """See `contract.Kernels`."""
        return RaggedPrefillWrapper(self.settings, workspace, self._launch)

    def verify(self, workspace: torch.Tensor) -> PrefillWrapper:
        """See `contract.Kernels`."""
        return PrefillWrapper(self.settings, workspace, None, self._launch, causal=True, splits=True)

    def captured_verify(self, workspace: torch.Tensor, pages: PageLists) -> PrefillWrapper:
        """See `contract.Kernels`."""
        return PrefillWrapper(self.settings, workspace, pages, self._launch, causal=True, splits=True)

    def prefix(self, workspace: torch.Tensor) -> PrefillWrapper:
        """See `contract.Kernels`."""
        return PrefillWrapper(self.settings, workspace, None, self._launch, causal=False)

    def captured_prefix(self, workspace: torch.Tensor, pages: PageLists) -> PrefillWrapper:
        """See `contract.Kernels`."""
        return PrefillWrapper(self.settings, workspace, pages, self._launch, causal=False)

    def gather(self, kv: LayerKV, lists: GatherLists, into: LayerKV) -> None:
        """See `contract.Kernels`."""
        gather_pages(kv, lists, into)

    def merge(self, out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
        """See `contract.Kernels`."""
        flashinfer.merge_state_in_place(out, lse, other, other_lse)


class _Planned:
    """The event behind the copy of a plan, and the arguments that every plan has."""

    def __init__(self, settings: KernelSettings, launch: dict[str, bool]) -> None:
        self._settings = settings
        self._launch = launch
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def is_pending(self) -> bool:
        """Whether the copy of the last plan is still to be made."""
        return not self._copied.query()  # type: ignore[no-untyped-call]

    def _terms(self, cut: Cut) -> dict[str, Any]:
        """The scale is 1 here and given when a layer runs."""
        settings = self._settings
        return {
            "num_qo_heads": cut.num_heads,
            "num_kv_heads": cut.num_kv_heads,
            "window_left": cut.window_left,
            "logits_soft_cap": cut.softcap,
            "q_data_type": settings.dtype,
            "sm_scale": 1.0,
        }

    def _paged_terms(self, cut: Cut) -> dict[str, Any]:
        return self._terms(cut) | {"page_size": self._settings.page_size, "kv_data_type": self._settings.kv_dtype}


class DecodeWrapper(_Planned):
    """Decoding. Captured, it has page lists at fixed places, and plans with the same sizes whatever the lengths."""

    def __init__(
        self, settings: KernelSettings, workspace: torch.Tensor, captured: PageLists | None, launch: dict[str, bool]
    ) -> None:
        super().__init__(settings, launch)
        fixed: dict[str, Any] = {}
        if captured is not None:
            fixed = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": captured.indptr,
                "paged_kv_indices_buffer": captured.indices,
                "paged_kv_last_page_len_buffer": captured.last_lens,
            }
        self._captured = captured
        self._is_ready = False  # for the shorter way to plan, which takes the kernels from the plan before
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2", **fixed
        )
        tables = torch.empty(_DECODE_TABLE_BYTES, dtype=torch.uint8, device=workspace.device)
        self._wrapper.reset_workspace_buffer(workspace, tables)

    def plan(self, cut: Cut, pages: PageLists) -> None:
        """See `contract.Wrapper`. A captured one is planned for one cut for good."""
        self._copied.synchronize()
        if self._captured is not None and self._is_ready:
            fast_decode_plan(
                self._wrapper,
                pages.indptr,
                self._captured.indices,
                pages.last_lens,
                head_dim=cut.head_dim,
                **self._paged_terms(cut),
            )
        else:
            self._wrapper.plan(pages.indptr, pages.indices, pages.last_lens, head_dim=cut.head_dim, **self._paged_terms(cut))
            self._is_ready = True
        self._copied.record()

    def run(self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor, *, scale: float, lse: torch.Tensor | None = None) -> None:
        """See `contract.Wrapper`."""
        self._wrapper.run(q, (kv.k, kv.v), q_scale=scale, out=out, lse=lse, return_lse=lse is not None, **self._launch)


class PrefillWrapper(_Planned):
    """Any number of rows for each request.

    splits: with FlashAttention-2, which splits the keys where there are few rows, and has the heads of a group in one tile. That is
    so, too, where all rows see all keys.
    """

    def __init__(
        self,
        settings: KernelSettings,
        workspace: torch.Tensor,
        captured: PageLists | None,
        launch: dict[str, bool],
        *,
        causal: bool,
        splits: bool = False,
    ) -> None:
        super().__init__(settings, launch)
        fixed: dict[str, Any] = {}
        if captured is not None:
            fixed = {
                "use_cuda_graph": True,
                "qo_indptr_buf": captured.q_indptr,
                "paged_kv_indptr_buf": captured.indptr,
                "paged_kv_indices_buf": captured.indices,
                "paged_kv_last_page_len_buf": captured.last_lens,
            }
        self._captured = captured
        self._causal = causal
        self._is_ready = False  # for the shorter way to plan
        backend = settings.prefill if causal and not splits and settings.kv_dtype == settings.dtype else "fa2"
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend, **fixed)

    def plan(self, cut: Cut, pages: PageLists) -> None:
        """See `contract.Wrapper`. A captured one is planned for one cut for good."""
        self._copied.synchronize()
        if self._captured is not None and self._is_ready:
            self._plan_again(cut, pages)
        else:
            self._plan_whole(cut, pages)
            self._is_ready = True
        self._copied.record()

    def _plan_whole(self, cut: Cut, pages: PageLists) -> None:
        longest = int((pages.q_indptr[1:] - pages.q_indptr[:-1]).max())  # else found by a loop over tensors
        self._wrapper.plan(
            pages.q_indptr,
            pages.indptr,
            pages.indices if self._captured is None else self._captured.indices[: len(pages.indices)],  # where they are already
            pages.last_lens,
            head_dim_qk=cut.head_dim,
            causal=self._causal,
            max_token_per_sequence=longest,
            **self._paged_terms(cut),
        )

    def _plan_again(self, cut: Cut, pages: PageLists) -> None:
        """What FlashInfer's `plan` does in the end, as its `fast_decode_plan` does for decoding.

        The lists are where kernels read them; `plan` would copy them once more, and find the longest request by a loop in Python.
        """
        wrapper = self._wrapper
        assert wrapper._backend == "fa2", "captured steps have FlashAttention-2"
        num_rows, most = int(pages.q_indptr[-1]), wrapper._max_total_num_rows
        assert num_rows <= most, f"{num_rows} rows are planned in a captured step of {most}"
        assert pages.num_requests == wrapper._fixed_batch_size, "a captured step has its number of requests for good"
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            pages.q_indptr,
            pages.indptr,
            get_seq_lens(pages.indptr, pages.last_lens, self._settings.page_size),
            most,
            pages.num_requests,
            cut.num_heads,
            cut.num_kv_heads,
            self._settings.page_size,
            True,  # it is captured
            cut.head_dim,
            cut.head_dim,
            self._causal,
            cut.window_left,
            -1,  # no fixed size of splits
            False,  # keys may be split
            0,  # no blocks beside those of another kernel
        )

    def run(self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor, *, scale: float, lse: torch.Tensor | None = None) -> None:
        """See `contract.Wrapper`."""
        self._wrapper.run(q, (kv.k, kv.v), q_scale=scale, out=out, lse=lse, return_lse=lse is not None, **self._launch)


class RaggedPrefillWrapper(_Planned):
    """Any number of rows for each request, over keys and values in one piece."""

    def __init__(self, settings: KernelSettings, workspace: torch.Tensor, launch: dict[str, bool]) -> None:
        super().__init__(settings, launch)
        self._wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=settings.prefill)

    def plan(self, cut: Cut, q_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> None:
        """See `contract.RaggedWrapper`."""
        self._copied.synchronize()
        dims = {"head_dim_qk": cut.head_dim, "kv_data_type": self._settings.dtype}
        self._wrapper.plan(q_indptr, kv_indptr, causal=True, **dims, **self._terms(cut))
        self._copied.record()

    def run(self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor, *, scale: float) -> None:
        """See `contract.RaggedWrapper`."""
        self._wrapper._sm_scale = scale  # a plan has it, and unlike those over pages `run` does not multiply it by q_scale
        self._wrapper.run(q, kv.k, kv.v, out=out, **self._launch)


def _load(settings: KernelSettings, cuts: Sequence[Cut]) -> None:
    """Before the first request: what is not on disk is compiled, and FlashInfer keeps it there."""
    began = time.perf_counter()
    count = compile_missing(modules_of(settings, cuts))
    for arguments in dict.fromkeys(each for cut in cuts for each in module_arguments(settings, cut)):
        get_batch_prefill_module(*arguments)
    get_cascade_module()
    _log.info("FlashInfer's kernels were ready after %.1f s, %d modules of them compiled", time.perf_counter() - began, count)
