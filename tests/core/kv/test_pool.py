"""What a layer keeps decides what the pool holds of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from enginery.contracts.attention import (
    AttnLayerFacts,
    AttnNeeds,
    Capabilities,
    GlobalLayerId,
    KVGeometry,
    LatentFacts,
    LocalLayerId,
    capability_refusals,
)
from enginery.contracts.batch import FULL, STATE
from enginery.contracts.memory import RecurrentFacts
from enginery.errors import OutOfMemory
from enginery.kv.pool import PagedKVPool, page_bytes
from enginery.kv.states import RecurrentStatePool, state_bytes

CPU = torch.device("cpu")
GROUPED = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=8)
LATENT = AttnLayerFacts(num_heads=4, num_kv_heads=1, head_dim=24, latent=LatentFacts(rank=16, rope_dim=8, nope_dim=8, value_dim=8))
LINEAR = AttnLayerFacts(
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    recurrent=RecurrentFacts(rule="linear", decay="head", key_heads=4, value_heads=4, key_dim=8, value_dim=6),
)
GEOMETRY = KVGeometry(pages={FULL: 3, STATE: 2}, page_size=4, layers=(GROUPED, LINEAR, LATENT), dtype="bfloat16")


def test_pages_hold_keys_and_values_or_one_row_of_latents() -> None:
    pool = PagedKVPool(GEOMETRY, CPU)
    k, v = pool.layer(LocalLayerId(0))
    assert k.shape == v.shape == (4, 4, 2, 8)
    latents, values = pool.layer(LocalLayerId(2))
    assert (latents.shape, values.shape) == ((4, 4, 1, 24), (4, 4, 1, 16))
    assert values.data_ptr() == latents.data_ptr()


def test_memory_that_the_system_refuses_is_told_with_what_lowers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*shape: object, **options: object) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", refused)
    with pytest.raises(OutOfMemory, match=r"512 bytes of KV memory.*--kv-memory-gib, --num-pages"):
        PagedKVPool(GEOMETRY, CPU)
    with pytest.raises(OutOfMemory, match=r"--max-batch-requests"):
        RecurrentStatePool(GEOMETRY, CPU)


def test_a_latent_is_written_once_and_its_value_is_its_beginning() -> None:
    pool = PagedKVPool(GEOMETRY, CPU)
    rows = torch.randn(2, 1, 24).bfloat16()
    pool.write(LocalLayerId(2), rows, rows, torch.tensor([5, 11]))
    latents, values = pool.layer(LocalLayerId(2))
    assert torch.equal(latents.view(-1, 1, 24)[[5, 11]], rows)
    assert torch.equal(values.reshape(-1, 1, 16)[[5, 11]], rows[..., :16])
    assert int(latents.count_nonzero()) == int(rows.count_nonzero())


def test_sizes_are_those_of_the_memory() -> None:
    pool, states = PagedKVPool(GEOMETRY, CPU), RecurrentStatePool(GEOMETRY, CPU)
    grouped, latents = (pool.layer(LocalLayerId(layer)).k for layer in (0, 2))
    assert page_bytes(GEOMETRY) * 4 == 2 * grouped.nbytes + latents.nbytes
    assert state_bytes(GEOMETRY) * 4 == sum(state.nbytes for state in states.layer(LocalLayerId(1)).values())


@pytest.mark.parametrize("wrong", [GlobalLayerId(0), 0])
def test_a_pool_is_indexed_by_nothing_but_a_local_layer_id(wrong: int) -> None:
    pool, states = PagedKVPool(GEOMETRY, torch.device("cpu")), RecurrentStatePool(GEOMETRY, torch.device("cpu"))
    for ask in (pool.layer, pool.by_slot, states.layer):
        with pytest.raises(TypeError, match=f"indexed by LocalLayerId .*, not by {type(wrong).__name__} 0"):
            ask(wrong)


def test_values_may_be_narrower_than_keys() -> None:
    narrow = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=5)
    geometry = KVGeometry(pages={FULL: 3}, page_size=4, layers=(narrow,), dtype="float32")
    pool = PagedKVPool(geometry, torch.device("cpu"))
    k, v = pool.layer(LocalLayerId(0))
    assert (k.shape, v.shape) == ((4, 4, 2, 8), (4, 4, 2, 5))
    assert page_bytes(geometry) * 4 == k.nbytes + v.nbytes
    needs = AttnNeeds(device="cpu", dtype="float32", kv_dtype="float32", page_size=4, layers=(narrow,))
    everywhere = Capabilities(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), kv_dtypes=frozenset({"float32"}))
    assert [reason.text for reason in capability_refusals(everywhere, needs)] == [
        "values of another width than keys is needed and not offered"
    ]
    assert capability_refusals(replace(everywhere, unequal_values=True), needs) == []


def test_memory_begins_with_a_cache_line_on_a_cpu() -> None:
    """A kernel's loads of whole lines would else take two each."""
    geometry = replace(GEOMETRY, pages={FULL: 1 << 14, STATE: 1 << 14})
    pool, states = PagedKVPool(geometry, CPU), RecurrentStatePool(geometry, CPU)
    stored = [*pool.layer(LocalLayerId(0)), pool.layer(LocalLayerId(2)).k, *states.layer(LocalLayerId(1)).values()]
    assert [tensor.data_ptr() % 64 for tensor in stored] == [0] * len(stored)
