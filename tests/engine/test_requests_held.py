"""How many requests the memory plan of a published shape holds: layers with windows keep their windows alone."""

from __future__ import annotations

import json
from pathlib import Path

from enginery.bench.workloads import write_shape
from enginery.config.resolve import DeviceFacts
from enginery.config.schema import EngineOptions
from enginery.engine.build import plan_sizes
from enginery.kv.kinds import reach_of
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.loading import check_weights

LENGTH, GIB = 32_768, 24
GPU_SIZED = DeviceFacts(kind="cpu", name="a fake", available_bytes=139 << 30, num_threads=2)


def requests_held(folder: Path, registry: Registry, *, layer_types: list[str]) -> float:
    """Requests of 32,768 tokens whose pages of every kind are there at once, in 24 GiB; of the last one a part."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": layer_types}))
    asked = EngineOptions(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=LENGTH,
        expected_tokens=LENGTH,
        kv_memory_gib=GIB,
        max_batch_tokens=8192,  # as on a GPU
    )
    choice = choose(asked, registry, GPU_SIZED)
    plan = plan_sizes(asked, choice, check_weights(choice), None)
    assert plan.kv_bytes <= GIB << 30
    held = plan.num_pages * plan.page_size / LENGTH
    if plan.window is not None:  # while it decodes: what is in reach, and one page on each side
        held = min(held, plan.window_pages / (reach_of(plan.window, plan.page_size) + 2))
    return held


def test_windows_at_32k_hold_nearly_twice_the_requests(tmp_path: Path, registry: Registry) -> None:
    """Every other layer of gpt-oss-120b has a window of 128."""
    folder = write_shape("gpt-oss-120b", tmp_path)
    layer_types = json.loads((folder / "config.json").read_text())["layer_types"]
    windows = requests_held(folder, registry, layer_types=layer_types)
    whole = requests_held(folder, registry, layer_types=["full_attention"] * len(layer_types))
    assert windows / whole >= 1.9, (windows, whole)
    print(windows, whole, windows / whole)
