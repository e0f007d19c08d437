"""Speculation without trained weights: a draft model of random weights at its full cost, whose guesses are right by chance.

A workload is run plainly, with the draft model that guesses nothing, and with guesses that are right at the given rates, never
and always. Tokens mean nothing where guesses are right by chance; times do, as the same is computed whatever is drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from enginery.bench.device_limits import device_name
from enginery.bench.latency import one_pass, pass_s
from enginery.bench.offline import free_memory, with_room
from enginery.bench.report import Report, Row, facts_details, make_report
from enginery.bench.rounds import RoundTimes
from enginery.bench.workloads import Workload, checkpoint_folder
from enginery.checkpoint.folder import read_config
from enginery.config.schema import EngineOptions
from enginery.config.sources import registry_for
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.engine import EngineFacts, EngineStats
from enginery.engine.engine import Engine
from enginery.errors import ConfigError
from enginery.plugin.registry import Registry
from enginery.speculate.length import told_on_average
from enginery.worker.device import torch_device

_NOBODY: Final = EngineStats()


class _Case(NamedTuple):
    """One way to run a workload. rates: None where no guess is verified."""

    name: str
    options: EngineOptions
    rates: tuple[float, ...] | None = None


class _Measured(NamedTuple):
    """Seconds of the median pass, those and counts of all that count, and of the parts of a round, if guesses were verified."""

    middle_s: float
    total_s: float
    round_s: dict[str, float] | None
    facts: EngineFacts
    before: EngineStats
    after: EngineStats


def parse_rates(text: str) -> tuple[float, ...]:
    """`0.78,0.74`: how often each guess is right, if those before it are. Raises `ConfigError`."""
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"--force-acceptance is {text!r}, but must be shares between 0 and 1, as 0.78,0.74,0.74")
    return rates


def bench_forced(workloads: Sequence[Workload], options: EngineOptions, rates: tuple[float, ...], *, repeats: int) -> Report:
    """Run each workload in all five ways, one engine after the other."""
    registry = registry_for(options)
    if options.drafter in ("off", "auto"):
        raise ConfigError(f"--force-acceptance needs a draft model, and --drafter is {options.drafter}; name one, as eagle")
    if options.draft_length not in ("auto", str(len(rates))):
        raise ConfigError(f"--draft-length is {options.draft_length}, and --force-acceptance has {len(rates)} rates; leave one out")
    rows: list[Row] = []
    for workload in workloads:
        asked = dataclasses.replace(with_room(options, workload), model=workload.shape, load_format="dummy")
        asked = dataclasses.replace(asked, prefill_fraction=1.0 if asked.prefill_fraction is None else asked.prefill_fraction)
        with checkpoint_folder(asked) as known, _with_draft_model(known, registry) as whole:
            measured = {case: _measure(case, registry, workload, repeats=repeats) for case in _cases(whole, rates)}
        plain_s = next(iter(measured.values())).middle_s
        rows += [_row(case, workload, found, plain_s=plain_s) for case, found in measured.items()]
    return make_report("offline", device_name(torch_device(options.device)), rows, options=options)


def _cases(options: EngineOptions, rates: tuple[float, ...]) -> list[_Case]:
    guessing = dataclasses.replace(options, draft_length=str(len(rates)))
    return [
        _Case("plain", dataclasses.replace(options, drafter="off", draft_model=None, draft_length="auto")),
        _Case("no guesses", dataclasses.replace(options, draft_length="0")),
        _Case(f"forced {','.join(map(str, rates))}", guessing, rates),
        _Case("forced 0", guessing, (0.0,) * len(rates)),
        _Case("forced 1", guessing, (1.0,) * len(rates)),
    ]


@contextlib.contextmanager
def _with_draft_model(options: EngineOptions, registry: Registry) -> Iterator[EngineOptions]:
    """The options with a draft model: the target's own, the one that is named, or a config.json as a head of it would have."""
    spec = registry.named(DrafterSpec, options.drafter, "drafter").spec
    if options.draft_model is not None or spec.suits is not None:
        yield options
        return
    if spec.model is None:
        raise ConfigError(f"--drafter is {options.drafter}, which is no head; give a draft model with --draft-model, or name one")
    config = read_config(Path(str(options.model))) | {"architectures": list(spec.model.architectures[:1]), "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield dataclasses.replace(options, draft_model=folder)


def _measure(case: _Case, registry: Registry, workload: Workload, *, repeats: int) -> _Measured:
    """The first pass does not count. Each has prompts of its own."""
    free_memory()
    engine = Engine.build(case.options, registry, forced_rates=case.rates or ())
    try:
        before, runs = _NOBODY, list[float]()
        for repeat in range(repeats + 1):
            before = engine.meter.stats() if repeat == 1 else before
            runs.append(pass_s(one_pass(engine, workload, seed=1 + repeat)))
        middle_s, after = sorted(runs[1:])[(repeats - 1) // 2], engine.meter.stats()
        rounds = RoundTimes(torch_device(case.options.device))
        if case.rates is not None:
            with rounds.watching():
                one_pass(engine, workload, seed=2 + repeats)
        return _Measured(middle_s, sum(runs[1:]), rounds.seconds(), engine.facts, before, after)
    finally:
        engine.close()


def _row(case: _Case, workload: Workload, measured: _Measured, *, plain_s: float) -> Row:
    """step_gap_s: of a step, the time in which no step runs: the host's. None where steps overlap."""
    before, after = measured.before, measured.after
    prompt_tokens, output_tokens = map(sum, zip(*workload.lengths, strict=True))
    steps, verified = after.num_steps - before.num_steps, after.drafts.verifications - before.drafts.verifications
    lengths = {"acceptance_length": (after.drafts.told - before.drafts.told) / verified if verified else None}
    gap_s = (measured.total_s - (after.run_s - before.run_s)) / steps
    if case.rates is not None:
        lengths["expected_length"] = told_on_average(case.rates)
    return Row(
        what={
            "workload": workload.name,
            "shape": measured.facts.model_name,
            "dtype": measured.facts.dtype,
            "run": case.name,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
        },
        measured={"total_s": measured.middle_s},
        derived={
            "output_tokens_per_s": output_tokens / measured.middle_s,
            "times_plain": plain_s / measured.middle_s,
            **{name: None if value is None else round(value, 3) for name, value in lengths.items()},
        },
        details={
            "summary": workload.summary,
            "forced": case.rates is not None,
            "rates": case.rates,
            "steps": steps,
            "round_s": measured.round_s,
            "step_gap_s": gap_s if gap_s > 0 else None,
            "step_host_s": (after.host_s - before.host_s) / steps,
            "step_run_s": (after.run_s - before.run_s) / steps,
            **facts_details(measured.facts),
        },
    )
