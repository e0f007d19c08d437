"""What `/metrics` tells: the engine's totals as it last reported them, and the times of requests as clients see them.

The names are vLLM's where it has one, as dashboards know them. Nothing is labelled with what a client sends.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from enginery.contracts.batch import FULL
from enginery.contracts.engine import STEP_SIZES, EngineFacts, EngineStats, ExpertCounts
from enginery.contracts.request import FinishReason, GenerationRequest, RequestOutput
from enginery.contracts.schedule import PageCounts
from enginery.plugin.manifest import Manifest

_SHORT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_FIRST_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_WHOLE_S: Final = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS: Final = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))  # up to 500,000, as vLLM has them
REASONS: Final = ("stop", "length", "abort", "error")
_Rows = Iterable[tuple[Sequence[str], float]]  # the values of labels, and the sample's
REJECTED: Final = "rejected"  # by the engine, or with one that came with it


class Histogram:
    """Counts of values up to each of `bounds`, and of larger ones. total: of the values."""

    def __init__(self, bounds: tuple[float, ...], counts: Iterable[int] = (), total: float = 0.0) -> None:
        self.bounds = bounds
        self.counts = list(counts) or [0] * (len(bounds) + 1)
        self.total = total

    def add(self, value: float) -> None:
        """Count one value. Costs a bisection."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RequestTimes:
    """The counts and times of one request of the engine. Times are seconds of the monotonic clock; 0 means not yet.

    num_ahead: tokens that the engine has yet to compute, as far as is known: of the prompt, then one at a time. prompt_only: the
    token that is sampled all the same is no output, and whether it is a stop token means nothing.
    """

    __slots__ = (
        *("began_s", "first_s", "last_s", "num_ahead", "num_cached"),
        *("num_output", "num_prompt", "prompt_only", "queued_s", "reason", "request_id"),
    )

    def __init__(self, request_id: str, num_prompt: int, num_ahead: int, *, prompt_only: bool) -> None:
        self.request_id, self.prompt_only = request_id, prompt_only
        self.num_prompt, self.num_ahead, self.num_cached, self.num_output = num_prompt, num_ahead, 0, 0
        self.began_s = time.monotonic()
        self.queued_s = self.first_s = self.last_s = 0.0
        self.reason: str | None = None


class RequestMeter:
    """Counts and times all requests of one engine, as clients see them.

    num_open: requests that have not ended. num_unstarted: of these, those of which nothing has come. num_ahead: of all of them.
    num_begun: requests ever sent.
    """

    def __init__(self) -> None:
        self.num_open = self.num_unstarted = self.num_ahead = self.num_begun = 0
        self.num_prompt = self.num_cached = self.num_output = 0
        self.ended: Counter[str] = Counter()
        self.ttft, self.itl, self.per_token = Histogram(_FIRST_S), Histogram(_SHORT_S), Histogram(_SHORT_S)
        self.queued, self.prefill = Histogram(_WHOLE_S), Histogram(_WHOLE_S)
        self.decode, self.e2e = Histogram(_WHOLE_S), Histogram(_WHOLE_S)
        self.prompt_tokens, self.generation_tokens = Histogram(_TOKENS), Histogram(_TOKENS)

    def begin(self, request: GenerationRequest, *, num_known: int = 0) -> RequestTimes:
        """Count a request that is sent to the engine, and start its times. num_known: tokens that it is thought to have cached."""
        num_prompt = len(request.prompt_token_ids)
        times = RequestTimes(request.request_id, num_prompt, max(1, num_prompt - num_known), prompt_only=request.prompt_only)
        self.num_open += 1
        self.num_unstarted += 1
        self.num_begun += 1
        self.num_ahead += times.num_ahead
        return times

    def add(self, times: RequestTimes, output: RequestOutput, now_s: float) -> None:
        """Count and time one output of a request. now_s: when it came, by the monotonic clock."""
        if times.reason is not None:
            return
        count = len(output.token_ids)
        if count and times.first_s:
            self.itl.add(now_s - times.last_s)
        elif count:
            times.first_s, times.queued_s, times.num_cached = now_s, output.queued_s, output.num_cached_tokens
            self.ttft.add(now_s - times.began_s)
            self.queued.add(output.queued_s)
            self.prefill.add(now_s - times.began_s - output.queued_s)
            self.num_unstarted -= 1
            self.num_ahead += 1 - times.num_ahead
            times.num_ahead = 1
            self.num_prompt += times.num_prompt
            self.num_cached += output.num_cached_tokens
        times.last_s = now_s
        if not times.prompt_only:
            times.num_output += count
            self.num_output += count
        if output.error is not None:
            self.end(times, "error")
        elif output.finish_reason is not None:
            self.end(times, FinishReason.LENGTH if times.prompt_only else output.finish_reason)

    def end(self, times: RequestTimes, reason: str) -> None:
        """Count the end of a request, once: the first reason counts, one of `REASONS` or REJECTED."""
        if times.reason is not None:
            return
        times.reason = reason
        times.last_s = times.last_s or time.monotonic()
        self.num_open -= 1
        self.num_unstarted -= not times.first_s
        self.num_ahead -= times.num_ahead
        self.ended[reason] += 1
        if reason in ("stop", "length"):
            self.e2e.add(times.last_s - times.began_s)
            self.decode.add(times.last_s - times.first_s)
            self.prompt_tokens.add(times.num_prompt)
            self.generation_tokens.add(times.num_output)
            if times.num_output > 1:
                self.per_token.add((times.last_s - times.first_s) / (times.num_output - 1))


class EngineNow(NamedTuple):
    """One engine at one moment. num_restarts: how often it was started again."""

    facts: EngineFacts
    stats: EngineStats
    meter: RequestMeter
    num_restarts: int


def families(engines: Sequence[EngineNow], manifest: Manifest, answered: Counter[tuple[str, int]]) -> Iterator[Metric]:
    """Every metric, as prometheus_client writes them. engines: none while the model is loading. answered: by route and status."""
    requests = CounterMetricFamily("enginery:http_requests", "HTTP requests, by route and status.", labels=["route", "status"])
    yield _filled(requests, (([route, str(status)], count) for (route, status), count in answered.items()))
    plugins = [{"name": each.name, "distribution": each.distribution, "version": each.version} for each in manifest.plugins]
    yield _info("enginery:plugin", "A plugin that is loaded.", plugins)
    yield from by_engine([_labelled(_of_engine(engine), "model_name", engine.facts.model_name) for engine in engines])


def by_engine(every: Sequence[Iterable[Metric]]) -> list[Metric]:
    """The metrics of all engines as one family of each name; of several, with the label `engine`, their number, as vLLM has it."""
    if len(every) == 1:
        return list(every[0])
    found: dict[str, Metric] = {}
    for number, metrics in enumerate(every):
        for metric in _labelled(metrics, "engine", str(number)):
            if (first := found.setdefault(metric.name, metric)) is not metric:
                first.samples += metric.samples
    return list(found.values())


def _labelled(metrics: Iterable[Metric], name: str, value: str) -> Iterator[Metric]:
    for metric in metrics:
        metric.samples = [sample._replace(labels={**sample.labels, name: value}) for sample in metric.samples]
        yield metric


def _of_engine(now: EngineNow) -> Iterator[Metric]:
    for kind, told in ((GaugeMetricFamily, _gauges(now)), (CounterMetricFamily, _counters(now))):
        for title, text, value in told:
            yield kind(title, text, value=value)
    ended = CounterMetricFamily("vllm:request_success", "Requests that ended, by reason.", labels=["finished_reason"])
    yield _filled(ended, (([reason], now.meter.ended[reason]) for reason in REASONS))
    for title, text, histogram in _histograms(now.stats, now.meter):
        yield _histogram(title, text, histogram)
    accepted = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Guessed tokens that were right, by place.", labels=["position"]
    )
    yield _filled(accepted, _by_place(now.stats.drafts.by_position))
    yield from _memory(now)
    yield from _lanes(now.stats)
    yield from _experts(now.stats.experts)
    yield from _engine_info(now.facts, now.stats)


def _gauges(now: EngineNow) -> Iterator[tuple[str, str, float]]:
    stats, pages = now.stats, _pages(now)
    full, usage = pages[FULL], max(kind.held / kind.total for kind in pages.values())
    yield "vllm:num_requests_running", "Requests in the running batch.", stats.num_running
    yield "vllm:num_requests_waiting", "Requests that wait to run.", stats.num_waiting
    yield "vllm:kv_cache_usage_perc", "Share of the KV pages, or of the fullest kind of memory, that requests hold.", usage
    yield "enginery:kv_pages", "KV pages.", full.total
    yield "enginery:kv_pages_free", "KV pages that nobody holds.", full.free
    yield "enginery:kv_pages_cached", "KV pages of the prefix cache, in use by requests or not.", full.cached
    yield "enginery:requests_open", "Requests that clients wait for.", now.meter.num_open


def _pages(now: EngineNow) -> Mapping[str, PageCounts]:
    """By kind of memory, `full` always; as the model has been loaded."""
    stats = now.stats
    return stats.pages or {FULL: PageCounts(free=stats.free_pages, cached=stats.cached_pages, total=now.facts.num_pages)}


def _memory(now: EngineNow) -> Iterator[Metric]:
    """The pages of each kind of memory."""
    family = GaugeMetricFamily("enginery:memory_pages", "Pages, by kind: all, free, in use, cached.", labels=["kind", "pages"])
    evicted = CounterMetricFamily("enginery:memory_pages_evicted", "Pages that the prefix cache gave up.", labels=["kind"])
    pages = _pages(now)
    yield _filled(family, _by_use([], pages))
    yield _filled(evicted, (([kind], counts.evicted) for kind, counts in pages.items()))


def _lanes(stats: EngineStats) -> Iterator[Metric]:
    """Of several lanes, what each has."""
    if not stats.lanes:
        return
    requests = GaugeMetricFamily("enginery:lane_requests", "Requests of each lane of --dp-attention.", labels=["lane", "state"])
    pages = GaugeMetricFamily("enginery:lane_memory_pages", "The pages of each lane.", labels=["lane", "kind", "pages"])
    for lane, now in enumerate(stats.lanes):
        _filled(requests, (([str(lane), "running"], now.num_running), ([str(lane), "waiting"], now.num_waiting)))
        _filled(pages, _by_use([str(lane)], now.pages))
    yield from (requests, pages)


def _experts(counts: ExpertCounts) -> Iterator[Metric]:
    """Of several ranks with some of the experts each, how even their work is."""
    if not counts.by_rank:
        return
    routed = CounterMetricFamily(
        "enginery:expert_tokens", "Tokens routed to each rank's experts, in sampled steps.", labels=["rank"]
    )
    yield _filled(routed, _by_place(counts.by_rank))
    busiest = "Of these, in each layer those of the rank with most."
    yield CounterMetricFamily("enginery:expert_tokens_busiest", busiest, value=counts.busiest)
    even = "The ranks' mean of these by the most, since the start; 1 is even."
    yield GaugeMetricFamily("enginery:expert_balancedness", even, value=counts.balancedness)


def _by_use(before: list[str], pages: Mapping[str, PageCounts]) -> _Rows:
    for kind, counts in pages.items():
        for use in ("total", "free", "held", "cached"):
            yield [*before, kind, use], getattr(counts, use)


def _by_place(counts: Iterable[int]) -> _Rows:
    return (([str(place)], count) for place, count in enumerate(counts))


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: _Rows) -> Metric:
    """The family with a sample for each row."""
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _counters(now: EngineNow) -> Iterator[tuple[str, str, float]]:
    stats, meter = now.stats, now.meter
    yield "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", meter.num_prompt
    yield "vllm:prefix_cache_hits", "Prompt tokens found there.", meter.num_cached
    yield "vllm:prompt_tokens", "Prompt tokens processed.", meter.num_prompt
    yield "vllm:generation_tokens", "Tokens generated.", meter.num_output
    yield "vllm:num_preemptions", "Requests that lost their pages and are computed again.", stats.num_preempted
    yield "vllm:admission_rejections", "Requests that the engine did not take.", meter.ended[REJECTED]
    yield "vllm:corrupted_requests", "Requests that ended because their logits were NaN.", stats.num_nan
    yield "vllm:spec_decode_num_drafts", "Verifications of a request's guessed tokens.", stats.drafts.verifications
    yield "vllm:spec_decode_num_draft_tokens", "Guessed tokens that were verified.", stats.drafts.drafted
    yield "vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right, and told.", stats.drafts.accepted
    yield "enginery:spec_decode_told_tokens", "Tokens that verifications told, the drawn ones too.", stats.drafts.told
    yield "enginery:requests_aborted", "Requests whose clients hung up, or that were aborted.", meter.ended["abort"]
    yield "enginery:engine_restarts", "Engines that were started again, because they had ended.", now.num_restarts
    yield "enginery:steps", "Steps that completed.", stats.num_steps
    yield "enginery:steps_failed", "Steps that were given up with their requests.", stats.num_failed_steps
    yield "enginery:graph_hits", "Steps that a captured graph ran.", stats.num_graph_steps
    yield "enginery:graph_misses", "Steps that ran without a graph.", stats.num_steps - stats.num_graph_steps
    yield "enginery:step_host_seconds", "Host time of scheduling, building, planning and launching steps.", stats.host_s
    yield "enginery:step_plan_seconds", "Host time of building and planning, of this.", stats.plan_s
    yield "enginery:step_run_seconds", "Time from a step's plan to its tokens.", stats.run_s


def _histograms(stats: EngineStats, meter: RequestMeter) -> Iterator[tuple[str, str, Histogram]]:
    yield "vllm:time_to_first_token_seconds", "Time to first token: from a request's sending to its first token.", meter.ttft
    yield "vllm:inter_token_latency_seconds", "Inter-token latency: between one token of a request and the next.", meter.itl
    yield "vllm:request_time_per_output_token_seconds", "Time per output token, after a request's first.", meter.per_token
    yield "vllm:e2e_request_latency_seconds", "End-to-end latency: from a request's sending to its last token.", meter.e2e
    yield "vllm:request_queue_time_seconds", "That requests waited before they ran.", meter.queued
    yield "vllm:request_prefill_time_seconds", "From a request's running to its first token.", meter.prefill
    yield "vllm:request_decode_time_seconds", "From a request's first token to its last.", meter.decode
    yield "vllm:request_prompt_tokens", "Tokens of the prompt, of requests that came to an end.", meter.prompt_tokens
    yield "vllm:request_generation_tokens", "Tokens of the completion, of the same requests.", meter.generation_tokens
    yield "vllm:iteration_tokens_total", "Tokens in a step.", Histogram(STEP_SIZES, stats.steps_by_size, stats.num_tokens)


def _histogram(title: str, text: str, histogram: Histogram) -> Metric:
    buckets = list(zip([*map(str, map(float, histogram.bounds)), "+Inf"], accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(title, text, buckets=buckets, sum_value=histogram.total)


def _engine_info(facts: EngineFacts, stats: EngineStats) -> Iterator[Metric]:
    kv_dtype = next((value for setting, value, _ in facts.decisions if setting == "kv_dtype"), facts.dtype)
    sizes = {"block_size": facts.page_size, "num_gpu_blocks": facts.num_pages, "cache_dtype": kv_dtype}
    yield _info("vllm:cache_config", "The KV cache.", [{name: str(value) for name, value in sizes.items()}])
    backend = CounterMetricFamily("enginery:backend_steps", "Steps by attention backend.", labels=["attention_backend"])
    yield _filled(backend, (([name], count) for name, count in (stats.steps_by_backend or {facts.attn_backend: 0}).items()))
    compiling = "Attention kernels that are compiled beside the engine, which runs with others."
    yield GaugeMetricFamily("enginery:kernels_compiling", compiling, value=len(stats.kernels.compiling))
    phases = GaugeMetricFamily("enginery:startup_seconds", "Of the start, by phase.", labels=["phase"])
    yield _filled(phases, (([phase], seconds) for phase, seconds in facts.phases_s.items()))


def _info(title: str, text: str, rows: list[dict[str, str]]) -> Metric:
    """A gauge that is 1 for each row; its labels are the information."""
    family = GaugeMetricFamily(f"{title}_info", text, labels=list(rows[0]) if rows else [])
    return _filled(family, ((list(row.values()), 1) for row in rows))
