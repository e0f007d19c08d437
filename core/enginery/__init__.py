"""Enginery: an LLM inference engine with a small core, and plugins for everything else.

`from enginery import LLM, AsyncLLM, SamplingParams` is the Python way in. Importing the package alone imports no torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes most of the time before `engine` can take a Ctrl-C
if TYPE_CHECKING:
    from enginery.contracts.request import SamplingParams
    from enginery.llm.async_llm import AsyncLLM
    from enginery.llm.llm import LLM

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]
__version__ = "0.1.0"
_HOMES = {"LLM": "enginery.llm.llm", "AsyncLLM": "enginery.llm.async_llm", "SamplingParams": "enginery.contracts.request"}


def __getattr__(name: str) -> object:
    """Import a name when it is first asked for (PEP 562): torch comes with `LLM` and `AsyncLLM`."""
    if name not in _HOMES:
        raise AttributeError(f"module 'enginery' has no attribute {name!r}")
    from importlib import import_module

    return vars(import_module(_HOMES[name]))[name]
