"""An engine of one rank has nothing to do with others: it runs where their modules cannot be imported."""

from __future__ import annotations

import noise
from quick_processes import run_python

PROGRAM = """
import importlib.abc
import sys

import torch

ABSENT = ("torch.distributed", "torch._C._distributed_c10d", "zmq")  # as of a torch built with USE_DISTRIBUTED=0


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(ABSENT):
            raise ModuleNotFoundError(f"{name} is not there", name=name)


for name in [name for name in sys.modules if name.startswith(ABSENT)]:
    del sys.modules[name]
sys.meta_path.insert(0, Absent())

from enginery import LLM
from enginery.contracts.request import SamplingParams

llm = LLM(**OPTIONS)
deltas = list(llm.stream([7, 8, 9], SamplingParams(max_tokens=3, ignore_eos=True)))
print(deltas[-1].usage.num_output_tokens)
llm.close()
print(*sorted(name for name in sys.modules if name.startswith(("enginery.engine.ranks.", "enginery.worker.ranks.", *ABSENT))))
"""
CHEAP = {
    "enginery.engine.ranks.ranks",
    # the head of several ranks, which the runner looks for, what they agree on, and paths of its steps
    *("enginery.worker.ranks.collectives", "enginery.worker.ranks.lanes", "enginery.worker.ranks.path"),
}


def test_one_rank_runs_without_the_modules_of_several() -> None:
    options = {**noise.OPTIONS, "device": "cpu", "dtype": "float32", "num_pages": 64, "num_threads": 1}
    program = f"OPTIONS = {options!r}\n{PROGRAM}"
    done = run_python("-c", program, kind="torch", capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    told, loaded = done.stdout.splitlines()
    assert told == "3"
    assert set(loaded.split()) == CHEAP
