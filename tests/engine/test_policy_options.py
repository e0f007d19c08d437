"""A schedule policy of a plugin sees what its user set, and whose a request is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from offers import offering

from enginery.api import QueuedFacts, SchedulePolicySpec
from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry


@dataclasses.dataclass(frozen=True)
class Options:
    first: str = ""


def key(request: QueuedFacts) -> tuple[float, ...]:
    assert isinstance(request.options, Options)
    return (request.salt != request.options.first,)


def test_a_policy_is_given_its_options_and_the_salts_of_requests(tmp_path: Path) -> None:
    config = dict(architectures=["EchoForCausalLM"], vocab_size=97, max_position_embeddings=256, eos_token_id=[5, 6])
    (tmp_path / "config.json").write_text(json.dumps(config))
    registry = Registry.load()
    spec = SchedulePolicySpec(name="one-first", api=(2, 1), key=key, summary="", options=Options)
    offer = dataclasses.replace(registry.offers(SchedulePolicySpec)[0], spec=spec, name="one-first")
    registry = offering(registry, SchedulePolicySpec, offer)
    registry = dataclasses.replace(registry, options={**registry.options, "one-first": Options(first="ours")})
    asked = EngineOptions(
        model=str(tmp_path),
        load_format="dummy",
        num_pages=64,
        dtype="float32",
        device="cpu",
        schedule_policy="one-first",
        max_batch_requests=1,
    )
    engine = Engine.build(asked, registry)
    for name in ("theirs", "ours"):
        params = SamplingParams(max_tokens=2)
        engine.submit(GenerationRequest(request_id=name, prompt_token_ids=(1, 2), params=params, cache_salt=name))
    told = list[str]()
    while engine.has_work:
        told += [output.request_id for output in engine.step() if output.finish_reason is not None]
    assert told == ["ours", "theirs"]
