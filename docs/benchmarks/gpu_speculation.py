"""Verified guesses of an EAGLE-3 head of random weights beside plain decoding: `python docs/benchmarks/gpu_speculation.py > FILE`.

Llama-3.1-8B's shape in bfloat16, Triton attention, 128 tokens in and 512 out. Guesses are right by chance, at 2.8 to 2.9 told
tokens a verification; see `enginery.bench.forced`. Of each load the first pass does not count.

With --auto: what `--drafter auto` makes of it, which chooses how much to guess, where guesses are as seldom right as those of a
random head are, and where each is right three times of four. Then the embedded model, in text.

With --lookup: what n-grams cost where they find nothing, as in what random weights say.

With --four: chains of four guesses, as often right as EAGLE-3's are said to be, beside plain decoding; then a head that guesses
nothing, and guesses that are never right, and always.

With --combs: what a round takes with chains of four guesses, and with one sibling beside each, which are as seldom right.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from enginery import LLM, SamplingParams
from enginery.bench.latency import one_pass, pass_s
from enginery.bench.offline import free_memory
from enginery.bench.rounds import RoundTimes
from enginery.bench.workloads import equal_requests, shapes, write_shape
from enginery.config.schema import EngineOptions
from enginery.contracts.engine import EngineStats
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

SHAPE, RATES, DRAFT_VOCABULARY = "llama-3.1-8b", (0.7655,) * 3, 32000
FOUR_RATES = (0.78, 0.74, 0.74, 0.67)  # 3.08 told a verification: vLLM #20780; their first two are assumed, their sum is not
AUTO = ("seldom right", "right three times of four", "embedded")
PAGES = 8000  # 256 requests of 500 tokens; three such engines fit an H200
PROMPT = "Tell me a story about a fox named Mia."


def options(folder: Path, device: str, attention: str = "triton", *, shape: str = SHAPE) -> EngineOptions:
    """With the head; its config.json and the target's are written to the folder."""
    (folder / "target").mkdir()
    (folder / "head").mkdir()
    write_shape(shape, folder / "target")
    head = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCABULARY}
    (folder / "head" / "config.json").write_text(json.dumps(shapes()[shape] | head))
    return EngineOptions(
        model=str(folder / "target"),
        load_format="dummy",
        device=device,
        dtype="bfloat16",
        attention_backend=attention,
        plugin_options=("flashinfer.prefill=fa2",) if attention == "flashinfer" else (),
        max_model_len=641,
        max_batch_requests=256,
        num_pages=PAGES,
        prefill_fraction=1.0,
        drafter="eagle3",
        draft_model=str(folder / "head"),
        draft_length=str(len(RATES)),
    )


class Case(NamedTuple):
    """An engine. rates: how often guesses are right; none: as often as they are."""

    options: EngineOptions
    rates: tuple[float, ...] = ()


def measured(cases: Mapping[str, Case], loads: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of streams and engine. All engines are there at once and pass by turns, as a card that has become
    warm is slower: one after the other, the same engine is up to 2 % slower the second time."""
    free_memory()
    engines = {name: _engine_of(case) for name, case in cases.items()}
    try:
        for count in loads.streams:
            workload = equal_requests(count, input_len=loads.input_len, output_len=loads.output_len)
            workload = dataclasses.replace(workload, temperature=loads.temperature)
            for engine in engines.values():
                one_pass(engine, workload, seed=1000 * count)
            before = {name: engine.meter.stats() for name, engine in engines.items()}
            turns = [
                {name: pass_s(one_pass(engine, workload, seed=1000 * count + repeat)) for name, engine in engines.items()}
                for repeat in range(1, 1 + loads.repeats)
            ]
            for name, engine in engines.items():
                taken = sorted(turn[name] for turn in turns)
                row = _row(name, count, taken, count * loads.output_len, (before[name], engine.meter.stats()))
                rounds = RoundTimes(torch.device(cases[name].options.device))
                if cases[name].options.drafter != "off":
                    with rounds.watching():
                        one_pass(engine, workload, seed=1000 * (count + 1) - 1)
                yield row | {"round_s": rounds.seconds()}
    finally:
        for engine in engines.values():
            engine.close()


def _engine_of(case: Case) -> Engine:
    return Engine.build(case.options, Registry.load(options=case.options.plugin_options), forced_rates=case.rates)


def _row(name: str, count: int, seconds: Sequence[float], tokens: int, stats: tuple[EngineStats, EngineStats]) -> dict[str, Any]:
    """seconds: of each pass, from the fastest on, with so many tokens of output. stats: before them and after them."""
    before, after = stats
    steps = after.num_steps - before.num_steps
    verified = after.drafts.verifications - before.drafts.verifications
    return {
        "run": name,
        "streams": count,
        "output_tokens_per_s": tokens / seconds[(len(seconds) - 1) // 2],
        "told_a_verification": (after.drafts.told - before.drafts.told) / verified if verified else None,
        "drafted_a_verification": (after.drafts.drafted - before.drafts.drafted) / verified if verified else None,
        "step_ms": 1e3 * sum(seconds) / steps,
        "host_ms": 1e3 * (after.host_s - before.host_s) / steps,
        "seconds": list(seconds),
    }


def embedded(loads: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The embedded model, which comes with draft models that were trained: greedy text, each stream another prompt, by turns."""
    free_memory()
    engines = {name: LLM(drafter=name, device="cuda", attention_backend="triton", num_pages=PAGES) for name in ("off", "auto")}
    params = SamplingParams(max_tokens=loads.output_len, temperature=0, ignore_eos=True)

    def seconds_of(llm: LLM, prompts: Sequence[str]) -> float:
        began = time.perf_counter()
        llm.generate(prompts, params, progress=False)
        return time.perf_counter() - began

    for count in loads.streams:
        prompts = [f"{PROMPT} She is {index} years old." for index in range(count)]
        turns = [{name: seconds_of(llm, prompts) for name, llm in engines.items()} for _ in range(1 + loads.repeats)]
        for name in engines:
            taken = [turn[name] for turn in turns[1:]]
            yield {
                "run": f"embedded, {name}",
                "streams": count,
                "output_tokens_per_s": count * loads.output_len / statistics.median(taken),
                "first_pass_s": turns[0][name],
                "seconds": sorted(taken),
            }
    for llm in engines.values():
        llm.close()


def rows_of(loads: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Of the 8B shape by turns, then of the embedded model."""
    drafting = options(folder, "cuda", loads.attention)
    plain = {"drafter": "off", "draft_model": None, "draft_length": "auto"}
    without = Case(dataclasses.replace(drafting, **plain))
    if loads.combs:
        chain = dataclasses.replace(drafting, draft_length="4")
        siblings = (*chain.plugin_options, "eagle3.trees=true", "eagle3.siblings=1")
        comb = dataclasses.replace(chain, plugin_options=siblings)
        yield from measured({"chain of four": Case(chain), "one beside each": Case(comb)}, loads)
        return
    if loads.four:
        few = dataclasses.replace(drafting, num_pages=2800, max_batch_requests=320)  # two such engines fit an H100
        chain, plainly = dataclasses.replace(few, draft_length="4"), dataclasses.replace(few, **plain)
        yield from measured({"plain": Case(plainly), "chain of four": Case(chain, FOUR_RATES)}, loads)
        no_guesses = dataclasses.replace(few, draft_length="0")
        yield from measured({"no guesses": Case(no_guesses), "four never right": Case(chain, (0.0,) * 4)}, loads)
        yield from measured({"four always right": Case(chain, (1.0,) * 4)}, loads)
        return
    if loads.lookup:
        looking = dataclasses.replace(without.options, drafter="lookup")
        yield from measured({"plain": without, "lookup": Case(looking)}, loads)
        return
    if loads.auto is None:
        yield from measured({"forced": Case(drafting, RATES)} | ({"plain": without} if loads.plain else {}), loads)
        return
    auto, wanted = dataclasses.replace(drafting, drafter="auto", draft_length="auto"), loads.auto or AUTO
    cases = {"seldom right": Case(auto), "right three times of four": Case(auto, (RATES[0],) * 7)}
    if dummy := {f"auto, {name}": cases[name] for name in cases if name in wanted}:
        yield from measured({"plain": without, **dummy}, loads)
    if "embedded" in wanted:
        yield from embedded(loads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0, help="1: nothing repeats, so that n-grams find nothing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--auto", nargs="*", choices=AUTO, help="of none named, all")
    parser.add_argument("--lookup", action="store_true", help="n-grams beside plain decoding")
    parser.add_argument("--four", action="store_true", help="chains of four guesses, right at several rates")
    parser.add_argument("--combs", action="store_true", help="rounds of chains, and of combs")
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, default=True, help="without --auto: plain decoding too")
    parser.add_argument("--attention", default="triton", help="what verifies; with flashinfer the head has triton")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(asked, Path(folder)):
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    about = {
        "command": " ".join(sys.argv),
        "commit": asked.commit,
        "device": torch.cuda.get_device_name(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "rates": FOUR_RATES if asked.four else RATES,
    }
    print(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
