"""`engine serve` with an engine process that writes down each step: LOG and a JSON object of `EngineOptions`.

The log has a line of JSON for each step: its tokens, whether a graph ran it, and of each group of prefills the MLA strategy, the
chunks of the prefixes and the length of the longest.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from parity.watch_steps import watch_steps

from enginery.attention.composite import CompositePlan
from enginery.attention.latent import RaggedPart
from enginery.config.schema import EngineOptions
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.engine import ReportProgress
from enginery.contracts.schedule import StepReport
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.plugin.boundary import Observers
from enginery.plugin.registry import Registry
from enginery.serve.background_output import in_background
from enginery.serve.engine import process as engine_process
from enginery.serve.http.logs import dropped
from enginery.serve.server import serve
from enginery.serve.settings import ServeSettings
from enginery.serve.start_display import StartDisplay


class StepLog:
    """Writes a line when a step is reported. Without overlap that is before the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prefills: list[dict[str, object]] = []

    def build(self, asked: EngineOptions, registry: Registry, report: ReportProgress) -> Engine:
        """An engine whose steps are written down."""
        parts = build_parts(asked, registry, report)
        watch_steps(parts, self.read)
        observed = dataclasses.replace(registry, observers=Observers({"watched_server": self.write}))
        return Engine(parts, observed, asked)

    def read(self, batch: ForwardBatch) -> None:
        """Notes how prefills are computed."""
        assert isinstance(batch.plan, CompositePlan)
        for part in batch.plan.parts:
            if part.batch.phase is Phase.PREFILL:
                ragged = isinstance(part, RaggedPart)
                prefix = int((part.batch.kv_lens_cpu - part.batch.q_lens_cpu).max())
                said = {"strategy": str(part.strategy) if ragged else "absorbed", "chunks": len(part.pieces) - 1 if ragged else 0}
                self.prefills.append({**said, "prefix": prefix})

    def write(self, report: StepReport) -> None:
        """A line."""
        said = {"attention": report.attn_backend, "tokens": report.num_tokens, "captured": report.captured}
        with self.path.open("a") as log:
            print(json.dumps({**said, "prefills": self.prefills}), file=log)
        self.prefills = []


if __name__ == "__main__":
    role, log, *options = sys.argv[1:]
    if role == "engine":
        sys.exit(engine_process.run(StepLog(Path(log)).build))
    asked = EngineOptions(**json.loads(options[0]))
    settings = ServeSettings(port=0, engine_command=(sys.executable, __file__, "engine", log))
    with in_background(dropped(settings.log_format)), StartDisplay() as display:
        serve(asked, Registry.load(), settings, display)
