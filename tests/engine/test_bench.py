"""Benchmarks from end to end, on tiny shapes: every command's JSON, and that each compares with itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import EVERYTHING
from typer.testing import CliRunner

from enginery.bench import device_limits, workloads
from enginery.bench import kernels as kernel_bench
from enginery.bench.floor import DeviceLimits
from enginery.bench.kernels import Sizes
from enginery.bench.startup import start_once
from enginery.bench.workloads import Workload
from enginery.cli.main import build_app
from enginery.config.schema import EngineOptions
from enginery.contracts.ops import OpNeeds
from enginery.errors import EnginError, PluginError, Unsupported
from enginery.plugin.registry import Registry

Bench = Callable[..., dict[str, Any]]
SHAPE = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    torch_dtype="float32",
)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny shape; device limits take no time."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    monkeypatch.setattr(device_limits, "_SIZES", {"cpu": (1 << 20, 64, 0.0)})
    return tmp_path


@pytest.fixture
def bench(tiny: Path) -> Bench:
    """Runs `engine bench` on a CPU and returns its report."""

    def run(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(build_app(), ["bench", *arguments, "--device", "cpu", "--json"])
        if result.exception is not None:
            raise result.exception
        report: dict[str, Any] = json.loads(result.stdout)
        return report

    return run


def test_offline_reports_rate_floor_and_what_was_shared(bench: Bench, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Workload(name="T5", shape=str(tiny), summary="tiny", lengths=((40, 8),) * 4, shared_prefix=32)
    monkeypatch.setitem(workloads.WORKLOADS, "T5", shared)
    report = bench("offline", "T5", "--repeats", "1", "--num-pages", "64", "--attention-backend", "torch")
    (row,), (limits,) = report["rows"], report["limits"]
    assert row["what"] == {"workload": "T5", "shape": str(tiny), "dtype": "float32", "prompt_tokens": 160, "output_tokens": 32}
    assert row["derived"]["output_tokens_per_s"] == pytest.approx(32 / row["measured"]["total_s"])
    assert 0 < row["derived"]["fraction"] == row["derived"]["floor_s"] / row["measured"]["total_s"]
    assert row["details"]["cached_tokens"] == 3 * 32
    assert row["details"]["attention"] == "torch"
    assert limits["dtype"] == "float32"
    assert report["settings"] == {"device": "cpu", "num_pages": 64, "attention_backend": "torch"}


def test_forced_acceptance_tells_as_many_tokens_as_its_rates_say(bench: Bench, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 120 if EVERYTHING else 60
    monkeypatch.setitem(workloads.WORKLOADS, "T6", Workload(name="T6", shape=str(tiny), summary="tiny", lengths=((9, tokens),) * 6))
    speculating = ("--drafter", "eagle", "--force-acceptance", "0.9,0.6,0.5", "--attention-backend", "torch")
    report = bench("offline", "T6", "--repeats", "1", "--num-pages", "128", *speculating)
    plain, none, forced, never, always = report["rows"]
    assert [row["what"]["run"] for row in report["rows"]] == ["plain", "no guesses", "forced 0.9,0.6,0.5", "forced 0", "forced 1"]
    assert [row["details"]["forced"] for row in report["rows"]] == [False, False, True, True, True]
    assert {row["what"]["output_tokens"] for row in report["rows"]} == {6 * tokens}
    lengths = [row["derived"]["acceptance_length"] for row in (forced, never, always)]
    assert lengths == pytest.approx([1 + 0.9 + 0.9 * 0.6 + 0.9 * 0.6 * 0.5, 1, 4], rel=0.07)
    assert lengths[1] == 1, "a guess that happens to be right is none"
    assert forced["derived"]["expected_length"] == pytest.approx(2.71)
    assert [row["derived"]["acceptance_length"] for row in (plain, none)] == [None, None]
    assert none["details"]["steps"] == plain["details"]["steps"] == never["details"]["steps"] > 3 * always["details"]["steps"]
    assert forced["details"]["step_gap_s"] > 0
    assert [row["details"]["round_s"] for row in (plain, none)] == [None, None], "nothing is verified"
    rounds = [row["details"]["round_s"] for row in (forced, never, always)]
    assert all(list(each) == ["verify", "follow", "steps", "between"] and min(each.values()) > 0 for each in rounds)
    assert sum(forced["details"]["round_s"].values()) == pytest.approx(forced["details"]["step_run_s"], rel=0.5)


def test_acceptance_is_forced_of_a_module_in_the_target_s_own_checkpoint(
    bench: Bench, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which no other folder is named for."""
    experts = {"num_experts": 0, "decoder_sparse_step": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 16}
    config = SHAPE | experts | dict(architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", num_nextn_predict_layers=1)
    config |= dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, attention_bias=False, routed_scaling_factor=1.0)
    (tiny / "config.json").write_text(json.dumps(config | dict(n_group=1, topk_group=1, norm_topk_prob=True, use_qk_norm=False)))
    monkeypatch.setitem(workloads.WORKLOADS, "T6", Workload(name="T6", shape=str(tiny), summary="tiny", lengths=((9, 13),) * 2))
    speculating = ("--drafter", "mtp", "--force-acceptance", "1,1", "--num-threads", "1", "--attention-backend", "torch")
    rows = bench("offline", "T6", "--repeats", "1", "--num-pages", "128", *speculating)["rows"]
    assert [row["derived"]["acceptance_length"] for row in rows] == [None, None, 3, 1, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--force-acceptance", "0.5"), "needs a draft model, and --drafter is off"),
        (("--force-acceptance", "1.5", "--drafter", "eagle"), "must be shares between 0 and 1"),
        (("--force-acceptance", "0.5", "--drafter", "eagle", "--draft-length", "3"), "has 1 rates; leave one out"),
        (("--force-acceptance", "0.5", "--drafter", "lookup"), "which is no head; give a draft model"),
    ],
)
def test_acceptance_that_cannot_be_forced_is_refused(bench: Bench, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(EnginError, match=message):
        bench("offline", "C1", *arguments)


def test_a_model_without_a_floor_is_measured_all_the_same(bench: Bench, tmp_path: Path) -> None:
    echo = dict(architectures=["EchoForCausalLM"], vocab_size=97, max_position_embeddings=256)
    (tmp_path / "config.json").write_text(json.dumps(echo))
    report = bench("latency", str(tmp_path), "--load-format", "dummy", "--num-pages", "32", "--input-len", "4", "--output-len", "2")
    (row,) = report["rows"]
    assert row["derived"] == {"floor_s": None, "fraction": None}
    assert row["measured"]["total_s"] > 0


def test_latency_has_a_row_for_each_batch_size(bench: Bench, tiny: Path) -> None:
    lengths = ("--input-len", "20", "--output-len", "6", "--repeats", "2")
    report = bench(
        "latency", str(tiny), "--load-format", "dummy", "--num-pages", "64", "--batch-size", "1", "--batch-size", "3", *lengths
    )
    one, three = report["rows"]
    assert [row["what"]["batch_size"] for row in (one, three)] == [1, 3]
    assert (one["what"]["input_len"], one["what"]["output_len"]) == (20, 6)
    measured = three["measured"]
    assert 0 < measured["first_token_p50_s"] <= measured["first_token_p99_s"] <= measured["total_s"] * 2
    assert 0 < measured["per_token_p50_s"] <= measured["per_token_p90_s"] <= measured["per_token_p99_s"]


@pytest.mark.usefixtures("own_processes")
def test_startup_measures_fresh_processes(bench: Bench, tiny: Path) -> None:
    report = bench("startup", str(tiny), "--load-format", "dummy", "--num-pages", "16", "--repeats", "1", "--input-len", "5")
    (row,) = report["rows"]
    assert row["what"] == {"model": str(tiny), "dtype": "float32", "load_format": "dummy", "input_len": 5}
    measured, phases = row["measured"], row["details"]["phases_s"]
    assert measured["first_token_s"] == pytest.approx(measured["ready_s"] + measured["first_token_after_ready_s"])
    assert {"imports", "plugins", "prompt", "second token"} <= phases.keys()
    assert 0.1 < sum(phases.values()) - phases["second token"] <= measured["first_token_s"]


def test_a_start_that_fails_says_why_without_a_traceback() -> None:
    with pytest.raises(EnginError) as failed:
        start_once(EngineOptions(model="nonsuch"), input_len=1)
    first, second = str(failed.value).splitlines()
    assert first == "the process ended with exit status 1:"
    assert second.startswith("'nonsuch' is no folder")


def test_kernels_are_timed_for_every_backend_and_operation(bench: Bench, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "QUICK", Sizes(((2, 40),), ((1, 33),), (4,), 256, 128))
    report = bench("kernels", "--dtype", "float32")
    kernels = {row["what"]["kernel"]: row for row in report["rows"]}
    decode, prefill = kernels["torch decode"], kernels["torch prefill"]
    assert decode["what"]["shape"] == "heads 16/8, 2 x 40"
    assert decode["derived"]["bytes_per_s"] == pytest.approx(2 * 40 * 2 * 8 * 128 * 4 / decode["measured"]["median_s"])
    flop = 33 * 34 // 2 * 4 * 16 * 128
    assert prefill["derived"]["flop_per_s"] == pytest.approx(flop / prefill["measured"]["median_s"])
    (limits,) = report["limits"]
    assert prefill["derived"]["fraction"] == pytest.approx(prefill["derived"]["flop_per_s"] / limits["product_flop_per_s"])
    operations = {name.split()[-1] for name in kernels}
    assert {"rms_norm", "add_rms_norm", "qk_norm_rotary_write", "gated_silu", "linear"} <= operations


def test_what_is_faster_than_memory_is_in_a_cache_and_no_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "several_s", lambda run, device, budget_s: [run() or 1e-6])
    limits = DeviceLimits(copy_bytes_per_s=1.0, read_bytes_per_s=1e18, product_flop_per_s=1.0, dtype="float32")
    timed = kernel_bench.KernelBench(
        registry=Registry.load(no_plugins=True),
        sizes=kernel_bench.QUICK,
        device=torch.device("cpu"),
        needs=OpNeeds(device="cpu", dtype="float32"),
        limits=limits,
    )
    for limit, is_cached in (("copy_bytes_per_s", True), ("read_bytes_per_s", False), ("product_flop_per_s", False)):
        row = timed.row("k", "s", lambda: None, amount=1 << 20, limit=limit, graph=False)
        assert row.details["in_cache"] is is_cached
        assert (row.derived["fraction"] is None) is is_cached


def test_a_backend_that_is_named_and_refuses_is_an_error(tiny: Path) -> None:
    registry, options = Registry.load(), EngineOptions(device="cpu", dtype="float32")
    with pytest.raises(PluginError, match="'none'"):
        kernel_bench.bench_kernels(registry, options, ["none"], quick=True)
    with pytest.raises(Unsupported, match="device cpu is not among"):
        kernel_bench.bench_kernels(registry, options, ["triton"], quick=True)
