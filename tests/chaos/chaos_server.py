"""The server over an engine that fails on demand. Takes `EngineOptions` and `ServeSettings`, each as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from enginery.config.schema import EngineOptions
from enginery.errors import EnginError
from enginery.plugin.registry import Registry
from enginery.serve.background_output import in_background
from enginery.serve.http.connection import Limits
from enginery.serve.http.logs import dropped
from enginery.serve.server import serve
from enginery.serve.settings import ServeSettings
from enginery.serve.start_display import StartDisplay

ENGINE = (sys.executable, str(Path(__file__).with_name("faulty_engine.py")))


def main(options: str, settings: str) -> None:
    asked = EngineOptions(**json.loads(options))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(settings).items()}
    limits = Limits(**given.pop("limits", {}))
    checked = ServeSettings(**given, port=0, limits=limits, engine_command=ENGINE)
    try:
        with in_background(dropped(checked.log_format)), StartDisplay() as display:
            serve(asked, Registry.load(), checked, display)
    except EnginError as error:
        print(f"engine: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
