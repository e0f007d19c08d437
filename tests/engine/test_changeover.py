"""An engine begins with attention backends that need nothing compiled, and changes over when the chosen ones' kernels are there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import quick_processes
from installed import install
from typer.testing import CliRunner

from enginery.cli.main import build_app
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import AttnNeeds
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.compile_process import CompileProcess
from enginery.engine.engine import Engine
from enginery.errors import Unsupported
from enginery.plugin.registry import Registry

PLUGIN = """
import os, subprocess, sys, time
from pathlib import Path
from enginery.api import AttnBackendSpec, Capabilities, Unsupported, hookimpl

here = Path(__file__).parent
kernels, go, broken, child, wrong = (here / name for name in ("kernels", "go", "broken", "child", "wrong"))


class Store:
    def missing(self, needs, options):
        return [] if kernels.exists() else ["fast_kernels"]

    def compile(self, needs, options):
        if broken.exists():
            raise Unsupported("the compiler says no")
        compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        child.write_text(str(compiler.pid))
        while not go.exists():
            time.sleep(0.01)
        compiler.kill()
        compiler.wait()
        kernels.write_text(",".join(sorted(needs.phases)))


@hookimpl
def register_attn_backends():
    floats = frozenset({"float32"})
    can = Capabilities(devices=frozenset({"cpu"}), dtypes=floats, kv_dtypes=floats)
    summary = "torch's, which pretends to be compiled"
    return [AttnBackendSpec(name="slow", api=(2, 0), priority=99, capabilities=can, summary=summary, kernel_store=Store())]


@hookimpl
def create_attn_backend(name, context):
    if name != "slow":
        return None
    if not kernels.exists():
        kernels.touch()  # as FlashInfer does: in the constructor, while everything waits
    from enginery_attn_torch.backend import TorchAttention

    class Wrong(TorchAttention):
        def attend(self, q, k, v, layer, batch, plan, out):
            raise RuntimeError("this kernel is wrong")

    return (Wrong if wrong.exists() else TorchAttention)(context)
"""
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ([5, 6, 7, 8], [300, 9], list(range(20, 90)))


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Installed for this process and its children. Returns its folder, where `go` lets its compiler finish."""
    package = tmp_path / "slow_attention"
    package.mkdir()
    (package / "__init__.py").write_text(PLUGIN)
    install(tmp_path, "slow-attention", "slow_attention", name="slow")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    yield package
    sys.modules.pop("slow_attention", None)


def options(**asked: object) -> EngineOptions:
    return EngineOptions(dtype="float32", num_pages=64, **asked)  # type: ignore[arg-type]


def build(**asked: object) -> Engine:
    """Without the CPU's backend for decoding: what else there is must not depend on whether there was a compiler."""
    return Engine.build(options(**asked), Registry.load(blocked=("attn-cpu",)))


def submit(engine: Engine) -> None:
    for number, prompt in enumerate(PROMPTS):
        engine.submit(GenerationRequest(request_id=str(number), prompt_token_ids=tuple(prompt), params=GREEDY))


def run(engine: Engine, tokens: dict[str, list[int]], *, until: Callable[[], bool]) -> None:
    while engine.has_work and not until():
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)


def wait_for(met: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Of an engine that has one backend all along."""
    tokens: dict[str, list[int]] = {}
    engine = build(attention_backend="torch")
    submit(engine)
    run(engine, tokens, until=lambda: False)
    return tokens


def test_it_begins_at_once_and_changes_between_two_steps_with_requests_running(
    expected: dict[str, list[int]], plugin: Path
) -> None:
    engine, tokens = build(overlap=True), dict[str, list[int]]()
    at_first = engine.meter.stats()
    assert (engine.facts.attn_backend, at_first.attn_backend) == ("slow", "torch")
    assert at_first.kernels.compiling == ("fast_kernels",)
    assert ("attention at first", "torch") in [decision[:2] for decision in engine.facts.decisions]
    submit(engine)
    run(engine, tokens, until=lambda: len(tokens.get("2", ())) >= 4)
    (plugin / "go").touch()
    assert engine._changeover is not None
    wait_for(lambda: engine._changeover is not None and engine._changeover.is_ready)
    run(engine, tokens, until=lambda: False)
    assert tokens == expected
    stats = engine.meter.stats()
    assert (stats.attn_backend, stats.kernels.compiling, stats.kernels.failure) == ("slow", (), "")
    assert stats.steps_by_backend["torch"] >= 4
    assert stats.steps_by_backend["slow"] >= 4
    assert sum(stats.steps_by_backend.values()) == stats.num_steps
    assert (plugin / "kernels").read_text() == "decode,mixed,prefill"  # the needs crossed the process


def test_an_idle_engine_changes_over_in_a_moment_without_work(plugin: Path, expected: dict[str, list[int]]) -> None:
    engine, tokens = build(), dict[str, list[int]]()
    (plugin / "go").touch()
    assert engine._changeover is not None
    wait_for(lambda: engine._changeover is not None and engine._changeover.is_ready)
    assert engine.prepare()
    assert engine.meter.stats().attn_backend == "slow"
    submit(engine)
    run(engine, tokens, until=lambda: False)
    assert tokens == expected
    assert list(engine.meter.stats().steps_by_backend) == ["slow"]


def test_an_engine_whose_kernels_are_not_to_be_had_goes_on_with_what_it_has(plugin: Path, expected: dict[str, list[int]]) -> None:
    (plugin / "broken").touch()
    engine, tokens = build(), dict[str, list[int]]()
    wait_for(lambda: bool(engine.meter.stats().kernels.failure))
    submit(engine)
    run(engine, tokens, until=lambda: False)
    assert tokens == expected
    stats = engine.meter.stats()
    assert "the compiler says no" in stats.kernels.failure
    assert (stats.attn_backend, stats.kernels.compiling) == ("torch", ())


def test_an_engine_goes_on_with_what_it_has_if_what_was_compiled_fails(
    plugin: Path, expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    (plugin / "wrong").touch()
    engine, tokens = build(), dict[str, list[int]]()
    submit(engine)
    run(engine, tokens, until=lambda: len(tokens.get("2", ())) >= 4)
    (plugin / "go").touch()
    wait_for(lambda: engine._changeover is not None and engine._changeover.is_ready)
    run(engine, tokens, until=lambda: False)
    assert tokens == expected
    stats = engine.meter.stats()
    assert (stats.attn_backend, stats.kernels.compiling) == ("torch", ())
    assert stats.kernels.failure == "RuntimeError: this kernel is wrong"
    assert "the engine stays with the attention backends that it began with: RuntimeError: this kernel is wrong" in caplog.text


@pytest.mark.parametrize("asked", [{"attention_backend": "slow"}, {"wait_for_kernels": True}])
def test_a_backend_that_was_asked_for_is_waited_for(plugin: Path, asked: dict[str, object]) -> None:
    (plugin / "go").touch()
    engine = build(**asked)
    assert engine._changeover is None
    assert engine.meter.stats().attn_backend == engine.facts.attn_backend == "slow"


def test_without_another_backend_the_start_waits(plugin: Path) -> None:
    (plugin / "go").touch()
    registry = Registry.load(blocked=("attn-cpu", "attn-torch"))
    engine = Engine.build(options(), registry)
    assert engine.meter.stats().attn_backend == "slow"


def test_kernels_that_are_there_are_used_from_the_start(plugin: Path) -> None:
    (plugin / "kernels").touch()
    engine = build()
    assert engine._changeover is None
    assert engine.meter.stats().attn_backend == "slow"


def test_closing_an_engine_ends_its_compilers(plugin: Path) -> None:
    engine = build()
    wait_for((plugin / "child").exists)
    wait_for(lambda: bool((plugin / "child").read_text()))
    compiler = int((plugin / "child").read_text())
    engine.close()
    wait_for(lambda: not is_running(compiler))
    assert engine.meter.stats().attn_backend == "torch"


def test_killing_the_engine_s_process_ends_its_compilers(plugin: Path) -> None:
    code = """
        from enginery.config.schema import EngineOptions
        from enginery.plugin.registry import Registry
        from enginery.engine.engine import Engine
        import time
        engine = Engine.build(EngineOptions(dtype="float32", num_pages=64), Registry.load())
        time.sleep(600)
    """
    with quick_processes.code_too():
        engine = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        wait_for(lambda: (plugin / "child").exists() and bool((plugin / "child").read_text()), seconds=120)
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    wait_for(lambda: not is_running(int((plugin / "child").read_text())))


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_compiling_in_a_process_tells_its_last_words(plugin: Path) -> None:
    (plugin / "broken").touch()
    asked = AttnNeeds(device="cpu", dtype="float32", kv_dtype="float32", page_size=16, layers=())
    with pytest.raises(Unsupported, match="exit status 2: the compiler says no"):
        CompileProcess(Registry.load(), [("slow", asked)]).wait()


def test_the_command_compiles_ahead(plugin: Path) -> None:
    (plugin / "go").touch()
    arguments = ["compile", "--dtype", "float32", "--device", "cpu"]
    first, again = (CliRunner().invoke(build_app(), arguments, catch_exceptions=False) for _ in range(2))
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert "slow lacks fast_kernels" in first.output
    assert "compiled 1 modules" in first.output
    assert "no attention kernel is missing" in again.output
    assert (plugin / "kernels").exists()


def test_a_compute_capability_is_two_numbers() -> None:
    result = CliRunner().invoke(build_app(), ["compile", "--compute-capability", "hopper"])
    assert result.exit_code
    assert "must be two numbers" in str(result.exception)
