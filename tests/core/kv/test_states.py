"""The pool of recurrent states beside the pages of the other layers."""

import pytest
import torch

from enginery.contracts.attention import AttnLayerFacts, KVGeometry, LatentFacts, LocalLayerId
from enginery.contracts.batch import FULL, STATE
from enginery.contracts.memory import RecurrentFacts
from enginery.errors import Unsupported
from enginery.kv.pool import PagedKVPool, page_bytes
from enginery.kv.states import RecurrentStatePool, state_bytes

SOFTMAX = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=8)
LATENT = AttnLayerFacts(num_heads=4, num_kv_heads=1, head_dim=20, latent=LatentFacts(rank=16, rope_dim=4, nope_dim=8, value_dim=8))
RECURRENT = AttnLayerFacts(
    num_heads=3,
    num_kv_heads=3,
    head_dim=8,
    recurrent=RecurrentFacts(rule="linear", decay="head", key_heads=3, value_heads=3, key_dim=8, value_dim=5, conv_kernel=4),
)


def geometry_of(*layers, dtype="float32"):
    return KVGeometry(pages={FULL: 3, STATE: 6}, page_size=4, layers=layers, dtype=dtype)


def pool_of(*layers, **changes):
    return RecurrentStatePool(geometry_of(*layers, **changes), torch.device("cpu"))


def test_a_recurrent_layer_has_a_state_for_each_request_and_one_for_padding():
    states = pool_of(SOFTMAX, RECURRENT).layer(LocalLayerId(1))["matrix"]
    assert states.shape == (8, 3, 5, 8)
    assert not states.any()


def test_states_are_float32_whatever_the_model_is():
    assert pool_of(RECURRENT, dtype="bfloat16").layer(LocalLayerId(0))["matrix"].dtype == torch.float32


def test_the_inputs_of_a_convolution_are_kept_in_the_model_s_dtype():
    states = pool_of(RECURRENT, dtype="bfloat16").layer(LocalLayerId(0))["conv"]
    assert states.shape == (8, 3, 2 * 24 + 15)
    assert states.dtype == torch.bfloat16


def test_each_layer_has_states_of_its_own_and_they_are_never_copies():
    pool = pool_of(RECURRENT, SOFTMAX, RECURRENT)
    pool.layer(LocalLayerId(0))["matrix"].fill_(1.0)
    assert pool.layer(LocalLayerId(0))["matrix"].all()
    assert not pool.layer(LocalLayerId(2))["matrix"].any()


@pytest.mark.parametrize("other", [SOFTMAX, LATENT])
def test_a_layer_with_pages_has_no_states(other):
    with pytest.raises(Unsupported, match="layer 1 of this stage is not recurrent"):
        pool_of(RECURRENT, other).layer(LocalLayerId(1))


def test_a_state_takes_what_the_pool_allocates_for_it():
    geometry = geometry_of(RECURRENT, SOFTMAX, RECURRENT, LATENT)
    pool = RecurrentStatePool(geometry, torch.device("cpu"))
    allocated = sum(state.nbytes for index in (0, 2) for state in pool.layer(LocalLayerId(index)).values())
    assert state_bytes(geometry) * (geometry.zero_page + 1) == allocated
    assert state_bytes(geometry_of(SOFTMAX, LATENT)) == 0


def test_a_recurrent_layer_takes_no_pages():
    assert page_bytes(geometry_of(SOFTMAX, RECURRENT, LATENT)) == page_bytes(geometry_of(SOFTMAX, LATENT))
    pool = PagedKVPool(geometry_of(RECURRENT, SOFTMAX), torch.device("cpu"))
    assert pool.layer(LocalLayerId(1)).k.shape == (4, 4, 2, 8)
