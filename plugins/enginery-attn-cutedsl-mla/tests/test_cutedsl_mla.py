"""All but the kernel, in whose place a function with the same arguments and checks computes the same in torch. See the README."""

from __future__ import annotations

import pytest
import torch
from blackwell_mla import ALIKE, AroundTheReference, OnTheCpu, needs, told_to_install
from flashinfer_machines import check_answer

from enginery.api import AttnNeeds, BackendContext
from enginery_attn_cutedsl_mla.kernel import make_kernel
from enginery_attn_cutedsl_mla.spec import make_spec
from enginery_attn_flashinfer_mla.backend import FlashInferMla
from enginery_attn_flashinfer_mla.table_backend import TableBackend
from enginery_attn_flashinfer_mla.torch_kernels import TorchKernels, attend_table


def decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    softmax_scale: float,
    output_scale: float,
    *,
    out: torch.Tensor,
) -> None:
    """As FlashInfer's `cute_dsl_mla_decode`."""
    requests, _, heads, _ = query.shape
    page_size = kv_cache.shape[1]
    assert (kv_lora_rank, qk_rope_head_dim) == (512, 64)
    assert query.shape == (requests, 1, heads, 576)
    assert out.shape == (requests, 1, heads, 512)
    assert out.is_contiguous()
    assert out.dtype == query.dtype == kv_cache.dtype
    assert kv_cache.shape[1:] == (page_size, 576)
    assert 128 % page_size == 0
    assert block_tables.is_contiguous()
    assert block_tables.shape[1] % 4 == 0
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert 0 < int(seq_lens.max()) <= max_seq_len
    assert output_scale == 1.0
    splits = min(148 // requests // 2, 32)
    assert workspace_buffer.dtype == torch.int8
    assert workspace_buffer.numel() >= (requests * heads * splits * 513 * 4 if splits > 1 else 0)
    attend_table(query[:, 0], kv_cache, block_tables, seq_lens.tolist(), out[:, 0], scale=softmax_scale)


def create(context: BackendContext) -> TableBackend:
    return TableBackend(context, make_kernel(context, decode), FlashInferMla(context, TorchKernels))


class TestAroundTheReference(AroundTheReference):
    backend = "cutedsl-mla"
    on_the_cpu = OnTheCpu(make_spec(), create, page_size=16)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        *ALIKE,
        (needs(page_size=16, dtype="float16", kv_dtype="float16"), None),
        (needs(page_size=48), "page size"),
        (needs(num_heads=64), "heads"),
    ],
)
def test_needs_are_met_or_refused_with_a_reason(asked: AttnNeeds, rule: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_answer(make_spec(), asked, rule, monkeypatch)


def test_a_machine_without_the_packages_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_to_install(make_spec(), monkeypatch) == [
        "pip install nvidia-cutlass-dsl",
        "pip install flashinfer-python",
    ]
