"""What a model asks for is known at once: a build without memory has torch import no compiler, for seconds of each start."""

from __future__ import annotations

import json

from engine.rank_models import CONFIGS, LANES
from quick_processes import run_python

PROBE = """
import json
import sys

import torch

from enginery.contracts.drafting import DrafterSpec
from enginery.plugin.registry import Registry
from enginery.worker.weights.needed_weights import needed_weights


class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo":
            raise ImportError("torch's compiler is imported")


sys.meta_path.insert(0, Refusing())
ONE_MODULE = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}  # of a checkpoint that guesses the next token but one
registry, slow = Registry.load(), {}
for name, config in json.loads(sys.stdin.read()).items():
    offer, _ = registry.find_model(config)
    modules = [each.spec.model for each in registry.offers(DrafterSpec) if each.spec.suits]
    for model in (offer.spec, *(each for each in modules if set(each.architectures) & set(config["architectures"]))):
        try:
            needed_weights(model, config | ONE_MODULE, torch.bfloat16)
        except ImportError as error:
            slow[f"{model.name} of {name}"] = str(error)
print(json.dumps([slow, "torch._dynamo" in sys.modules]))
"""


def test_neither_a_family_nor_its_module_for_guesses_waits_for_torchs_compiler() -> None:
    asked = json.dumps({name: CONFIGS[name] for name in LANES}, default=str)
    how = {"capture_output": True, "text": True, "timeout": 150, "check": False}
    done = run_python("-c", PROBE, kind="torch", input=asked, **how)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [{}, False]
