"""The memory plan is made, and refused, before anything is allocated."""

from __future__ import annotations

import dataclasses

import pytest

from enginery.config.resolve import DeviceFacts, resolve
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import AttnLayerFacts, LatentFacts
from enginery.contracts.memory import RecurrentFacts
from enginery.contracts.model import ModelFacts
from enginery.errors import ConfigError, OutOfMemory
from enginery.worker.memory_plan import CUDA_LIBRARY_BYTES, GIB, MemoryPlan, OtherKinds, plan_memory, workspace_bytes
from enginery.worker.sampling import PROMPT_LOGPROB_ROWS

MODEL = ModelFacts(
    vocab_size=1000,
    hidden_size=64,
    max_positions=4096,
    activation_width=512,
    layers=(AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=16),),
)

LATENT = LatentFacts(rank=16, rope_dim=8, nope_dim=16, value_dim=16)
RECURRENT = RecurrentFacts(rule="linear", decay="constant", key_heads=4, value_heads=4, key_dim=16, value_dim=16)


def device(gib: float, kind: str = "cuda") -> DeviceFacts:
    return DeviceFacts(kind=kind, name="a fake", available_bytes=int(gib * GIB), num_threads=2)


def planned(asked: EngineOptions, where: DeviceFacts, *, weights: int = GIB, page_bytes: int = 1 << 20) -> MemoryPlan:
    settings = resolve(asked, where, MODEL, config={})
    return plan_memory(asked, settings, where, weights=weights, workspace=GIB // 4, page_bytes=page_bytes)


def test_kv_memory_takes_what_weights_and_workspace_leave() -> None:
    plan = planned(EngineOptions(memory_fraction=0.5), device(10))
    assert plan.weights_bytes + plan.workspace_bytes + plan.kv_bytes <= plan.budget_bytes == 5 * GIB
    assert plan.budget_bytes - plan.weights_bytes - plan.workspace_bytes - plan.kv_bytes < 2 * plan.page_bytes


def test_on_a_cuda_device_libraries_take_memory_too_and_one_copy_of_the_logits_is_foreseen() -> None:
    asked = EngineOptions(num_pages=10)
    on_cuda, on_cpu = (planned(asked, device(10, kind)).workspace_bytes for kind in ("cuda", "cpu"))
    assert on_cuda - on_cpu == CUDA_LIBRARY_BYTES
    settings = resolve(asked, device(10), MODEL, config={})
    sizes = [workspace_bytes(settings, MODEL, backend_bytes=0, itemsize=2, sampling_copies=copies) for copies in (0, 1, 2)]
    assert sizes[0] == sizes[1] == sizes[2] - 4 * settings.max_batch_requests * MODEL.vocab_size


def test_logits_of_prompts_are_planned_where_they_are_more_than_those_of_a_step() -> None:
    settings = resolve(EngineOptions(max_batch_requests=1, max_batch_tokens=512), device(10), MODEL, config={})
    few, many = (
        workspace_bytes(
            dataclasses.replace(settings, max_batch_requests=count), MODEL, backend_bytes=0, itemsize=2, sampling_copies=1
        )
        for count in (1, 1024)
    )
    assert many - few == (1024 * (2 + 4) - PROMPT_LOGPROB_ROWS * (2 + 4 + 4)) * MODEL.vocab_size


@pytest.mark.parametrize(
    ("layers", "width"),
    [
        ((AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=16),) * 2, 16),
        ((AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=16), AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=32)), 32),
        (tuple(AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=16, sliding_window=window) for window in (8, None)), 32),
        ((AttnLayerFacts(num_heads=4, num_kv_heads=1, head_dim=24, latent=LATENT),), 8),
        ((AttnLayerFacts(num_heads=4, num_kv_heads=4, head_dim=16, recurrent=RECURRENT),), 0),
    ],
)
def test_the_angles_of_each_position_are_planned(layers: tuple[AttnLayerFacts, ...], width: int) -> None:
    model = dataclasses.replace(MODEL, layers=layers)
    sizes = []
    for length in (1024, 2048):
        settings = resolve(EngineOptions(max_model_len=length, max_batch_tokens=512), device(10), model, config={})
        sizes.append(workspace_bytes(settings, model, backend_bytes=0, itemsize=2, sampling_copies=1))
    assert sizes[1] - sizes[0] == 1024 * width * 2


def test_no_more_pages_than_all_requests_together_could_use() -> None:
    asked = EngineOptions(max_batch_requests=2, max_model_len=160)
    assert planned(asked, device(100)).num_pages == 2 * 10


def test_a_cpu_takes_no_more_than_the_default_bound_and_a_flag_raises_it() -> None:
    assert planned(EngineOptions(), device(100, "cpu")).kv_bytes <= 4 * GIB
    assert planned(EngineOptions(kv_memory_gib=8), device(100, "cpu")).kv_bytes > 7 * GIB


@pytest.mark.parametrize("asked", [EngineOptions(), EngineOptions(num_pages=100_000), EngineOptions(kv_memory_gib=64)])
def test_what_does_not_fit_names_the_flags_and_the_sizes(asked: EngineOptions) -> None:
    where = device(1.2) if asked.num_pages is None and asked.kv_memory_gib is None else device(20)
    with pytest.raises(OutOfMemory) as error:
        planned(asked, where)
    for word in ("--memory-fraction", "--max-batch-tokens", "--dtype", "weights 1.00 GiB", "Available on a fake"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("asked", "told", "untold"),
    [
        (EngineOptions(), "a single page of KV memory does not fit: ", "--num-pages"),
        (EngineOptions(num_pages=100_000), "--num-pages 100000 does not fit: .* lower --num-pages, ", "--kv-memory-gib"),
        (EngineOptions(kv_memory_gib=64), "--kv-memory-gib 64 does not fit: .* lower --kv-memory-gib, ", "--num-pages"),
        (
            EngineOptions(kv_memory_gib=1e-6),
            "--kv-memory-gib 1e-06 has no room for a page of 16.* 1.0 MiB; raise it$",
            "fraction",
        ),
    ],
)
def test_what_asks_for_too_much_or_too_little_is_named_and_nothing_else(asked: EngineOptions, told: str, untold: str) -> None:
    with pytest.raises(OutOfMemory, match=f"^{told}") as error:
        planned(asked, device(1.2 if asked == EngineOptions() else 20))
    assert untold not in str(error.value)


@pytest.mark.parametrize(
    "asked",
    [
        EngineOptions(page_size=0),
        EngineOptions(memory_fraction=1.5),
        EngineOptions(prefill_fraction=0.0),
        EngineOptions(kv_memory_gib=0),
        EngineOptions(max_model_len=5000),
        EngineOptions(max_model_len=1),
        EngineOptions(dtype="int8"),
        EngineOptions(load_format="gguf"),
        EngineOptions(max_batch_tokens=0),
        EngineOptions(num_threads=0),
        EngineOptions(num_threads=100_000),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused(asked: EngineOptions) -> None:
    with pytest.raises(ConfigError):
        planned(asked, device(10))


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 2**70), ("seed", -(2**63) - 1), ("num_pages", 2**64), ("record_steps", (2**64, "x"))]
)
def test_a_number_that_no_process_can_be_sent_is_refused_by_every_way_of_asking(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -?[0-9]+, but must be a whole number of at most 64 bits"):
        EngineOptions(**{name: value})
    assert EngineOptions(seed=2**64 - 1).seed == 2**64 - 1


def test_steps_are_larger_on_a_gpu_where_prompts_go_first() -> None:
    sizes = {
        (kind, fraction): resolve(EngineOptions(prefill_fraction=fraction), device(10, kind), MODEL, config={}).max_batch_tokens
        for kind in ("cpu", "cuda")
        for fraction in (None, 1.0)
    }
    assert sizes == {("cpu", None): 2048, ("cpu", 1.0): 2048, ("cuda", None): 8192, ("cuda", 1.0): 16384}


def test_every_setting_says_why() -> None:
    settings = resolve(EngineOptions(max_batch_tokens=77), device(10, "cpu"), MODEL, config={"torch_dtype": "float16"})
    reasons = {decision.setting: (decision.value, decision.reason) for decision in settings.decisions}
    assert reasons["dtype"][0] == "float32"
    assert "float16" in reasons["dtype"][1]
    assert reasons["max_batch_tokens"] == ("77", "asked for")
    assert reasons["max_model_len"][0] == "4096"


def split(asked: EngineOptions, others: OtherKinds, *, gib: float = 10) -> MemoryPlan:
    settings = resolve(asked, device(gib), MODEL, config={})
    return plan_memory(asked, settings, device(gib), weights=0, workspace=0, page_bytes=1 << 20, others=others)


def test_memory_is_split_for_as_many_typical_requests_as_fit_and_is_all_taken() -> None:
    others = OtherKinds(window=129, window_page_bytes=1 << 19, state_bytes=5 << 20)
    short, long = (split(EngineOptions(expected_tokens=tokens), others) for tokens in (512, 4096))
    for plan, pages, points in ((short, 32, 2), (long, 256, 3)):  # a point takes 8 / 2 + 5 MiB, a full page 1
        count = plan.state_pages // (1 + points)
        assert abs(plan.num_pages - count * pages) <= pages + (1 + points) * 4 + 1 + (1 + points) * 5
        assert plan.window_pages >= count * ((1 + points) * 8 + 2)
        assert plan.kv_bytes + plan.state_bytes + plan.workspace_bytes <= plan.budget_bytes
        assert plan.budget_bytes - plan.kv_bytes - plan.state_bytes - plan.workspace_bytes < 2 << 20
    assert short.state_pages > 2 * long.state_pages
    assert f"{long.window_pages:,} window pages, {long.state_pages:,} state pages" in str(long)


@pytest.mark.parametrize(("state_kib", "points"), [(64 << 10, 2), (8 << 10, 4), (4 << 10, 8), (16, 8)])
def test_cheap_resume_points_are_many_and_dear_ones_two(state_kib: int, points: int) -> None:
    """A typical request has 256 MiB of full pages."""
    plan = split(EngineOptions(), OtherKinds(state_bytes=state_kib << 10))
    assert plan.state_pages % (1 + points) == 0
    count = plan.state_pages // (1 + points)
    assert count - 1 <= plan.num_pages // 256 <= count + 1


def test_where_memory_is_ample_more_is_cached_than_can_run() -> None:
    """Full pages are bounded by what all requests may come to, so what is left would stay unused."""
    asked = EngineOptions(max_batch_requests=2, expected_tokens=256)
    plan = split(asked, OtherKinds(state_bytes=8 << 20))
    assert plan.num_pages == 2 * 256
    assert plan.state_pages == 3 * 512 // 16
    others = OtherKinds(window=129, window_page_bytes=1 << 20)
    assert split(asked, others).window_pages == min(2 * 256, 32 * (3 * 8 + 2) + 128)


def test_each_kind_holds_the_largest_request_or_the_plan_is_refused() -> None:
    tight = split(EngineOptions(num_pages=4), OtherKinds(window=1024, window_page_bytes=1 << 20, state_bytes=1 << 20))
    assert tight.window_pages >= 64 + 2 + 4096 // 16 - 66
    assert tight.state_pages >= 2
    with pytest.raises(OutOfMemory):
        split(EngineOptions(), OtherKinds(window=1024, window_page_bytes=64 << 20))
