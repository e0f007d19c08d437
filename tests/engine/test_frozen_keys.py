"""A draft model that reads the target's keys and values and has none of its own, as Gemma 4's: on a toy that is made here.

C hidden size, H heads of D, K KV heads, S requests, T tokens before the one that was told last.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engine.heads_made import DIM, HEADS, KV_HEADS, SIZE, double, drawn, norm, rotated, states_of
from engine.model_heads import PROMPT, asking, guesses_of, options
from engine.test_kinds_at_random import WINDOWS
from engine.test_speculation import answers_of
from offers import offering
from parity.oracle import FAMILIES, Oracle, shape
from safetensors.torch import save_file
from transformers import LlamaConfig

from enginery.api import (
    CARRIED,
    FEATURES,
    Cut,
    DecoderShape,
    DrafterSpec,
    ForwardBatch,
    LinearShape,
    ModelContext,
    ModelFacts,
    ModelSpec,
    StageTensors,
    read_decoder_shape,
)
from enginery.engine.engine import Engine
from enginery.errors import ConfigError
from enginery.nn.rotary import rotary_table
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.drafts.parts import find_draft_needs

READS = (3, 1)  # the target's last layer, and an earlier one
EPS = 1e-5


def head_shape(config: Mapping[str, object]) -> DecoderShape:
    return read_decoder_shape(config)


class Reader:
    """Mixes the token with what the target computed before it, asks the target's keys twice, and gives a hidden state."""

    def __init__(self, context: ModelContext) -> None:
        weights = context.weights
        self.target, self.attend, self.ops = context.target, context.attend, context.ops
        self.specs = [context.stage.spec(index, scale=DIM**-0.5) for index in range(len(READS))]
        self.mix = weights.linear(LinearShape(names=("mix",), rows=(SIZE,), columns=2 * SIZE))
        own = [weights.scope(f"layers.{index}") for index in range(len(READS))]
        self.norms = [each.take("norm.weight", (SIZE,)) for each in own]
        of_heads = LinearShape(names=("q",), rows=(HEADS * DIM,), columns=SIZE, cut=Cut.ROWS, unit=DIM)
        to_all = LinearShape(names=("out",), rows=(SIZE,), columns=HEADS * DIM, cut=Cut.COLUMNS, unit=DIM)
        self.q, self.out = [each.linear(of_heads) for each in own], [each.linear(to_all) for each in own]
        rope = head_shape(context.config).rope
        self.rotary = rotary_table(rope, context.max_positions, dtype=context.dtype, device=context.device)

    def forward(self, batch: ForwardBatch, arrived: StageTensors) -> torch.Tensor:
        hidden = arrived[FEATURES] if FEATURES in arrived else arrived[CARRIED]
        assert self.target is not None
        x = self.mix(torch.cat((self.target.embedded(batch.input_ids), hidden), -1))
        cos_sin = self.ops.embed(self.rotary, batch.positions)
        nothing = x.new_empty(len(x), self.specs[0].facts.num_kv_heads, DIM)
        for spec, weight, product, out in zip(self.specs, self.norms, self.q, self.out, strict=True):
            q = product(self.ops.rms_norm(x, weight, EPS)).view(len(x), -1, DIM)
            self.ops.qk_norm_rotary(q, None, EPS, cos_sin)
            attended = torch.empty_like(q)
            self.attend(q, nothing, nothing, spec, batch, attended)
            x = x + out(attended.flatten(1))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.target is not None
        return self.target.logits(hidden)


def spec_of(reads: tuple[int, ...] = READS) -> DrafterSpec:
    def describe(config: Mapping[str, object]) -> ModelFacts:
        return head_shape(config).facts()

    model = ModelSpec(name="reader", api=(2, 0), architectures=("Reader",), describe=describe, build=Reader)
    return DrafterSpec(
        name="reader", api=(2, 0), summary="", most=4, takes_features=True, model=model, reads=lambda config, target: reads
    )


def with_reader(registry: Registry, reads: tuple[int, ...] = READS) -> Registry:
    return offering(registry, DrafterSpec, dataclasses.replace(registry.offers(DrafterSpec)[0], spec=spec_of(reads), name="reader"))


def tensors() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"mix.weight": (SIZE, 2 * SIZE)}
    for index in range(len(READS)):
        shapes[f"layers.{index}.norm.weight"] = (SIZE,)
        shapes[f"layers.{index}.q.weight"] = (HEADS * DIM, SIZE)
        shapes[f"layers.{index}.out.weight"] = (SIZE, HEADS * DIM)
    return drawn(shapes)


def write(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    config = shape(num_hidden_layers=len(READS), rms_norm_eps=EPS, **changes) | {"architectures": ["Reader"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(), folder / "model.safetensors")
    return folder


@torch.no_grad()
def expected(target: torch.nn.Module, tokens: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """In float64, by transformers' keys and values of the tokens before the last."""
    own = {name: each.double() for name, each in tensors().items()}
    before = tokens[:-1]
    kept = target(torch.tensor([before]), use_cache=True).past_key_values
    hidden, token = states_of(target, before)[-1][-1], tokens[-1]
    guesses, every = [], []
    for _ in range(count):
        x = torch.cat((target.model.embed_tokens.weight[token], hidden)) @ own["mix.weight"].T
        for index, layer in enumerate(READS):
            q = (norm(x, own[f"layers.{index}.norm.weight"], EPS) @ own[f"layers.{index}.q.weight"].T).view(HEADS, 1, DIM)
            q = rotated(F.pad(q, (0, 0, len(before), 0)))[:, -1]  # [H, D], at the position of the last token
            keys, values = (
                each[0].repeat_interleave(HEADS // KV_HEADS, 0) for each in (kept.layers[layer].keys, kept.layers[layer].values)
            )
            weights = (torch.einsum("hd,hld->hl", q, keys) / math.sqrt(DIM)).softmax(-1)
            x = x + torch.einsum("hl,hld->hd", weights, values).flatten() @ own[f"layers.{index}.out.weight"].T
        logits = x @ target.lm_head.weight.T
        hidden, token = x, int(logits.argmax())
        guesses.append(token)
        every.append(logits)
    return guesses, every


@pytest.fixture
def llama(write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle("llama of four", LlamaConfig(**shape(rms_norm_eps=EPS)))


def test_it_guesses_by_the_targets_keys_and_values(
    llama: Oracle, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind wrong guesses too, whose keys are still there."""
    drafter = {"drafter": "reader", "draft_model": str(write(tmp_path / "reader")), "draft_length": "3"}
    engine = Engine.build(options(llama.folder, page_size=4, **drafter), with_reader(registry))
    found = guesses_of(engine, llama.prompts[4][:PROMPT], monkeypatch)
    target = double(llama)
    assert len(found) > 5
    for tokens, guesses, looked_at in found[:6]:
        tokens_expected, logits = expected(target, tokens, 3)
        assert guesses == tokens_expected
        for one, other in zip(looked_at, logits, strict=True):
            assert torch.allclose(one, other, atol=2e-3, rtol=1e-3)


def test_it_changes_no_token_and_takes_no_page(llama: Oracle, registry: Registry, tmp_path: Path) -> None:
    """Greedy and seeded, micro-batches and small pages; pages are as many bytes as without it."""
    asked = [
        asking(f"{at} {heat}", prompt[: 30 + at], temperature=heat, seed=at, max_tokens=20 + at)
        for at, prompt in enumerate(llama.prompts[1:5])
        for heat in (0.0, 0.8)
    ]
    plain = Engine.build(options(llama.folder), registry)
    told = answers_of(plain, asked)
    drafter = {"drafter": "reader", "draft_model": str(write(tmp_path / "reader")), "draft_length": "4"}
    for changes in ({"page_size": 4, "num_pages": 1200}, {"micro_batches": True}):
        engine = Engine.build(options(llama.folder, **drafter, **changes), with_reader(registry))
        for about, one in answers_of(engine, asked).items():
            assert (one.tokens, one.reason) == (told[about].tokens, told[about].reason), about
        assert engine.meter.stats().drafts.drafted > 100
    asking_for = options(llama.folder, **drafter)
    needs = find_draft_needs(asking_for, with_reader(registry), choose(asking_for, with_reader(registry)))
    assert needs is not None
    assert needs.page_bytes == 0


def test_layers_that_it_cannot_read_are_refused(
    llama: Oracle, write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path
) -> None:
    folder = write(tmp_path / "reader")
    drafter = {"drafter": "reader", "draft_model": str(folder)}
    with pytest.raises(ConfigError, match=r"whose 2 layers read those of .* at \[3, 4\]: each must be there"):
        Engine.build(options(llama.folder, **drafter), with_reader(registry, (3, 4)))
    with pytest.raises(ConfigError, match=r"whose 2 layers read those of .* at \[3\]: each must be there"):
        Engine.build(options(llama.folder, **drafter), with_reader(registry, (3,)))
    wider = {**drafter, "draft_model": str(write(tmp_path / "wider", num_key_value_heads=4))}
    with pytest.raises(ConfigError, match=r"each must be there, with as many KV heads, as wide"):
        Engine.build(options(llama.folder, **wider), with_reader(registry))
    for name, config in (("windows", WINDOWS), ("latents", FAMILIES["deepseek-v2"])):
        with pytest.raises(ConfigError, match="have windows, latents or states, which nobody can read yet"):
            Engine.build(options(write_oracle(name, config).folder, **drafter), with_reader(registry))
