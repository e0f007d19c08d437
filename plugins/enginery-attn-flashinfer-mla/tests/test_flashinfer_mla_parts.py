"""What it refuses, page lists, and how much memory is taken."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest
import torch
from flashinfer_machines import check_answer, check_what_is_missing

from enginery.api import AttnLayerFacts, AttnNeeds, LatentFacts
from enginery_attn_flashinfer_mla.contract import KernelSettings
from enginery_attn_flashinfer_mla.pages import Rows, cut_rows, page_lists
from enginery_attn_flashinfer_mla.plan import workspace_bytes
from enginery_attn_flashinfer_mla.spec import WORKSPACE_BYTES, make_spec

LATENT = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
MLA = AttnLayerFacts(num_heads=16, num_kv_heads=1, head_dim=576, latent=LATENT)
NEEDS = AttnNeeds(device="cuda", dtype="bfloat16", kv_dtype="bfloat16", page_size=16, layers=(MLA,), compute_capability=(9, 0))
GLM = dataclasses.replace(MLA, latent=dataclasses.replace(LATENT, nope_dim=192, value_dim=256))
SMALL = dataclasses.replace(MLA, latent=dataclasses.replace(LATENT, rank=256), head_dim=320)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether FlashInfer is installed must not matter here."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, None),
        ({"mla_ragged": True, "lse": True}, None),
        ({"layers": (GLM,)}, None),
        ({"layers": (GLM,), "mla_ragged": True}, "ragged MLA prefill"),
        ({"layers": (SMALL,)}, "latent rank and rope dim"),
        ({"layers": (dataclasses.replace(MLA, num_heads=20),)}, "heads"),
        ({"layers": (dataclasses.replace(MLA, num_heads=256),)}, "heads"),
        ({"layers": (MLA, AttnLayerFacts(num_heads=8, num_kv_heads=8, head_dim=128))}, "MLA"),
        ({"kv_dtype": "float8_e4m3fn"}, "kv dtype"),
        ({"kv_dtype": "float16"}, "kv dtype"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "dtype"),
        ({"compute_capability": (7, 5)}, "compute capability"),
        ({"device": "cpu", "compute_capability": None}, "device"),
        ({"batch_invariant": True}, "batch invariance"),
    ],
)
def test_needs_are_met_or_refused_with_a_reason(changes, rule, monkeypatch) -> None:
    check_answer(make_spec(), dataclasses.replace(NEEDS, **changes), rule, monkeypatch)


def test_a_machine_without_flashinfer_or_a_compiler_is_told_so(monkeypatch, tmp_path) -> None:
    check_what_is_missing(make_spec(), NEEDS, monkeypatch, tmp_path)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_page_lists_are_what_requests_read() -> None:
    rows = Rows(q_lens=ints(1, 1, 3), kv_lens=ints(16, 33, 17), table=np.arange(30, dtype=np.int32).reshape(3, 10), first=0)
    found = page_lists(rows, page_size=16, pinned=False)
    assert found.q_indptr.tolist() == [0, 1, 2, 5]
    assert found.kv_indptr.tolist() == [0, 1, 4, 6]
    assert found.indices.tolist() == [0, 10, 11, 12, 20, 21]
    assert found.kv_lens.tolist() == [16, 33, 17]
    assert found.indices.dtype == torch.int32


def test_rows_are_cut_within_requests_and_see_what_they_saw() -> None:
    rows = Rows(q_lens=ints(2, 0, 7, 1), kv_lens=ints(9, 0, 50, 4), table=np.arange(8, dtype=np.int32).reshape(4, 2), first=5)
    found = list(cut_rows(rows, 4))
    assert [part.q_lens.tolist() for part in found] == [[2, 2], [4], [1, 1]]
    assert [part.kv_lens.tolist() for part in found] == [[9, 45], [49], [50, 4]]
    assert [part.table[:, 0].tolist() for part in found] == [[0, 4], [4], [4, 6]]
    assert [part.place for part in found] == [slice(5, 9), slice(9, 13), slice(13, 15)]
    assert list(cut_rows(dataclasses.replace(rows, q_lens=ints(0, 0, 0, 0)), 4)) == []


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_the_workspace_is_as_large_as_the_plans_of_flashinfer_can_ask_for(heads) -> None:
    settings = KernelSettings(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        page_size=16,
        num_heads=heads,
        latent=LATENT,
        kernels="fa2",
        ragged=True,
    )
    clusters, tile = 132, 64
    absorbed = 2 * clusters * tile * 2 * 512 + 2 * clusters * tile * 4 + 32
    assert absorbed <= workspace_bytes(settings, num_units=132) <= WORKSPACE_BYTES
    assert workspace_bytes(settings, num_units=160) <= WORKSPACE_BYTES
