"""On a CUDA device: models with windows, states or both tell what transformers tells, in graphs and from cached prefixes.

In float32 states move token by token (`delta`), and tokens are equal. fla-core's chunks are for half precision: what they compute
is near, and their launches wait for nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
import transformers
from packaging.version import Version
from parity.engine_driver import each_last_logits, generate, greedy, options
from parity.oracle import Oracle
from parity.test_gemma import GEMMAS
from parity.test_gpt_oss import CONFIG as GPT_OSS
from parity.test_hybrids import HYBRIDS
from parity.test_mamba import FAMILIES as MAMBA
from parity.test_mimo import CONFIG as MIMO

from enginery.config.schema import EngineOptions
from enginery.contracts.step import StepInput
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.testing.readback import no_reads
from enginery.worker.paths.path import Launched

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # Triton compiles its kernels the first time

RECURRENT = HYBRIDS | MAMBA
# In transformers on CPUs: of the first three, prompts longer than a chunk of theirs; gpt-oss does not read swiglu_limit.
WRONG_BEFORE_5_23 = ("bamba", "granite", "mamba2", "gpt-oss")
MODELS = RECURRENT | GEMMAS | {"gpt-oss": GPT_OSS, "mimo": MIMO}
# Not one of all: scans and convolutions are `delta`'s kernels with fla too.
CHUNKED = [
    "bamba",
    "falcon_h1",
    "granite_moe",
    "kimi_linear",
    "minimax",
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "qwen3_5",
    "qwen3_next",
]
ON = {"device": "cuda", "page_size": 16, "max_batch_requests": 16}
PROMPTS = (1, 5, 6)
NUM_TOKENS = 24


def asked(oracle: Oracle, name: str, states: str, **changes: object) -> EngineOptions:
    """states: the backend of recurrent layers."""
    if name.startswith(WRONG_BEFORE_5_23) and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(f"transformers {transformers.__version__} computes {name} wrongly")
    if states == "fla" and find_spec("fla") is None:
        pytest.skip("not installed here: the library fla-core")
    backends = {} if name == "mamba2" else {"attention_backend": "triton"}
    if name in RECURRENT:
        backends["linear_attention_backend"] = states
    return options(oracle, **{**ON, **backends, **changes})


@pytest.mark.parametrize("chunk", [24, 512])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_greedy_tokens_are_equal_in_float32_the_first_time_and_again(
    write_oracle: Callable[..., Oracle], registry: Registry, *, name: str, chunk: int
) -> None:
    oracle = write_oracle(name, MODELS[name])
    engine = Engine.build(asked(oracle, name, "delta", dtype="float32", max_batch_tokens=chunk), registry)
    prompts = [oracle.prompts[place] for place in PROMPTS]
    first = generate(engine, prompts, max_tokens=NUM_TOKENS)
    assert first == [oracle.continue_greedily(*each) for each in zip(prompts, [NUM_TOKENS] * len(prompts), first, strict=True)]
    for place, prompt in enumerate(prompts):
        engine.submit(greedy(str(place), prompt, max_tokens=NUM_TOKENS))
    again, cached = dict[str, list[int]](), dict[str, int]()
    while engine.has_work:
        for output in engine.step():
            again.setdefault(output.request_id, []).extend(output.token_ids)
            cached[output.request_id] = output.num_cached_tokens
    assert [again[str(place)] for place in range(len(prompts))] == first
    assert [cached[str(place)] for place in range(len(prompts))] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert engine.meter.stats().num_graph_steps > NUM_TOKENS
    engine._scheduler.check_idle()


@pytest.mark.parametrize("states", ["delta", "fla"])
@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in CHUNKED), ("nemotron_h_moe", "float16")])
def test_half_precision_stays_close_in_chunks_of_either_kind(
    write_oracle: Callable[..., Oracle], *, name: str, dtype: str, states: str
) -> None:
    """From a state that is zero and, of longer prompts, from one that the chunk before left. See test_parity_gpu for the median."""
    oracle, registry = write_oracle(name, RECURRENT[name]), Registry.load(options=("fla.by_token=0",))
    prompts = oracle.prompts[:6]
    found = each_last_logits(registry, asked(oracle, name, states, dtype=dtype, max_batch_tokens=24), prompts)
    errors = [float((each - wanted).norm() / wanted.norm()) for each, wanted in zip(found, last_of(oracle, prompts), strict=True)]
    assert statistics.median(errors) < 0.06, errors


def last_of(oracle: Oracle, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [oracle.logits(prompt)[-1] for prompt in prompts]


@pytest.mark.parametrize("states", ["delta", "fla"])
@pytest.mark.parametrize("name", ["bamba", "jamba", "kimi_linear", "minimax", "qwen3_next"])
def test_launching_a_step_of_a_hybrid_waits_for_nothing(
    write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch, *, name: str, states: str
) -> None:
    """Of prompts that begin and that go on, beside decoding ones, and in graphs."""
    oracle, registry = write_oracle(name, RECURRENT[name]), Registry.load(options=("fla.by_token=0",))
    wanted = asked(oracle, name, states, dtype="bfloat16", max_batch_tokens=512, max_model_len=512, graphs=True, overlap=True)
    engine = Engine.build(wanted, registry)
    prompts = [[3 + (7 * place + 31 * row) % 240 for place in range(300)] for row in range(4)]
    generate(engine, prompts, max_tokens=8)
    launch, steps = engine._runner.launch, set[tuple[bool, bool]]()

    def watched(step: StepInput) -> Launched:
        with no_reads(torch.device(wanted.device)):
            launched = launch(step)
        steps.add((step.num_decode < step.num_items, step.num_decode > 0))
        return launched

    monkeypatch.setattr(engine._runner, "launch", watched)
    generate(engine, [prompt[::-1] for prompt in prompts], max_tokens=8)
    assert steps == {(True, False), (True, True), (False, True)}
