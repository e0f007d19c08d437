"""A small target, and what guesses for it and is right more often than not, in place of the embedded model with its nine layers.

A token's successor is first of all a function of that token: layers change little of what its embedding says. What drafts has the
embeddings and the output head of the target, and a layer of its own; a head also sees a fifth of the target's hidden state. Prompts
are those of the embedded model's tokenizer.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from engine.heads_made import drawn
from safetensors.torch import save_file

from enginery.config.schema import EngineOptions
from enginery_weights_tiny import DRAFTERS, FOLDER

LAYERS = 2
LITTLE = 0.1  # how much layers change, of what an embedding says
_SIZES: Mapping[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def small_model(**changes: object) -> EngineOptions:
    """As `engine.draft_models.embedded`. Of drafters it has eagle and standalone."""
    given: dict[str, object] = {"num_pages": 300, "num_threads": 1, "dtype": "float32", "model": str(_written("target")), **changes}
    if "drafter" in changes:
        given.setdefault("draft_model", str(_written(str(changes["drafter"]))))
    return EngineOptions(**given)  # type: ignore[arg-type]


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="small-pair-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _written(what: str) -> Path:
    folder = _folder() / what
    shutil.copytree(DRAFTERS.get(what, FOLDER), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "config.json"
    stated = json.loads(path.read_text()) | _SIZES | {"num_hidden_layers": LAYERS if what == "target" else 1}
    path.write_text(json.dumps(stated))
    save_file(_tensors(what, stated["vocab_size"]), folder / "model.safetensors")
    return folder


def _tensors(what: str, vocabulary: int) -> dict[str, torch.Tensor]:
    size, inner, at = 64, 128, "layers" if what == "eagle" else "model.layers"
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(LAYERS if what == "target" else 1):
        for name, rows, columns in (("q", size, size), ("k", 32, size), ("v", 32, size), ("o", size, size)):
            shapes[f"{at}.{index}.self_attn.{name}_proj.weight"] = (rows, columns)
        for name, rows, columns in (("gate", inner, size), ("up", inner, size), ("down", size, inner)):
            shapes[f"{at}.{index}.mlp.{name}_proj.weight"] = (rows, columns)
        if what != "eagle":
            shapes[f"{at}.{index}.input_layernorm.weight"] = (size,)
        shapes[f"{at}.{index}.post_attention_layernorm.weight"] = (size,)
    found = drawn(shapes, seed=len(what))
    for name, each in found.items():
        if "o_proj" in name or "down_proj" in name:
            each *= LITTLE
    if what == "eagle":
        mixed = torch.cat((torch.eye(size), torch.eye(size) / 5), 1)
        return {**found, "fc.weight": mixed, "fc.bias": torch.zeros(size)}
    generator = torch.Generator().manual_seed(5)  # the same for both
    found["model.embed_tokens.weight"] = torch.randn(vocabulary, size, generator=generator)
    found["lm_head.weight"] = torch.randn(vocabulary, size, generator=generator)
    return {**found, "model.norm.weight": torch.ones(size)}
