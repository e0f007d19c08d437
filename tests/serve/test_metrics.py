"""What `/metrics` makes of what engines report."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_facts import engine_facts

from enginery.contracts.engine import EngineStats
from enginery.contracts.request import FinishReason, GenerationRequest, RequestOutput, SamplingParams
from enginery.contracts.schedule import PageCounts
from enginery.plugin.registry import Registry
from enginery.serve.http.metrics import EngineNow, RequestMeter, families


def told(*pages: PageCounts, decisions: tuple[tuple[str, str, str], ...] = (), **others: PageCounts) -> list:
    """The samples of engines with these pages that clients are concerned with. others: pages of the other kinds, of each."""
    facts = engine_facts(decisions=decisions, phases_s={"weights": 1.0})
    engines = [EngineNow(facts, EngineStats(pages={"full": counts, **others}), RequestMeter(), 0) for counts in pages]
    manifest = Registry.load(no_plugins=True).manifest
    return [sample for family in families(engines, manifest, Counter({("/v1", 200): 1})) for sample in family.samples]


def test_what_the_prefix_cache_could_give_up_is_not_in_use():
    """Routers and dashboards read the share as vLLM's, where it falls when requests end."""
    (sample,) = (each for each in told(PageCounts(free=1, cached=7, total=10, held=4)) if each.name == "vllm:kv_cache_usage_perc")
    assert sample.value == pytest.approx(0.4)


@pytest.mark.parametrize(("held", "share"), [(3, 1.0), (1, 0.4)])
def test_memory_is_full_where_one_kind_of_it_is(held: int, share: float):
    """Requests wait for a state however many pages of keys are free; who adds replicas waits for full ones."""
    full, state = PageCounts(free=6, cached=0, total=10, held=4), PageCounts(free=3 - held, cached=0, total=3, held=held)
    (sample,) = (each for each in told(full, state=state) if each.name == "vllm:kv_cache_usage_perc")
    assert sample.value == pytest.approx(share)


def test_every_sample_of_an_engine_names_its_model_and_of_several_its_engine():
    page = PageCounts(free=10, cached=0, total=10)
    for pages, labels in (((page,), {"model_name": "m"}), ((page, page), {"model_name": "m", "engine": None})):
        of_server = ("enginery:plugin_info", "enginery:http_requests")
        samples = [each for each in told(*pages) if not each.name.startswith(of_server)]
        assert len(samples) > 200
        for sample in samples:
            assert sample.labels.keys() >= labels.keys(), sample
            assert sample.labels["model_name"] == "m"
        assert {sample.labels.get("engine") for sample in samples} == ({None} if len(pages) == 1 else {"0", "1"})


def test_the_dtype_of_the_cache_is_that_of_keys_and_values():
    page = PageCounts(free=10, cached=0, total=10)
    for decisions, dtype in (((), "bfloat16"), ((("kv_dtype", "float8_e4m3fn", "asked for"),), "float8_e4m3fn")):
        (sample,) = (each for each in told(page, decisions=decisions) if each.name == "vllm:cache_config_info")
        assert sample.labels["cache_dtype"] == dtype


def test_the_time_of_a_token_is_of_those_behind_the_first():
    meter = RequestMeter()
    times = meter.begin(GenerationRequest(request_id="r", prompt_token_ids=(1, 2), params=SamplingParams()))
    times.began_s = 1.0
    meter.add(times, RequestOutput(request_id="r", token_ids=(5,), queued_s=0.5), 2.0)
    meter.add(times, RequestOutput(request_id="r", token_ids=(6, 7), finish_reason=FinishReason.LENGTH), 6.0)
    of = {name: getattr(meter, name).total for name in ("ttft", "queued", "prefill", "itl", "decode", "e2e", "per_token")}
    assert of == {"ttft": 1.0, "queued": 0.5, "prefill": 0.5, "itl": 4.0, "decode": 4.0, "e2e": 5.0, "per_token": 2.0}
    assert (meter.num_open, meter.num_unstarted, meter.num_ahead) == (0, 0, 0)


def test_prompts_that_are_embedded_or_scored_have_no_output():
    """The token that is sampled all the same is none, and that it happens to be a stop token ends nothing."""
    meter = RequestMeter()
    asked = GenerationRequest(request_id="r", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=1), prompt_only=True)
    times = meter.begin(asked)
    meter.add(times, RequestOutput(request_id="r", token_ids=(5,), finish_reason=FinishReason.STOP), times.began_s + 1.0)
    assert (times.num_output, meter.num_output, meter.generation_tokens.total, meter.num_prompt) == (0, 0, 0.0, 2)
    assert (sum(meter.prompt_tokens.counts), sum(meter.ttft.counts), dict(meter.ended)) == (1, 1, {"length": 1})
    assert (meter.num_open, meter.num_unstarted, meter.num_ahead) == (0, 0, 0)
