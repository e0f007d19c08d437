"""Rotary, with a norm and a write to the KV memory or not, equals the core's reference, interpreted and compiled."""

from __future__ import annotations

import pytest
import torch
from compared_ops import DTYPES, close, ops, part_of_wider, random
from pairwise import pairwise
from triton_devices import DEVICES

from enginery.nn import reference_ops
from enginery_ops_triton import ops as triton_ops
from enginery_ops_triton.ops import rotated_together

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pairwise(
    ("dtype", DTYPES),
    ("num_tokens", [0, 1, 9]),
    ("heads, unrotated, dim, rotary", [(24, 8, 128, 128), (3, 1, 64, 32), (1, 0, 48, 12), (5, 2, 20, 20)]),
    ("norm", [False, True]),
)
def test_rotary_turns_a_slice_of_the_merged_projection_in_place(
    dtype: torch.dtype, num_tokens: int, heads: int, unrotated: int, dim: int, rotary: int, norm: bool, device: str
) -> None:
    torch.manual_seed(0)
    merged = random(num_tokens, heads + unrotated, dim, dtype=dtype, device=device)
    weight = random(heads, dim, dtype=dtype, device=device) if norm else None
    angles = torch.rand(num_tokens, rotary // 2) * 6
    cos_sin = part_of_wider(torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=dtype))
    expected = merged.clone()
    reference_ops.qk_norm_rotary(expected[:, :heads], weight, 1e-6, cos_sin)
    ops(device).qk_norm_rotary(merged[:, :heads], weight, 1e-6, cos_sin)
    close(merged, expected, scale=2)
    assert torch.equal(merged[:, heads:], expected[:, heads:])


def test_of_many_tokens_a_program_rotates_more_heads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [rotated_together(tokens, 37, 64) for tokens in (1, 255, 256)] == [8, 8, 32]
    assert [rotated_together(4096, heads, dim) for heads, dim in ((80, 96), (80, 128), (20, 256), (5, 16))] == [16, 16, 8, 8]
    monkeypatch.setattr(triton_ops, "MANY_TOKENS", 3)
    torch.manual_seed(0)
    merged = random(3, 37, 64, dtype=torch.bfloat16, device=device)
    weight = random(33, 64, dtype=torch.bfloat16, device=device)
    angles = torch.rand(3, 32) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=torch.bfloat16)
    expected = merged.clone()
    reference_ops.qk_norm_rotary(expected[:, :33], weight, 1e-6, cos_sin)
    ops(device).qk_norm_rotary(merged[:, :33], weight, 1e-6, cos_sin)
    close(merged, expected, scale=2)
    assert torch.equal(merged[:, 33:], expected[:, 33:])


def test_rotary_takes_dims_that_are_apart_and_a_weight_that_all_heads_share(device: str) -> None:
    torch.manual_seed(0)
    weight = random(16, dtype=torch.float32, device=device).expand(3, 16)
    angles = torch.rand(4, 4) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    for heads in (random(4, 3, 16, dtype=torch.float32, device=device), random(4, 16, 3, dtype=torch.float32, device=device).mT):
        expected = heads.clone()
        reference_ops.qk_norm_rotary(expected, weight, 1e-6, cos_sin)
        ops(device).qk_norm_rotary(heads, weight, 1e-6, cos_sin)
        close(heads, expected)


@pairwise(
    ("dtype", DTYPES),
    ("num_tokens", [0, 3]),
    ("query, kv, dim, rotary", [(16, 8, 128, 128), (2, 1, 64, 32), (3, 3, 20, 12)]),
    ("norm", [False, True]),
)
def test_rotary_with_the_kv_write_equals_rotary_and_then_the_write(
    dtype: torch.dtype, num_tokens: int, query: int, kv: int, dim: int, rotary: int, norm: bool, device: str
) -> None:
    torch.manual_seed(0)
    qkv = random(num_tokens, query + 2 * kv, dim, dtype=dtype, device=device)
    weight = random(query + kv, dim, dtype=dtype, device=device) if norm else None
    angles = torch.rand(num_tokens, rotary // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=dtype)
    keys, values = (random(12, kv, dim, dtype=dtype, device=device) for _ in range(2))
    slots = torch.randperm(12)[:num_tokens].to(device)
    together, expected_keys, expected_values = qkv.clone(), keys.clone(), values.clone()
    ops(device).qk_norm_rotary(qkv[:, : query + kv], weight, 1e-6, cos_sin)
    expected_keys.index_copy_(0, slots, qkv[:, query : query + kv])
    expected_values.index_copy_(0, slots, qkv[:, query + kv :])
    ops(device).qk_norm_rotary_write(together, weight, 1e-6, cos_sin, keys=keys, values=values, slots=slots)
    assert torch.equal(together, qkv)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


def test_keys_and_values_are_narrowed_to_the_memory(device: str) -> None:
    if device == "cpu":
        pytest.skip("the interpreter of triton 3.6 rounds some numbers to the wrong float8")
    torch.manual_seed(0)
    qkv, cos_sin = random(3, 8, 32, dtype=torch.bfloat16, device=device) * 300, random(3, 32, dtype=torch.bfloat16, device=device)
    keys, values = (torch.zeros(4, 2, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    slots = torch.tensor([2, 0, 3], device=device)
    ops(device).qk_norm_rotary_write(qkv, None, 0, cos_sin, keys=keys, values=values, slots=slots)  # rotates them in place too
    assert values.float().abs().max() == 448
    for stored, wide in ((keys, qkv[:, 4:6]), (values, qkv[:, 6:])):
        assert torch.equal(stored[slots].float(), wide.float().clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pairwise(
    ("dtype", DTYPES),
    ("num_tokens", [0, 3]),
    ("heads, nope, rank, rotary", [(16, 128, 512, 64), (3, 20, 24, 12)]),
)
def test_latents_are_normed_rotated_and_written_as_the_reference_does(
    dtype: torch.dtype, num_tokens: int, heads: int, nope: int, rank: int, rotary: int, device: str
) -> None:
    torch.manual_seed(0)
    merged = random(num_tokens, heads * (nope + rotary) + rank + rotary, dtype=dtype, device=device)
    weight, stored = random(rank, dtype=dtype, device=device), random(12, rank + rotary, dtype=dtype, device=device)
    angles = torch.rand(num_tokens, rotary // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=dtype)
    slots = torch.randperm(12)[:num_tokens].to(device)
    results = []
    for table in (reference_ops, ops(device)):
        mine, memory = merged.clone(), stored.clone()
        q, latents = mine[:, : -(rank + rotary)].view(num_tokens, heads, nope + rotary), mine[:, -(rank + rotary) :]
        table.latent_norm_rotary_write(q, latents, weight, 1e-6, cos_sin, stored=memory, slots=slots)
        assert torch.equal(memory[slots], latents)
        results.append((mine, memory))
    (expected, expected_memory), (actual, actual_memory) = results
    close(actual, expected, scale=2)
    close(actual_memory, expected_memory, scale=2)
    assert torch.equal(actual[:, :nope], merged[:, :nope])


def test_a_latent_memory_that_the_kernel_cannot_write_is_refused(device: str) -> None:
    q, latents, weight, cos_sin = (torch.zeros(shape, device=device) for shape in ((1, 2, 12), (1, 20), (16,), (1, 4)))
    stored, slots = torch.zeros(20, 4, device=device).T, torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="adjacent dims"):
        ops(device).latent_norm_rotary_write(q, latents, weight, 1e-6, cos_sin, stored=stored, slots=slots)


def test_a_kv_layout_that_the_kernel_cannot_write_is_refused(device: str) -> None:
    qkv, cos_sin = (torch.zeros(shape, device=device) for shape in ((1, 3, 16), (1, 16)))
    keys, values, slots = torch.zeros(4, 1, 16, device=device), torch.zeros(1, 4, 16, device=device), torch.zeros(1, device=device)
    with pytest.raises(ValueError, match="adjacent dims"):
        ops(device).qk_norm_rotary_write(
            qkv, None, 0, cos_sin, keys=keys, values=values.transpose(0, 1), slots=slots.to(torch.int64)
        )
