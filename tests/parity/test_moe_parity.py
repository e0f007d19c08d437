"""Mixtures of experts equal transformers: routing alone, logits, and greedy tokens however the work is cut up."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pairwise import EVERYTHING, crossed, in_turn, spread
from parity.engine_driver import (
    RecordingModel,
    assert_greedy,
    assert_last_logits,
    drain,
    each_last_logits,
    generate,
    greedy,
    options,
)
from parity.oracle import (
    EXPERT_FAMILIES,
    FAMILIES,
    LATENT_EXPERT_FAMILIES,
    NUM_GREEDY,
    WINDOWED_EXPERTS,
    Oracle,
    grouped_expert_shape,
    latent_shape,
    randomise,
)
from parity.test_latent_parity import watched
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from enginery.bench.workloads import write_shape
from enginery.checkpoint.decoder_shape import read_grouped_experts
from enginery.checkpoint.files import scan_checkpoint
from enginery.config.schema import EngineOptions
from enginery.contracts.latent import PrefillStrategy
from enginery.contracts.ops import Routing
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.errors import CheckpointError
from enginery.nn import moe
from enginery.nn.moe import MixtureOfExperts
from enginery.nn.reference_experts import route
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.loading import check_weights

UNLIMITED = 4096
OPS = ["packed", "reference"]
MEMORIES = sorted(EXPERT_FAMILIES) if EVERYTHING else ["deepseek-v3", "longcat-flash", "qwen2-moe"]


@pytest.fixture(scope="module", params=OPS)
def any_ops(request: pytest.FixtureRequest) -> Registry:
    """With the CPU plugin's operations and with the core's own."""
    return Registry.load(blocked=() if request.param == "packed" else ("ops-cpu",))


@pytest.fixture(params=sorted(EXPERT_FAMILIES))
def expert_oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(request.param, EXPERT_FAMILIES[request.param])


@pytest.fixture(params=sorted(LATENT_EXPERT_FAMILIES))
def latent_oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(request.param, EXPERT_FAMILIES[request.param])


def prompt_logits(registry: Registry, oracle: Oracle, prompt: list[int], **changes: object) -> torch.Tensor:
    """Of every token of the prompt, chunk by chunk."""
    asked = options(oracle, max_batch_tokens=16, **changes)
    parts = build_parts(asked, registry)
    recording = RecordingModel(parts.step.model)
    engine = Engine(dataclasses.replace(parts, step=parts.step._replace(model=recording)), registry, asked)
    engine.submit(greedy("a", prompt, max_tokens=1, prompt_logprobs=0))
    drain(engine, {})
    return torch.cat(recording.recorded)


def test_checkpoints_have_experts_one_by_one(expert_oracle: Oracle) -> None:
    names = set(scan_checkpoint(expert_oracle.folder))
    assert any(name.endswith((".experts.7.down_proj.weight", ".experts.7.w2.weight")) for name in names)
    assert not any(name.endswith("gate_up_proj") for name in names)


@in_turn(("expert_oracle", sorted(EXPERT_FAMILIES)), ("any_ops", OPS), indirect=["expert_oracle", "any_ops"])
def test_logits_of_a_prompt_are_within_1e_4(expert_oracle: Oracle, any_ops: Registry) -> None:
    prompt = expert_oracle.prompts[4]
    actual = prompt_logits(any_ops, expert_oracle, prompt)
    torch.testing.assert_close(actual, expert_oracle.logits(prompt), atol=1e-4, rtol=0)


@in_turn(
    ("expert_oracle", spread(sorted(EXPERT_FAMILIES), 6)),
    ("page_size, chunk", crossed([1, 16], [16, UNLIMITED])),
    indirect=["expert_oracle"],
)
def test_greedy_tokens_are_equal(expert_oracle: Oracle, registry: Registry, *, page_size: int, chunk: int) -> None:
    asked = options(expert_oracle, page_size=page_size, max_batch_tokens=chunk, max_batch_requests=min(chunk, 256))
    assert_greedy(expert_oracle, generate(Engine.build(asked, registry), expert_oracle.prompts))


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe", "minimax-m2", "mixtral", "qwen2-moe"])
def test_experts_that_transformers_stored_in_one_piece_are_read(
    family: str, registry: Registry, write_oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    oracle = write_oracle(family, EXPERT_FAMILIES[family])
    oracle.model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith(".mlp.experts.gate_up_proj") for name in scan_checkpoint(tmp_path))
    actual = prompt_logits(registry, oracle, oracle.prompts[4], model=str(tmp_path))
    torch.testing.assert_close(actual, oracle.logits(oracle.prompts[4]), atol=1e-4, rtol=0)


def store_float8(model: torch.nn.Module, folder: Path) -> None:
    """DeepSeek-V3's layout: matrices of layers in float8, a scale for each block of 128 x 128. `model` gets the rounded values."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if (".layers." in name and name.endswith("_proj.weight")) or "_proj_with_mqa" in name]:
        weight, blocks = weights[name], [-(-size // 128) for size in weights[name].shape]
        padded = F.pad(weight, (0, blocks[1] * 128 - weight.shape[1], 0, blocks[0] * 128 - weight.shape[0]))
        tiles = padded.view(blocks[0], 128, blocks[1], 128)
        scale = tiles.abs().amax((1, 3)) / 448
        narrow = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        wide = (narrow.float() * scale[:, None, :, None]).view_as(padded)[: weight.shape[0], : weight.shape[1]]
        weight.copy_(wide)
        weights[name] = narrow.view_as(padded)[: weight.shape[0], : weight.shape[1]].contiguous()
        weights[f"{name}_scale_inv"] = scale
        part, expert = name.rpartition(".")[0], re.search(r"(.*experts)\.(\d+)\.(gate|up|down)_proj", name)
        if expert is None:
            model.get_submodule(part).weight.copy_(wide)
        else:
            stack = model.get_submodule(expert[1])
            index, inner = int(expert[2]), stack.down_proj.shape[-1]
            rows = {
                "gate": stack.gate_up_proj[index, :inner],
                "up": stack.gate_up_proj[index, inner:],
                "down": stack.down_proj[index],
            }
            rows[expert[3]].copy_(wide)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("inner_size", [128, 96])
@torch.no_grad()
def test_float8_checkpoints_give_the_logits_of_their_widened_weights(
    registry: Registry, tmp_path: Path, *, inner_size: int
) -> None:
    """Of experts whose inner size is no multiple of 128, gate and up share a block; they are widened when they are read."""
    sizes = grouped_expert_shape(moe_intermediate_size=inner_size, n_routed_experts=8)
    config = DeepseekV3Config(**latent_shape(q_lora_rank=48) | sizes | {"hidden_size": 192, "num_hidden_layers": 2})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval().float()
    randomise(model)
    store_float8(model, tmp_path)
    oracle = Oracle(tmp_path, model)
    experts = "model.layers.1.mlp.experts.7.up_proj.weight"
    stored = scan_checkpoint(tmp_path)
    assert (stored[experts].dtype, stored[f"{experts}_scale_inv"].shape) == ("F8_E4M3", (1, 2))
    actual = prompt_logits(registry, oracle, oracle.prompts[4])
    torch.testing.assert_close(actual, oracle.logits(oracle.prompts[4]), atol=1e-4, rtol=0)
    record = check_weights(choose(options(oracle), registry)).record
    narrow = [piece for piece in record.pieces if piece.dtype is torch.float8_e4m3fn]
    assert len(narrow) == (2 if inner_size == 128 else 0)  # gate and up, down


def test_float8_shapes_run_with_random_weights(registry: Registry, tmp_path: Path) -> None:
    sizes = grouped_expert_shape(moe_intermediate_size=128)
    config = DeepseekV3Config(**latent_shape(q_lora_rank=48) | sizes)
    stated = {**config.to_dict(), "architectures": ["DeepseekV3ForCausalLM"]}
    stated["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    asked = EngineOptions(model=str(tmp_path), load_format="dummy", num_pages=100, device="cpu")
    (tokens,) = generate(Engine.build(asked, registry), [[5, 6, 7]], max_tokens=4)
    assert len(tokens) == 4


@pytest.mark.parametrize(
    "stated", [{"quant_method": "gptq"}, {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [64, 64]}]
)
def test_other_quantisations_are_refused(registry: Registry, tmp_path: Path, stated: dict[str, object]) -> None:
    config = {**EXPERT_FAMILIES["mixtral"].to_dict(), "architectures": ["MixtralForCausalLM"], "quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config"):
        choose(EngineOptions(model=str(tmp_path), load_format="dummy", device="cpu"), registry)


@pytest.mark.parametrize("expert_oracle", spread(sorted(EXPERT_FAMILIES), 4), indirect=True)
def test_a_request_alone_gives_the_tokens_it_gives_among_others(expert_oracle: Oracle, registry: Registry) -> None:
    assert_greedy(
        expert_oracle,
        generate(Engine.build(options(expert_oracle), registry), expert_oracle.prompts[1:2]),
        expert_oracle.prompts[1:2],
    )


@pytest.mark.parametrize("expert_oracle", MEMORIES, indirect=True)
def test_prefix_cache_hits_change_no_token(expert_oracle: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(expert_oracle, page_size=16), registry)
    prompt = expert_oracle.prompts[5]
    (expected,) = generate(engine, [prompt])
    assert_greedy(expert_oracle, [expected], [prompt])
    engine.submit(greedy("again", prompt))
    engine.submit(greedy("longer", prompt + expected[:20], max_tokens=NUM_GREEDY - 20))
    tokens: dict[str, list[int]] = {"again": [], "longer": []}
    cached: dict[str, int] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            cached[output.request_id] = output.num_cached_tokens
    assert cached["again"] >= 48
    assert cached["longer"] >= 64
    assert tokens == {"again": expected, "longer": expected[20:]}


@in_turn(("latent_oracle", spread(sorted(LATENT_EXPERT_FAMILIES), 3)), ("strategy", PrefillStrategy), indirect=["latent_oracle"])
def test_every_prefill_strategy_gives_equal_logits_and_tokens(
    latent_oracle: Oracle, registry: Registry, *, strategy: PrefillStrategy
) -> None:
    asked = {"mla_prefill": str(strategy), "mla_chunk_tokens": 4096 if strategy is PrefillStrategy.ONE_SHOT else 8}
    prompt = latent_oracle.prompts[5]
    actual = prompt_logits(registry, latent_oracle, prompt, **asked)
    torch.testing.assert_close(actual, latent_oracle.logits(prompt), atol=1e-4, rtol=0)
    engine, reader = watched(options(latent_oracle, max_batch_tokens=16, max_batch_requests=16, **asked), registry)
    assert_greedy(latent_oracle, generate(engine, latent_oracle.prompts))
    assert reader.strategies == {strategy}
    assert reader.longest_prefix >= 32
    assert reader.most_chunks >= (4 if strategy is PrefillStrategy.CHUNKED else 0)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Triton's attention and operations, on the CPU."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no CUDA device; on one, tests/gpu runs them")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    precision = pytest.importorskip("enginery_ops_triton.kernels.precision")
    pytest.importorskip("enginery_attn_triton.backend")
    if not precision.INTERPRETED.value:
        pytest.skip("triton was imported for the compiler in this process")
    return Registry.load()


def small(config: PretrainedConfig) -> PretrainedConfig:
    """Two layers and four experts: the interpreter takes milliseconds for every program."""
    stated = {**config.to_dict(), "num_hidden_layers": 2, "num_experts_per_tok": 2}
    stated |= {name: 4 for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in stated}
    stated |= {"n_group": 2, "topk_group": 1} if stated.get("n_group", 1) != 1 else {}
    stated |= {"layer_types": stated["layer_types"][:2]} if stated.get("layer_types") else {}
    return type(config)(**stated)


INTERPRETED = {
    "glm4": [{}],
    **{name: [{}] for name in EXPERT_FAMILIES.keys() - LATENT_EXPERT_FAMILIES.keys()},
    "deepseek-v2-experts": [{"mla_prefill": str(strategy)} for strategy in PrefillStrategy],
    "deepseek-v2-lite-experts": [{"mla_prefill": "chunked"}],
    "deepseek-v3": [{"mla_prefill": "absorbed"}],
    "longcat-flash": [{"mla_prefill": "absorbed"}],  # tests/gpu has each family with each strategy
}


SOME_INTERPRETED = {
    "glm4": [{}],
    "qwen2-moe": [{}],
    "deepseek-v2-experts": [{"mla_prefill": "chunked"}],
    "deepseek-v3": [{"mla_prefill": "absorbed"}],
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [(name, changes) for name, many in sorted((INTERPRETED if EVERYTHING else SOME_INTERPRETED).items()) for changes in many],
    ids=str,
)
def test_triton_in_its_interpreter_gives_equal_logits_and_tokens(
    interpreted: Registry, write_oracle: Callable[..., Oracle], *, family: str, changes: dict[str, str]
) -> None:
    """A prompt in two chunks, whose pairs of tokens and experts are sorted into tiles, and three decoding steps, whose are not."""
    oracle = write_oracle(f"small-{family}", small((FAMILIES | EXPERT_FAMILIES)[family]))
    prompt = oracle.prompts[3][:11]
    more = {"mla_chunk_tokens": 4096 if changes["mla_prefill"] == "one-shot" else 4} if changes else {}
    asked = options(oracle, attention_backend="triton", max_batch_tokens=8, **changes, **more)
    engine, reader = watched(asked, interpreted)
    decisions = {(setting, value.partition(":")[0]) for setting, value, _ in engine.facts.decisions}
    assert {("attention", "triton"), ("ops", "triton")} <= decisions
    engine.submit(greedy("a", prompt, max_tokens=4, prompt_logprobs=0))
    tokens = drain(engine, {})["a"]
    assert tokens == oracle.continue_greedily(prompt, 4, guess=tokens)
    torch.testing.assert_close(torch.cat(reader.recorded), oracle.logits([*prompt, *tokens[:-1]]), atol=1e-4, rtol=0)
    if changes:
        assert reader.strategies == {PrefillStrategy(changes["mla_prefill"])}
        assert reader.most_chunks == (2 if changes["mla_prefill"] == "chunked" else 0)


@pytest.mark.parametrize("rows", [0, 64])
@pytest.mark.parametrize(("family", "joined"), [("deepseek-v2-experts", 2), ("glm4-moe", 2), ("qwen2-moe", 0), ("joined", 2)])
def test_a_shared_expert_that_is_a_whole_number_of_experts_is_computed_with_them_for_few_tokens(
    any_ops: Registry,
    write_oracle: Callable[..., Oracle],
    monkeypatch: pytest.MonkeyPatch,
    *,
    family: str,
    joined: int,
    rows: int,
) -> None:
    """`joined` is Qwen2-MoE with a shared expert of that size, whose gate becomes the weight."""
    monkeypatch.setattr(moe, "JOINED_ROWS", rows)
    changed = {**EXPERT_FAMILIES["qwen2-moe"].to_dict(), "shared_expert_intermediate_size": 64}
    oracle = write_oracle(family, Qwen2MoeConfig(**changed) if family == "joined" else EXPERT_FAMILIES[family])
    actual = prompt_logits(any_ops, oracle, oracle.prompts[4])
    torch.testing.assert_close(actual, oracle.logits(oracle.prompts[4]), atol=1e-4, rtol=0)
    mixtures = [
        layer.mlp for layer in build_parts(options(oracle), any_ops).step.model.layers if isinstance(layer.mlp, MixtureOfExperts)
    ]
    assert {(mixture.num_joined, mixture.shared is None) for mixture in mixtures} == {(joined, joined > 0)}


@pytest.mark.parametrize("family", sorted(WINDOWED_EXPERTS))
def test_windows_beside_experts_are_honoured(family: str, registry: Registry, write_oracle: Callable[..., Oracle]) -> None:
    oracle = write_oracle(family, WINDOWED_EXPERTS[family])
    prompt = oracle.prompts[5]
    assert_greedy(oracle, generate(Engine.build(options(oracle, max_batch_tokens=16), registry), [prompt]), [prompt])


@in_turn(("expert_oracle", sorted(EXPERT_FAMILIES)), ("dtype", ["bfloat16", "float16"]), indirect=["expert_oracle"])
def test_half_precision_stays_close(expert_oracle: Oracle, registry: Registry, *, dtype: str) -> None:
    """Rounding may choose another expert for a token, so most of several prompts are looked at, and not each."""
    errors = []
    answers = each_last_logits(registry, options(expert_oracle, dtype=dtype), expert_oracle.prompts)
    for prompt, answer in zip(expert_oracle.prompts, answers, strict=True):
        expected = expert_oracle.logits(prompt)[-1]
        errors.append(((answer - expected).norm() / expected.norm()).item())
    assert sorted(errors)[len(errors) // 2] < (0.04 if dtype == "bfloat16" else 0.006), errors


@pytest.mark.parametrize("family", ["deepseek-v2-experts", "deepseek-v3", "qwen2-moe", "qwen3-moe"])
@torch.no_grad()
def test_a_thousand_tokens_go_to_the_experts_that_transformers_chooses(family: str) -> None:
    config = EXPERT_FAMILIES[family]
    if family.startswith("qwen"):
        router, routing = Qwen2MoeTopKRouter(config), Routing(top_k=3, renormalise=family == "qwen3-moe")
    else:
        is_v3 = family == "deepseek-v3"
        router = (DeepseekV3TopkRouter if is_v3 else DeepseekV2TopkRouter)(config)
        experts = read_grouped_experts(config.to_dict(), scoring="sigmoid" if is_v3 else "softmax")
        assert experts is not None
        routing = experts.routing
    generator = torch.Generator().manual_seed(0)
    router.weight.copy_(torch.randn(router.weight.shape, generator=generator) / 8)
    bias = torch.randn(16, generator=generator) * 0.1 if family == "deepseek-v3" else None
    if bias is not None:
        router.e_score_correction_bias.copy_(bias)
    logits, weights, ids = router(torch.randn(1000, 64, generator=generator))
    routed = route(logits, bias, routing)
    mine, theirs = torch.zeros_like(logits), torch.zeros_like(logits)
    mine.scatter_(1, routed.ids.long(), routed.weights)
    torch.testing.assert_close(mine, theirs.scatter_(1, ids, weights), atol=1e-6, rtol=1e-5)


def test_scores_that_are_all_zero_give_weights_of_zero() -> None:
    routed = route(torch.full((2, 4), -200.0), None, Routing(top_k=2, scoring="sigmoid", renormalise=True))
    assert routed.weights.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("name", "count"), [("deepseek-v2-lite", 15.7e9), ("qwen3-30b-a3b", 30.5e9), ("mixtral-8x7b", 46.7e9)])
def test_shapes_of_the_benchmarks_have_as_many_parameters_as_their_model_cards_say(
    registry: Registry, tmp_path: Path, *, name: str, count: float
) -> None:
    asked = EngineOptions(model=str(write_shape(name, tmp_path)), load_format="dummy", device="cpu", dtype="bfloat16")
    assert check_weights(choose(asked, registry)).record.num_bytes() / 2 == pytest.approx(count, rel=0.005)


def test_what_files_of_deepseek_v3_leave_out_is_as_in_its_own_code(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path
) -> None:
    """Which is what transformers has too."""
    sizes = latent_shape(q_lora_rank=48) | grouped_expert_shape(n_routed_experts=16, n_group=8, topk_group=4, n_shared_experts=1)
    oracle = write_oracle(
        "deepseek-v3-defaults", DeepseekV3Config(**sizes | {"routed_scaling_factor": 2.5, "num_experts_per_tok": 8})
    )
    left_out = ("n_group", "topk_group", "n_shared_experts", "num_experts_per_tok", "routed_scaling_factor")
    folder = oracle.copied(tmp_path / "hub", without=left_out)
    assert_last_logits(oracle, registry, oracle.prompts[1:2], model=folder)
