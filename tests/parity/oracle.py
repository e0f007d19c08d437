"""Tiny random checkpoints written by transformers, with weights that hide no bug, and transformers' own greedy tokens for them."""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pairwise import EVERYTHING
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    LlamaConfig,
    LongcatFlashConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

NUM_GREEDY = 64 if EVERYTHING else 36  # more than a page, a window of 16, or what is kept free for a request that runs
FIRST_ORDINARY_TOKEN = 8
PROMPT_LENGTHS = (5, 33, 1, 16, 47, 64, 20)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    factor=4.0,
    short_factor=[1.0 + 0.1 * index for index in range(8)],
    long_factor=[2.0 + 0.3 * index for index in range(8)],
    original_max_position_embeddings=512,
)

LATENT_YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=0.707
)


def shape(**changes: object) -> dict[str, object]:
    plain: dict[str, object] = dict(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return plain | changes


def latent_shape(**changes: object) -> dict[str, object]:
    """DeepSeek-V2's, dense in every layer; no two of its dims are equal."""
    latent: dict[str, object] = dict(
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=4,
        rope_parameters=LATENT_YARN,
    )
    return shape(**latent, **changes)


def expert_shape(**changes: object) -> dict[str, object]:
    """The sizes of a mixture of experts. Eager experts: the others of transformers pick kernels by what is installed."""
    sizes: dict[str, object] = dict(moe_intermediate_size=32, num_experts_per_tok=3, experts_implementation="eager")
    return sizes | changes


def grouped_expert_shape(**changes: object) -> dict[str, object]:
    """Three of sixteen experts, out of two of four groups, and two that every token has; the first layer is dense."""
    groups: dict[str, object] = dict(n_routed_experts=16, n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=1)
    return expert_shape(routed_scaling_factor=1.5, **groups | changes)


def longcat_shape(**changes: object) -> dict[str, object]:
    """Two layers, each of two attentions; five of eleven experts, of which three do nothing."""
    plain = {key: value for key, value in shape().items() if key not in ("num_hidden_layers", "intermediate_size")}
    longcat: dict[str, object] = dict(
        num_layers=2,
        num_key_value_heads=4,
        ffn_hidden_size=96,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=12,
        moe_topk=5,
        n_routed_experts=8,
        zero_expert_num=3,
        expert_ffn_hidden_size=32,
        routed_scaling_factor=2.0,
    )
    return plain | longcat | changes


HALF_ROTARY = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
FAMILIES: dict[str, PretrainedConfig] = {
    "deepseek-v2": DeepseekV2Config(**latent_shape(q_lora_rank=48)),
    "deepseek-v2-lite": DeepseekV2Config(**latent_shape(q_lora_rank=None)),
    "glm4": Glm4Config(**shape(head_dim=16, rope_parameters=HALF_ROTARY)),
    "llama": LlamaConfig(**shape()),
    "llama-3-rope": LlamaConfig(**shape(head_dim=16, rope_parameters=LLAMA3_ROPE)),
    "llama-tied": LlamaConfig(**shape(tie_word_embeddings=True)),
    "llama-bias": LlamaConfig(**shape(attention_bias=True, mlp_bias=True, head_dim=32, eos_token_id=[2, 7])),
    "llama-mqa": LlamaConfig(**shape(num_key_value_heads=1)),
    "mistral": MistralConfig(**shape(head_dim=16, sliding_window=16)),
    "mistral-full": MistralConfig(**shape(sliding_window=None)),
    "qwen2": Qwen2Config(**shape()),
    "qwen2-window": Qwen2Config(**shape(use_sliding_window=True, sliding_window=16, max_window_layers=2)),
    "qwen3": Qwen3Config(**shape(head_dim=32)),
}
LATENT_EXPERT_FAMILIES: dict[str, PretrainedConfig] = {
    "deepseek-v2-experts": DeepseekV2Config(
        **latent_shape(q_lora_rank=48) | grouped_expert_shape(topk_method="group_limited_greedy", norm_topk_prob=False)
    ),
    "deepseek-v2-lite-experts": DeepseekV2Config(
        **latent_shape(q_lora_rank=None) | grouped_expert_shape(topk_method="greedy", n_group=1, topk_group=1)
    ),
    "deepseek-v3": DeepseekV3Config(
        **latent_shape(q_lora_rank=48) | grouped_expert_shape(topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True)
    ),
    "glm4-moe-lite": Glm4MoeLiteConfig(
        **{
            **latent_shape(q_lora_rank=48),
            **grouped_expert_shape(n_group=1, topk_group=1, mlp_layer_types=["dense", *["sparse"] * 3]),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }
    ),
    "longcat-flash": LongcatFlashConfig(**longcat_shape()),
}
EXPERT_FAMILIES: dict[str, PretrainedConfig] = LATENT_EXPERT_FAMILIES | {
    "glm4-moe": Glm4MoeConfig(
        **shape(head_dim=16, rope_parameters=HALF_ROTARY, attention_bias=True, use_qk_norm=True) | grouped_expert_shape()
    ),
    "minimax-m2": MiniMaxM2Config(**shape(head_dim=32, num_local_experts=8, rope_parameters=HALF_ROTARY) | expert_shape()),
    "mixtral": MixtralConfig(**shape(num_local_experts=8) | expert_shape()),
    "qwen2-moe": Qwen2MoeConfig(
        **shape(num_experts=8, shared_expert_intermediate_size=48, mlp_only_layers=[0], norm_topk_prob=False) | expert_shape()
    ),
    "qwen3-moe": Qwen3MoeConfig(**shape(num_experts=8, head_dim=32, decoder_sparse_step=2, norm_topk_prob=True) | expert_shape()),
}
WINDOWED_EXPERTS: dict[str, PretrainedConfig] = {
    "mixtral-window": MixtralConfig(**shape(num_local_experts=8, sliding_window=16) | expert_shape()),
    "qwen2-moe-window": Qwen2MoeConfig(
        **shape(num_experts=8, shared_expert_intermediate_size=48, use_sliding_window=True, sliding_window=16) | expert_shape()
    ),
    "qwen3-moe-window": Qwen3MoeConfig(
        **shape(num_experts=8, head_dim=32, use_sliding_window=True, sliding_window=16) | expert_shape()
    ),
}
ROPES: dict[str, dict[str, object]] = {
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "dynamic": dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0),
    "yarn": dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64),
    "yarn-mscale": dict(
        rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.0
    ),
    "longrope": LONGROPE,
    "llama3": LLAMA3_ROPE,
}


class GreedyReference(ABC):
    """A model that computes whole sequences at once, without any cache, and its greedy tokens.

    Tests give it an engine's answer as a guess. The guess is checked in one forward pass (teacher forcing): if each of its tokens
    is the likeliest after those before it, it is the greedy answer, by induction. A guess never changes what is returned.
    """

    @abstractmethod
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[tokens, vocabulary]."""

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        """One of each length, without special tokens."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(FIRST_ORDINARY_TOKEN, 256, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]

    @functools.cached_property
    def _known(self) -> dict[tuple[int, ...], list[int]]:
        """By prompt, the `NUM_GREEDY` tokens that were computed before."""
        return {}

    @property
    def greedy(self) -> list[list[int]]:
        """For each prompt, `NUM_GREEDY` tokens. Without a guess that takes a forward pass for each: `greedy_after` is cheaper."""
        return self.greedy_after(self.prompts, [[]] * len(self.prompts))

    def greedy_after(self, prompts: Sequence[list[int]], guesses: Sequence[Sequence[int]]) -> list[list[int]]:
        """For each of the prompts, `NUM_GREEDY` tokens."""
        for prompt, guess in zip(prompts, guesses, strict=True):
            if tuple(prompt) not in self._known:
                self._known[tuple(prompt)] = self.continue_greedily(prompt, NUM_GREEDY, guess)
        return [self._known[tuple(prompt)] for prompt in prompts]

    def continue_greedily(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        """`count` tokens, end-of-sequence or not. Each forward pass takes the guess up to its first wrong token."""
        tokens: list[int] = []
        while len(tokens) < count:
            ids = [*prompt, *tokens, *guess[len(tokens) : count - 1]]
            likeliest = self.logits(ids)[len(prompt) + len(tokens) - 1 :].argmax(-1).tolist()
            for token, guessed in itertools.zip_longest(likeliest, guess[len(tokens) : count]):
                tokens.append(token)
                if token != guessed:
                    break
        return tokens


@dataclass(frozen=True)
class Oracle(GreedyReference):
    """A checkpoint on disk and the transformers model it was written from."""

    folder: Path
    model: torch.nn.Module

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[tokens, vocabulary] float32."""
        return self.model(torch.tensor([ids]), use_cache=False).logits[0]

    def copied(self, folder: Path, *, without: Collection[str], **stated: object) -> str:
        """A copy of the checkpoint whose config.json leaves some keys out and states others."""
        shutil.copytree(self.folder, folder)
        config = json.loads((folder / "config.json").read_text()) | stated
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in without}))
        return str(folder)


def randomise(model: torch.nn.Module) -> None:
    """Default initialisation has norms of 1 and biases of 0, which hides what is left out."""
    generator = torch.Generator().manual_seed(0)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.1)
            elif "embed_tokens" in name:
                parameter.copy_(noise * (0.25 / math.sqrt(parameter.shape[1]) if tied else 1.0))
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1] or 1))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
