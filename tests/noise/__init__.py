"""A checkpoint without weights, for `load_format="dummy"`: a Llama of four layers whose tokens are bytes. It writes noise."""

from pathlib import Path

FOLDER = Path(__file__).parent
