"""The whole server over the fake engine and the fake parsers: FOLDER PORT [device [drain_s [settings and max_model_len as JSON]]].

The settings may have `options`, of the engine. Prints what `engine serve` prints.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import fake_engine
import fake_parsers

from enginery.config.schema import EngineOptions
from enginery.errors import EnginError
from enginery.plugin.registry import Registry
from enginery.serve.background_output import in_background
from enginery.serve.http.logs import dropped
from enginery.serve.server import ServeSettings, serve
from enginery.serve.start_display import StartDisplay

if __name__ == "__main__":
    folder, port, *rest = sys.argv[1:]
    more = json.loads(rest[2]) if rest[2:] else {}
    more = {name: tuple(value) if isinstance(value, list) else value for name, value in more.items()}
    asked = {"max_model_len": more.pop("max_model_len", None), **more.pop("options", {})}
    options = EngineOptions(model=folder, device=rest[0] if rest else "auto", **asked)
    drain_s = float(rest[1]) if rest[1:] else 1.0
    settings = ServeSettings(port=int(port), engine_command=fake_engine.COMMAND, drain_s=drain_s, **more)
    try:
        with in_background(dropped(settings.log_format)), StartDisplay() as display:
            bare = Registry.load(no_plugins=True)
            serve(options, dataclasses.replace(bare, on_offer=(*bare.on_offer, *fake_parsers.OFFERS)), settings, display)
    except EnginError as error:
        print(f"engine: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
