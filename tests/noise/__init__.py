"""A checkpoint without weights, for `load_format="dummy"`: a Llama of four layers whose tokens are bytes. It writes noise."""

from pathlib import Path

OPTIONS = {"model": str(Path(__file__).parent), "load_format": "dummy"}
TWO_LAYERS = {**OPTIONS, "model": str(Path(__file__).parent / "two_layers")}  # for tests that count no layers
FLAGS = ("--model", OPTIONS["model"], "--load-format", "dummy")
