"""The memory plan foresees what an engine uses: weights, pages, activations, graphs and their pool, workspaces, libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from enginery.bench.workloads import write_shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KV_GIB = 16


@pytest.fixture(scope="module", params=["triton", "auto"])
def use(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_shape("qwen3-0.6b", tmp_path_factory.mktemp("shape"))
    command = [sys.executable, str(Path(__file__).with_name("memory_use.py")), str(folder), request.param, str(KV_GIB)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(answer, indent=1))
    return answer


@pytest.mark.timeout(300)
def test_what_is_used_at_most_is_within_3_percent_of_the_plan(use: dict[str, Any]) -> None:
    assert abs(use["used"] - use["planned"]) < 0.03 * use["planned"], use


@pytest.mark.timeout(300)
def test_no_kernel_compiles_once_the_engine_is_ready(use: dict[str, Any]) -> None:
    assert use["compiled_late"] == []
