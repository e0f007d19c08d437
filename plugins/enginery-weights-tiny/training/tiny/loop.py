"""Training: the target on shards of generated text; then, against it, the EAGLE head and the small draft model, both in one pass.

A run is reproducible from its seed and its number of steps, as far as the device's arithmetic is. Given seconds instead of
steps, the number of steps is chosen after some have been timed, before the learning rate depends on it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tiny.corpus import shard_path
from tiny.model import Eagle, Llama

Loss = Callable[[Tensor], dict[str, Tensor]]
TIMED = (40, 80)  # the steps that are timed to choose how many there will be


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train. steps: 0 chooses as many as `seconds` have room for. rows: of `length` tokens, in a batch."""

    seconds: float = 0.0
    steps: int = 0
    rows: int = 32
    length: int = 2048
    rate: float = 2e-3
    warm_up: int = 300
    decay: float = 0.1
    compiled: bool = True


@dataclass
class Curve:
    """Losses as they went: step, and the mean since the entry before."""

    losses: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


def batches(folder: Path, count: int, settings: Settings, *, first: int = 0, patience_s: float = 120.0) -> Iterator[Tensor]:
    """Rows of the shards, [rows, length] int64, shard after shard from `first` on, and again from 0 when all `count` are through.

    Waits for a shard that is not written yet; `TimeoutError` if none comes.
    """
    number = first
    while True:
        path, waited = shard_path(folder, number % count), 0.0
        while not path.exists():
            if waited > patience_s:
                raise TimeoutError(f"{path} was not written within {patience_s:.0f} s")
            time.sleep(0.05)
            waited += 0.05
        tokens = np.load(path)
        rows = torch.from_numpy(tokens[: len(tokens) // settings.length * settings.length].astype(np.int64)).view(
            -1, settings.length
        )
        for at in range(0, len(rows) - settings.rows + 1, settings.rows):
            yield rows[at : at + settings.rows]
        number += 1


def rate_at(step: int, total: int | None, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < settings.warm_up or total is None:
        return settings.rate * min(1.0, (step + 1) / settings.warm_up)
    done = (step - settings.warm_up) / max(1, total - settings.warm_up)
    return settings.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal (Keller Jordan, 2024), with AdamW's step size (arXiv 2502.16982).

    For the matrices of layers. As torch.optim.Muon, but in float32, which CPUs are good at, and all matrices of a shape at once.
    """

    def __init__(self, matrices: list[nn.Parameter], *, rate: float, decay: float) -> None:
        shapes = {matrix.shape: [other for other in matrices if other.shape == matrix.shape] for matrix in matrices}
        super().__init__([{"params": alike} for alike in shapes.values()], {"lr": rate, "weight_decay": decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradient = torch.stack([weight.grad for weight in group["params"]])  # [matrices, rows, columns]
            average = self.state[group["params"][0]].setdefault("average", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - group["momentum"])
            steps = orthogonal(gradient.lerp(average, group["momentum"])) * (0.2 * max(gradient.shape[1:]) ** 0.5)
            for weight, step in zip(group["params"], steps, strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * step)


def orthogonal(matrices: Tensor) -> Tensor:
    """Each of [matrices, rows, columns] with its singular values near 1, by five Newton-Schulz iterations."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x if wide else x.mT


def optimisers(modules: list[nn.Module], settings: Settings, device: str) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW for embeddings and norms, which do not decay."""
    named = [named for module in modules for named in module.named_parameters()]
    matrices = [weight for name, weight in named if weight.dim() == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.dim() == 1 or "embed" in name]
    return [
        Muon(matrices, rate=settings.rate, decay=settings.decay),
        torch.optim.AdamW(others, lr=settings.rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=device == "cuda"),
    ]


def next_token_loss(model: Llama) -> Loss:
    """Cross entropy of each token after the first of a row."""

    def loss(tokens: Tensor) -> dict[str, Tensor]:
        logits = model(tokens)[:, :-1]
        return {"loss": functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())}

    return loss


def draft_losses(target: Llama, draft: Llama, eagle: Eagle) -> Loss:
    """Of both drafters against the target's distributions; of EAGLE also the distance to the target's features, as in its paper.

    The features that EAGLE reads are disturbed a little, because later steps of a chain read its own.
    """
    vocabulary = target.shape.vocabulary

    def against(logits: Tensor, teacher: Tensor) -> Tensor:
        """Cross entropy with the teacher's distribution."""
        return functional.cross_entropy(logits.reshape(-1, vocabulary).float(), teacher.reshape(-1, vocabulary).float().softmax(-1))

    def loss(tokens: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            features = target.features(tokens)  # [B, T, C]
            teacher = target.logits(features)  # [B, T, V]
        noise = (torch.rand_like(features) - 0.5) * 0.2
        embedded = functional.embedding(tokens[:, 1:], target.model.embed_tokens.weight.detach())
        foreseen = eagle(embedded, (features + noise)[:, :-1])  # [B, T - 1, C]
        said = functional.linear(foreseen, target.model.embed_tokens.weight.detach())
        return {
            "draft": against(draft(tokens), teacher),
            "eagle": against(said, teacher[:, 1:]),
            "eagle features": functional.smooth_l1_loss(foreseen.float(), features[:, 1:].float()),
        }

    return loss


def train(modules: list[nn.Module], loss: Loss, source: Iterator[Tensor], settings: Settings, *, device: str, name: str) -> Curve:
    """Train the modules in place on the sum of the losses."""
    torch.set_float32_matmul_precision("high")
    optimise = optimisers(modules, settings, device)
    step_loss = torch.compile(loss, dynamic=False) if settings.compiled else loss
    total = settings.steps or None
    curve, since, started = Curve(), {}, time.perf_counter()
    sums: dict[str, Tensor] = {}
    step = 0
    while total is None or step < total:
        if step in TIMED and total is None:
            if device == "cuda":
                torch.cuda.synchronize()
            since[step] = time.perf_counter()
            if step == TIMED[1]:
                a_step = (since[TIMED[1]] - since[TIMED[0]]) / (TIMED[1] - TIMED[0])
                total = step + max(1, int((settings.seconds - (since[step] - started)) / a_step))
                print(f"{name}: {a_step * 1e3:.1f} ms a step, so {total} steps", flush=True)
        tokens = next(source).to(device, non_blocking=True)
        rate = rate_at(step, total, settings)
        for each in optimise:
            for group in each.param_groups:
                group["lr"] = rate
        try:
            losses = _backward(step_loss, tokens, device)
        except Exception as error:
            if step or not settings.compiled:
                raise
            print(f"{name}: goes on without torch.compile: {error!r:.300}", file=sys.stderr, flush=True)
            settings, step_loss = replace(settings, compiled=False), loss
            for each in optimise:
                each.zero_grad(set_to_none=True)
            losses = _backward(step_loss, tokens, device)
        for module in modules:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for each in optimise:
            each.step()
            each.zero_grad(set_to_none=True)
        for key, value in losses.items():
            sums[key] = sums.get(key, torch.zeros((), device=device)) + value.detach()
        step += 1
        every = 50 if step > 100 else 10
        if step % every == 0 or step == total:
            last = curve.losses["loss" if "loss" in sums else next(iter(sums))][-1][0] if curve.losses else 0
            for key, value in sums.items():
                curve.losses.setdefault(key, []).append((step, value.item() / (step - last)))
            sums = {}
            if step % (every * 5) == 0 or step == total:
                said = ", ".join(f"{key} {entries[-1][1]:.4f}" for key, entries in curve.losses.items())
                print(f"{name}: step {step} of {total or '?'}, {said}, {time.perf_counter() - started:.0f} s", flush=True)
    curve.steps, curve.tokens, curve.seconds = step, step * settings.rows * settings.length, time.perf_counter() - started
    return curve


def _backward(loss: Loss, tokens: Tensor, device: str) -> dict[str, Tensor]:
    """The losses, with their gradients added to the weights."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        losses = loss(tokens)
    torch.autograd.backward(list(losses.values()))
    return losses
