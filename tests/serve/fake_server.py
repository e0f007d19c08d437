"""The whole server over the fake engine: FOLDER PORT [device [drain_s]]. Prints what `engine serve` prints."""

from __future__ import annotations

import sys

import fake_engine

from enginery.config.schema import EngineOptions
from enginery.errors import EnginError
from enginery.plugin.registry import Registry
from enginery.serve.server import ServeSettings, serve

if __name__ == "__main__":
    folder, port, *rest = sys.argv[1:]
    options = EngineOptions(model=folder, device=rest[0] if rest else "auto")
    settings = ServeSettings(port=int(port), engine_command=fake_engine.COMMAND, drain_s=float(rest[1]) if rest[1:] else 1.0)
    try:
        serve(options, Registry.load(no_plugins=True), settings)
    except EnginError as error:
        print(f"engine: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
