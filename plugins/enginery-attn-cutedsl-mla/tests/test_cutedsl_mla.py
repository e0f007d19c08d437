"""All but the kernel, in whose place a function with the same arguments and checks computes the same in torch. See the README."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from typing import Any

import pytest
import torch

from enginery.api import (
    AttnLayerFacts,
    AttnNeeds,
    BackendContext,
    ChunkPlan,
    Denied,
    HookGroup,
    LatentFacts,
    Phase,
    PrefillStrategy,
)
from enginery.testing.cases import AttnCase
from enginery.testing.conformance import Check
from enginery.testing.rules import compare
from enginery.testing.subject import Offer, Subject
from enginery.testing.suite import AttnBackendSuite
from enginery.testing.workbench import Workbench
from enginery_attn_cutedsl_mla.kernel import make_kernel
from enginery_attn_cutedsl_mla.spec import make_spec
from enginery_attn_flashinfer_mla.backend import FlashInferMla
from enginery_attn_flashinfer_mla.spec import FlashInferMlaOptions
from enginery_attn_flashinfer_mla.table_backend import TableBackend
from enginery_attn_flashinfer_mla.torch_kernels import TorchKernels, attend_table

LATENT = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
MLA = AttnLayerFacts(num_heads=128, num_kv_heads=1, head_dim=576, latent=LATENT)
NEEDS = AttnNeeds(device="cuda", dtype="bfloat16", kv_dtype="bfloat16", page_size=64, layers=(MLA,), compute_capability=(10, 0))


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


def on_the_cpu(options: FlashInferMlaOptions | None = None, **changes: Any) -> Subject:
    """With the capabilities of the real one, but for the device and changes."""

    def create(context: BackendContext) -> TableBackend:
        return TableBackend(context, make_kernel(context, decode), FlashInferMla(context, TorchKernels))

    spec = make_spec()
    anywhere = {"devices": frozenset({"cpu"}), "min_compute_capability": None, "max_compute_capability": None}
    can = dataclasses.replace(spec.capabilities, **anywhere | changes)
    spec = dataclasses.replace(spec, capabilities=can, refuse_also=lambda needs: [])
    offer = Offer(spec=spec, group=HookGroup.ATTN_BACKEND, name=spec.name, plugin="", distribution="", version="0")
    return Subject(offer=offer, create=create, device=torch.device("cpu"), options=options, origin={})


class TestAroundTheReference(AttnBackendSuite):
    backend = "cutedsl-mla"

    @classmethod
    def subject(cls) -> Subject:
        """Of which the kernel is not the real one. The kit's requests are longer on larger pages, which other tests here have."""
        return on_the_cpu(page_sizes=frozenset({16}))

    def test_rule(self, subject_of_kit: Subject, check: Check) -> None:
        """All but those that are about the kernels."""
        if check.rule.name in ("another-process", "attend-reads-nothing"):
            pytest.skip("these kernels are for tests alone, and read values")
        super().test_rule(subject_of_kit, check)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether packages are installed must not matter."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def needs(num_heads: int = 128, **changes: Any) -> AttnNeeds:
    return dataclasses.replace(NEEDS, layers=(dataclasses.replace(MLA, num_heads=num_heads),), **changes)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        (needs(), None),
        (needs(compute_capability=(10, 3)), None),
        (needs(compute_capability=(9, 0)), "compute capability"),
        (needs(compute_capability=(11, 0)), "compute capability"),
        (needs(compute_capability=(12, 0)), "compute capability"),
        (needs(device="cpu", compute_capability=None), "compute capability"),
        (needs(kv_dtype="float8_e4m3fn"), "kv dtype"),
        (needs(dtype="float32", kv_dtype="float32"), "dtype"),
        (needs(page_size=16, dtype="float16", kv_dtype="float16"), None),
        (needs(page_size=48), "page size"),
        (needs(num_heads=64), "heads"),
    ],
)
def test_needs_are_met_or_refused_with_a_reason(asked, rule) -> None:
    reasons = make_spec().refuse(asked)
    assert bool(reasons) == (rule is not None)
    assert rule is None or rule in [reason.rule for reason in reasons]


def test_a_machine_without_the_packages_is_told_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [reason.text.split("`")[1] for reason in make_spec().refuse(NEEDS)] == [
        "pip install nvidia-cutlass-dsl",
        "pip install flashinfer-python",
    ]


def made(strategy: PrefillStrategy, **options: Any) -> Workbench:
    case = AttnCase(facts=MLA, page_size=64, dtype="bfloat16", strategy=strategy)
    return Workbench(on_the_cpu(FlashInferMlaOptions(**options)), case, num_tokens=1000)


def test_the_hook_is_called_without_flashinfers_flag() -> None:
    bench = made(PrefillStrategy.CHUNKED)
    assert list(inspect.signature(bench.backend.init_mha_chunk_metadata).parameters) == ["batch", "chunks"]
    batch = bench.batch(bench.turns([(20, 4)]), Phase.PREFILL)
    asked = {"batch": batch, "chunks": (), "disable_ragged": False}
    assert isinstance(bench.leaf.ask("init_mha_chunk_metadata", **asked), ChunkPlan)


@pytest.mark.parametrize("options", [{"skip_prefill": True}, {"chunked_prefix": False}], ids=str)
def test_without_prefill_kernels_or_chunks_of_a_prefix_results_are_the_same(options) -> None:
    bench = made(PrefillStrategy.CHUNKED, **options)
    for phase, lengths in ((Phase.PREFILL, [(0, 5), (31, 3)]), (Phase.DECODE, [(31, 1), (70, 1)])):
        turns = bench.turns(lengths)
        compare(bench.run(turns, phase), [bench.expected(turn) for turn in turns], dtype="bfloat16", what=f"{lengths}")
    batch = bench.batch(bench.turns([(20, 4)]), Phase.PREFILL)
    answer = bench.backend.init_mha_chunk_metadata(batch, ())
    assert isinstance(answer, Denied if "skip_prefill" in options else ChunkPlan)
