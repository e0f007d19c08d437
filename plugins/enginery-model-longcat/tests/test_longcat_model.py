"""The model alone: which experts a token has, and rows of several lanes. Logits and tokens are compared in tests/parity."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

from enginery.api import Model, ModelContext, ModelSpec
from enginery.nn.parallel import SingleRank
from enginery.testing.kits.ranks import RankThreads
from enginery.testing.kits.weights import WholeTensors
from enginery_model_longcat import register_models
from enginery_model_longcat.model import ShortcutDecoder

IDS = [5, 17, 20, 31, 8, 9, 60, 3, 42, 11, 55, 12]
CONFIG = LongcatFlashConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    ffn_hidden_size=48,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    head_dim=4,
    v_head_dim=6,
    moe_topk=3,
    n_routed_experts=5,
    zero_expert_num=4,
    expert_ffn_hidden_size=16,
    rms_norm_eps=1e-3,  # not that of the norms inside the attention
    attn_implementation="eager",
)
STATED = {**CONFIG.to_dict(), "architectures": ["LongcatFlashForCausalLM"]}


@pytest.fixture(scope="module")
def reference() -> LongcatFlashForCausalLM:
    """transformers' model, in float64, with numbers that hide no bug."""
    generator = torch.Generator().manual_seed(0)
    model = LongcatFlashForCausalLM(CONFIG).eval().double()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not name.endswith("inv_freq"):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data.copy_(1 + noise * 0.1 if "norm" in name else noise * tensor.shape[-1] ** -0.5)
    return model


def hub_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """transformers has the experts of a layer in one piece, with a gate and an up for each zero expert; the hub has neither."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for stack in [name for name in weights if name.endswith(".experts.gate_up_proj")]:
        layer = stack.removesuffix("gate_up_proj")
        for expert, (gate_up, down) in enumerate(zip(weights.pop(stack), weights.pop(f"{layer}down_proj"), strict=False)):
            gate, up = gate_up.chunk(2)
            parts = {"gate": gate, "up": up, "down": down}
            weights |= {f"{layer}{expert}.{part}_proj.weight": tensor for part, tensor in parts.items()}
    return weights


def computed(
    weights: Mapping[str, torch.Tensor], family: ModelSpec | None = None, rows: Sequence[int] | None = None, **ranks: int
) -> torch.Tensor:
    """The logits of `IDS`, in float64."""
    tensors = WholeTensors(dict(weights), torch.float64)
    threads = RankThreads(family=family or register_models()[0], config=STATED, tensors=tensors, **ranks)
    return threads.run(IDS, rows)[0].logits


@torch.no_grad()
def test_logits_are_transformers_in_float64(reference: LongcatFlashForCausalLM) -> None:
    expected = reference(torch.tensor([IDS]), use_cache=False).logits[0]
    for ranks in ({}, {"tensor_size": 2}, {"num_stages": 2}):
        actual = computed(hub_weights(reference), **ranks)
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)  # norms, routers and angles are float32
        assert torch.equal(computed(hub_weights(reference), rows=[2, 11], **ranks).argmax(-1), expected[[2, 11]].argmax(-1))


class TwoLanes(SingleRank):
    """What a lane sees whose neighbour has the same rows, and whose own come second."""

    def all_rows(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x))

    def own_rows_sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial[len(partial) // 2 :]

    def add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, of_all_lanes: bool = False
    ) -> torch.Tensor:
        own = self.own_rows_sum(partial) if of_all_lanes else partial
        return super().add_rms_norm(own, residual, weight, eps)


@pytest.mark.parametrize("rows", [None, [2, 11]], ids=str)
def test_zero_experts_add_to_the_rows_of_this_lane_alone(reference: LongcatFlashForCausalLM, rows: list[int] | None) -> None:
    (family,) = register_models()

    def build(context: ModelContext) -> Model:
        return family.build(dataclasses.replace(context, comm=TwoLanes(context.ops)))

    weights = hub_weights(reference)
    actual = computed(weights, dataclasses.replace(family, build=build), rows)
    torch.testing.assert_close(actual, computed(weights, rows=rows), atol=1e-9, rtol=0)


@pytest.mark.parametrize("favoured", [range(5), range(5, 9), [4, 5]], ids=str)
@torch.no_grad()
def test_tokens_with_zero_experts_alone_or_none_are_transformers(
    reference: LongcatFlashForCausalLM, favoured: Sequence[int]
) -> None:
    biases = [buffer for name, buffer in reference.named_buffers() if name.endswith("e_score_correction_bias")]
    before = [bias.clone() for bias in biases]
    for bias in biases:
        bias[list(favoured)] += 10
    try:
        expected = reference(torch.tensor([IDS]), use_cache=False).logits[0]
        torch.testing.assert_close(computed(hub_weights(reference)), expected, atol=2e-6, rtol=0)
    finally:
        for bias, old in zip(biases, before, strict=True):
            bias.copy_(old)


def test_no_token_reads_an_expert_that_it_would_not_read_for_its_own(reference: LongcatFlashForCausalLM) -> None:
    built: list[Any] = []
    (family,) = register_models()

    def build(context: ModelContext) -> Model:
        built.append(family.build(context))
        return built[-1]

    computed(hub_weights(reference), dataclasses.replace(family, build=build))
    assert isinstance(built[0], ShortcutDecoder)
    mixture, x = built[0].mixtures[0], torch.randn(100, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chosen = mixture.choose(mixture.router(x.float()), mixture.bias, mixture.routing)
    routed, share = mixture.route(x)
    for ids, kept, weights, given, part in zip(chosen.ids, routed.ids, routed.weights, chosen.weights, share, strict=True):
        own = set(ids[ids < 5].tolist())
        assert set(kept.tolist()) == (own or {4})
        torch.testing.assert_close(weights.sum() + part[0], given.sum())
        assert (weights > 0).sum() == len(own)
