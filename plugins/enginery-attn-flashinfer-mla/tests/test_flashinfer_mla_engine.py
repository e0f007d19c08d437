"""DeepSeek-V2 with its own latent dims through the engine, over kernels in torch: equal to transformers in each strategy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import install

from enginery import LLM, SamplingParams

transformers = pytest.importorskip("transformers")
pytest.importorskip("enginery_model_deepseek")

NUM_TOKENS = 12
PLUGIN = """
import dataclasses

from enginery.api import hookimpl
from enginery_attn_flashinfer_mla.backend import FlashInferMla
from enginery_attn_flashinfer_mla.spec import make_spec
from enginery_attn_flashinfer_mla.torch_kernels import TorchKernels, TorchRagged

ran = []


class Counted(TorchRagged):
    def plan(self, q_indptr, kv_indptr, *, causal):
        ran.append("own" if causal and kv_indptr.equal(q_indptr) else "one piece" if causal else "chunk")
        super().plan(q_indptr, kv_indptr, causal=causal)


class Kernels(TorchKernels):
    def ragged(self, workspace):
        return Counted()


@hookimpl
def register_attn_backends():
    spec = make_spec()
    floats = frozenset({"float32"})
    can = dataclasses.replace(
        spec.capabilities, devices=frozenset({"cpu"}), min_compute_capability=None, dtypes=floats, kv_dtypes=floats
    )
    offered = {"refuse_also": lambda needs: [], "priority": -1, "kernel_store": None}
    return [dataclasses.replace(spec, name="mla-on-torch", capabilities=can, **offered)]


@hookimpl
def create_attn_backend(name, context):
    return FlashInferMla(context, Kernels) if name == "mla-on-torch" else None
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and the model that is in it."""
    config = transformers.DeepseekV2Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=2,
        intermediate_size=96,
        vocab_size=199,
        max_position_embeddings=512,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    folder = tmp_path_factory.mktemp("deepseek")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was planned of ragged pieces, by a plugin that is installed for this test."""
    install(tmp_path, "mla-on-torch", "mla_on_torch", PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    import mla_on_torch

    yield mla_on_torch.ran
    del sys.modules["mla_on_torch"]


def on_torch(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="cpu", attention_backend="mla-on-torch", page_size=4, num_pages=200, **options)


def expected(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("strategy", "options", "kinds"),
    [
        ("absorbed", [], set()),
        ("one-shot", [], {"own", "one piece"}),
        ("chunked", [], {"own", "chunk"}),
        ("chunked", ["mla-on-torch.chunked_prefix=false"], {"own"}),
        ("chunked", ["mla-on-torch.skip_prefill=true"], set()),
    ],
)
def test_greedy_tokens_are_those_of_transformers(checkpoint, ran, *, strategy, options, kinds) -> None:
    folder, model = checkpoint
    random = torch.Generator().manual_seed(7)
    prompts = [torch.randint(199, (length,), generator=random).tolist() for length in (45, 3, 20)]
    chunk = 4096 if strategy == "one-shot" else 8
    llm = on_torch(folder, max_batch_tokens=16, mla_prefill=strategy, mla_chunk_tokens=chunk, plugin_options=options)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = llm.generate(prompts, params)
    assert [list(answer.token_ids) for answer in answers] == [expected(model, prompt) for prompt in prompts]
    assert set(ran) == kinds


def test_guesses_are_verified_by_the_same_backend(checkpoint, ran) -> None:
    folder, model = checkpoint
    prompts = [[5, 9, 11, 7] * 6, [3, 8, 3, 8, 3, 8, 3], list(range(40, 60))]
    llm = on_torch(folder, drafter="lookup", draft_length=3)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert [list(answer.token_ids) for answer in llm.generate(prompts, params)] == [expected(model, prompt) for prompt in prompts]
    *_, last = llm.stream(prompts[0], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias={7: 100.0}))
    assert 0 < last.usage.num_accepted_tokens == last.usage.num_drafted_tokens
