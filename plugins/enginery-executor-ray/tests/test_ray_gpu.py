"""On two GPUs: a rank that Ray gives one of them to, and shows it alone, tells with the engine's own what one GPU tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from enginery import LLM, SamplingParams
from enginery.api import EnginError
from enginery.testing.fixtures import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.timeout(300)]  # Triton compiles its kernels the first time

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
PROMPTS = [[5, 77, 200, 31] * 9, [8, 9, 140], [3] * 130]


@pytest.fixture(scope="module")
def second_gpu(with_ray: Any) -> Iterator[None]:
    """A cluster of this machine that has its second GPU alone, as the README says."""
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # of this machine alone
        with_ray.init(address="local", num_cpus=8, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    with_ray.shutdown()


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    return {"model": str(model), "load_format": "dummy", "device": "cuda", "num_pages": 64}


def tokens(options: dict[str, object], **changes: object) -> list[list[int]]:
    with LLM(**{**options, "dtype": "float32", **changes}) as llm:
        return [list(done.token_ids) for done in llm.generate(PROMPTS, GREEDY, progress=False)]


@pytest.mark.usefixtures("second_gpu")
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_rank_on_rays_gpu_tells_what_one_gpu_tells(options: dict[str, object], mesh: dict[str, int]) -> None:
    assert tokens(options, executor="ray", **mesh) == tokens(options)


@pytest.mark.usefixtures("second_gpu")
def test_a_rank_that_is_killed_ends_the_engine_and_the_gpu_is_free_for_the_next(options: dict[str, object]) -> None:
    with LLM(**options, dtype="bfloat16", tp=2, executor="ray") as llm:
        llm.generate(PROMPTS, GREEDY, progress=False)
        (rank,) = (each for each in psutil.process_iter(["cmdline"]) if {"rank", "--join"} <= set(each.info["cmdline"] or ()))
        rank.kill()
        with pytest.raises(EnginError, match="rank 1"):
            llm.generate([PROMPTS[0]] * 500, SamplingParams(max_tokens=48, ignore_eos=True), progress=False)
    assert tokens(options, executor="ray", tp=2) == tokens(options)
