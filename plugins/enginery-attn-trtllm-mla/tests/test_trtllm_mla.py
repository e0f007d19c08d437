"""All but the kernel, in whose place a function with the same arguments and checks computes the same in torch. See the README."""

from __future__ import annotations

import pytest
import torch
from blackwell_mla import ALIKE, AroundTheReference, OnTheCpu, needs, told_to_install
from flashinfer_machines import check_answer

from enginery.api import AttnNeeds, BackendContext
from enginery_attn_flashinfer_mla.backend import FlashInferMla
from enginery_attn_flashinfer_mla.table_backend import TableBackend
from enginery_attn_flashinfer_mla.torch_kernels import TorchKernels, attend_table
from enginery_attn_trtllm_mla.kernel import make_kernel
from enginery_attn_trtllm_mla.spec import make_spec


def decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    out: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    backend: str,
) -> None:
    """As FlashInfer's `trtllm_batch_decode_with_kv_cache_mla`."""
    page_size = kv_cache.shape[2]
    assert backend == "trtllm-gen"
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (128, 512, 64)
    assert query.shape[1:] == (1, query.shape[2], 576)
    assert out.shape == (*query.shape[:3], 512)
    assert out.dtype == query.dtype == kv_cache.dtype == torch.bfloat16
    assert kv_cache.shape[1:] == (1, page_size, 576)
    assert page_size in (32, 64)
    assert block_tables.shape[1] % (128 // page_size) == 0
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert int(seq_lens.max()) <= max_seq_len
    assert bmm2_scale == 1.0
    assert not workspace_buffer[:1000].any()
    attend_table(query[:, 0], kv_cache[:, 0], block_tables, seq_lens.tolist(), out[:, 0], scale=bmm1_scale)


def create(context: BackendContext) -> TableBackend:
    kernel = make_kernel(context, decode)
    kernel.workspace_bytes = 4096  # as much as it wants takes long to clear
    return TableBackend(context, kernel, FlashInferMla(context, TorchKernels))


class TestAroundTheReference(AroundTheReference):
    backend = "trtllm-mla"
    on_the_cpu = OnTheCpu(make_spec(), create, page_size=32)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        *ALIKE,
        (needs(page_size=32, num_heads=16), None),
        (needs(page_size=16), "page size"),
        (needs(num_heads=20), "heads"),
        (needs(dtype="float16", kv_dtype="float16"), "dtype"),
    ],
)
def test_needs_are_met_or_refused_with_a_reason(asked: AttnNeeds, rule: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_answer(make_spec(), asked, rule, monkeypatch)


def test_a_machine_without_the_packages_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_to_install(make_spec(), monkeypatch) == ["pip install flashinfer-python"]
