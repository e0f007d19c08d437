"""The model alone, in float64, against transformers': its pool is a tensor, and attention follows the definition."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, PretrainedConfig

from enginery.api import FULL, ForwardBatch, LayerKV, LayerSpec, LocalLayerId, ModelContext, Phase, StageLayers, View
from enginery.nn.parallel import SingleRank
from enginery.nn.reference_ops import reference_ops
from enginery.testing.kits.weights import WholeTensors, weights_of
from enginery_model_deepseek.spec import build, describe

LENGTH = 24
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.9)


def hub_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """transformers has the experts of a layer in one piece, hub checkpoints one by one."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for stack in [name for name in weights if name.endswith(".experts.gate_up_proj")]:
        layer = stack.removesuffix("gate_up_proj")
        for expert, (gate_up, down) in enumerate(zip(weights.pop(stack), weights.pop(f"{layer}down_proj"), strict=True)):
            gate, up = gate_up.chunk(2)
            parts = {"gate": gate, "up": up, "down": down}
            weights |= {f"{layer}{expert}.{part}_proj.weight": tensor for part, tensor in parts.items()}
    return weights


class Latents:
    """One request's memory, [LENGTH, R + P] per layer, slots being positions."""

    def __init__(self, layers: int, width: int) -> None:
        self.rows = torch.full((layers, LENGTH, width), float("nan"), dtype=torch.float64)

    def by_slot(self, layer: LocalLayerId) -> LayerKV:
        rows = self.rows[layer][:, None]  # [LENGTH, 1, R + P]
        return LayerKV(rows, rows)

    def advance(self, *given: object) -> None:
        raise AssertionError("there are no recurrent layers")

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        assert layer.latent is not None
        assert layer.facts.latent is not None
        facts, count = layer.facts.latent, int(batch.kv_lens_cpu[0])
        latent, rope = self.rows[layer.local_id, :count].split((facts.rank, facts.rope_dim), dim=-1)
        keys, values = torch.einsum("hdr,lr->lhd", layer.latent.kv_b, latent).split((facts.nope_dim, facts.value_dim), dim=-1)
        keys = torch.cat((keys, rope[:, None].expand(-1, layer.facts.num_heads, -1)), dim=-1)
        scores = torch.einsum("thd,lhd->htl", q, keys) * layer.scale
        ahead = torch.arange(count) > batch.positions[:, None]
        out.copy_(torch.einsum("htl,lhv->thv", scores.masked_fill(ahead, float("-inf")).softmax(-1), values))


def step(tokens: torch.Tensor, first: int) -> ForwardBatch:
    count, end = len(tokens), first + len(tokens)
    return ForwardBatch(
        phase=Phase.PREFILL,
        input_ids=tokens,
        positions=torch.arange(first, end),
        q_lens_cpu=torch.tensor([count], dtype=torch.int32),
        kv_lens_cpu=torch.tensor([end], dtype=torch.int32),
        num_logits_cpu=torch.tensor([count], dtype=torch.int32),
        seats_cpu=torch.zeros(1, dtype=torch.int32),
        views={FULL: View(slots=torch.arange(first, end), page_table_cpu=torch.arange(end, dtype=torch.int32)[None])},
    )


SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    rms_norm_eps=1e-3,  # not that of the norms inside the attention
    attn_implementation="eager",
)
DENSE = dict(first_k_dense_replace=2)
EXPERTS = dict(
    first_k_dense_replace=1,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
    experts_implementation="eager",
)
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
BIASED = dict(attention_bias=True, mlp_bias=True)
CONFIGS = {
    "v2-lite": DeepseekV2Config(**SIZES, **DENSE, q_lora_rank=None, rope_parameters=PLAIN),
    "v2-lite-yarn-bias": DeepseekV2Config(**SIZES, **DENSE, **BIASED, q_lora_rank=None, rope_parameters=YARN),
    "v2-bias": DeepseekV2Config(**SIZES, **DENSE, **BIASED, q_lora_rank=48, rope_parameters=PLAIN),
    "v2-yarn": DeepseekV2Config(**SIZES, **DENSE, q_lora_rank=48, rope_parameters=YARN),
    "v2-experts-bias": DeepseekV2Config(
        **SIZES, **EXPERTS, **BIASED, q_lora_rank=48, rope_parameters=PLAIN, topk_method="group_limited_greedy"
    ),
    "v3-yarn": DeepseekV3Config(**SIZES, **EXPERTS, q_lora_rank=48, rope_parameters=YARN),
    "v3-full-rank-bias": DeepseekV3Config(**SIZES, **EXPERTS, attention_bias=True, q_lora_rank=None, rope_parameters=PLAIN),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@torch.no_grad()
def test_logits_are_transformers_in_float64(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config).eval().double()
    for parameter in reference.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    for name, buffer in reference.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(std=0.1)
    stated = {**config.to_dict(), "architectures": [type(reference).__name__]}
    facts = describe(stated)
    memory = Latents(len(facts.layers), facts.layers[0].head_dim)
    ops = reference_ops()
    tensors = WholeTensors(hub_weights(reference), torch.float64)
    model = build(
        ModelContext(
            config=stated,
            facts=facts,
            weights=weights_of(tensors, ops=ops),
            ops=ops,
            attend=memory.attend,
            advance=memory.advance,
            pool=memory,
            device=torch.device("cpu"),
            dtype=torch.float64,
            max_positions=LENGTH,
            stage=StageLayers(layers=range(facts.num_decoder_layers), memory=facts.layers),
            comm=SingleRank(ops),
        )
    )
    assert tensors.asked == set(tensors.tensors), "a tensor was left behind"
    tokens = torch.randint(64, (LENGTH,))
    chunks = [model.logits(model.forward(step(part, first))) for part, first in zip(tokens.split(10), (0, 10, 20), strict=True)]
    expected = reference(tokens[None], use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(chunks), expected, atol=2e-6, rtol=0)  # norms and angles are float32 in both
