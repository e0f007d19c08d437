"""Llama, and an EAGLE head for it, in plain torch with Hugging Face's names, and the folders they are saved in.

B rows, T tokens of a row, C channels, V vocabulary, H query heads, K KV heads, D head dim. There is no KV cache: this is for
training, and for evaluation on short texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

THETA: Final = 10000.0
EPSILON: Final = 1e-5


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Llama. inner: of the feed-forward part. positions: the longest context, as long as texts in training."""

    vocabulary: int = 4096
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    positions: int = 2048

    def config(self, *, architecture: str, begin: int, ends: list[int]) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": [architecture],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": begin,
            "eos_token_id": ends,
        }


TARGET: Final = Shape(hidden=256, inner=704, layers=9, heads=4, kv_heads=2)
DRAFT: Final = Shape(hidden=128, inner=256, layers=3, heads=2, kv_heads=1)
SMALL: Final = Shape(hidden=192, inner=512, layers=5, heads=3, kv_heads=1)
SMALL_DRAFT: Final = Shape(hidden=64, inner=192, layers=1, heads=1, kv_heads=1)


class RMSNorm(nn.Module):
    """In float32, as transformers' LlamaRMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


class Attention(nn.Module):
    """Causal, grouped-query."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, C]; cos, sin: [T, D]."""
        q, k, v = (
            each.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for each in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )  # [B, H or K, T, D]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One decoder layer. normed: with a norm before attention, which EAGLE's layer has not."""

    def __init__(self, shape: Shape, *, normed: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden) if normed else nn.Identity()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A Llama whose output projection is its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.cos, self.sin = angles(shape)  # [positions, D]
        initialise(self, shape.layers)

    def features(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] to the normed states that logits come from, [B, T, C]."""
        length = tokens.shape[1]
        return self.model(tokens, self.cos[:length], self.sin[:length])  # type: ignore[no-any-return]

    def logits(self, features: Tensor) -> Tensor:
        """[..., C] to [..., V]."""
        return functional.linear(features, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.features(tokens))

    def tensors(self) -> dict[str, Tensor]:
        """As saved."""
        return dict(self.state_dict())


class Eagle(nn.Module):
    """EAGLE's head (arXiv 2401.15077): from a token's embedding and the features before it, the features at it.

    Embedding and output projection are the target's. `layers.0` has no norm before attention and there is no final one.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape, normed=False)])
        self.cos, self.sin = angles(shape)  # [positions, D]
        initialise(self, 1)

    def forward(self, embedded: Tensor, features: Tensor) -> Tensor:
        """embedded: of tokens 1 to T, features: at tokens 0 to T - 1, both [B, T, C]. Features at tokens 1 to T, [B, T, C]."""
        x = self.fc(torch.cat((embedded, features), dim=-1))
        return self.layers[0](x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])  # type: ignore[no-any-return]

    def tensors(self, embedding: Tensor) -> dict[str, Tensor]:
        """As saved, for SGLang and vLLM: no prefix, the target's embedding, and a bias of zero because SGLang's `fc` has one."""
        return {**self.state_dict(), "embed_tokens.weight": embedding, "fc.bias": torch.zeros(self.shape.hidden)}


def angles(shape: Shape) -> tuple[nn.Buffer, nn.Buffer]:
    """cos and sin of the rotary embedding, [positions, D], float32."""
    frequencies = THETA ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angle = torch.outer(torch.arange(shape.positions).float(), frequencies).repeat(1, 2)
    return nn.Buffer(angle.cos(), persistent=False), nn.Buffer(angle.sin(), persistent=False)


def initialise(module: nn.Module, num_layers: int) -> None:
    """Normal weights; those that write to the residual stream smaller, the more layers there are."""
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.02 / (2 * num_layers) ** 0.5 if residual else 0.02)


def num_parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def save(tensors: dict[str, Tensor], config: dict[str, Any], folder: Path) -> None:
    """model.safetensors in bfloat16 and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in sorted(tensors.items())}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def shape_of(folder: Path) -> Shape:
    """From config.json."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        positions=config["max_position_embeddings"],
    )


def load_llama(folder: Path, device: str, dtype: torch.dtype) -> Llama:
    """A saved model, as it is shipped. Angles stay float32."""
    model = Llama(shape_of(folder))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    _place(model, device, dtype)
    return model


def load_eagle(folder: Path, device: str, dtype: torch.dtype) -> Eagle:
    """A saved head."""
    model = Eagle(shape_of(folder))
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "fc.bias")})
    _place(model, device, dtype)
    return model


def _place(model: Llama | Eagle, device: str, dtype: torch.dtype) -> None:
    cos, sin = model.cos, model.sin
    model.to(device, dtype).eval()
    model.cos, model.sin = (nn.Buffer(each.to(device), persistent=False) for each in (cos, sin))
