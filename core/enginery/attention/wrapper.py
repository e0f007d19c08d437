"""A backend around one other, for plugins that change or watch what another plugin's backend does.

An object that passes on what it does not know by `__getattr__` has none of the hooks of what it wraps, because hooks are found on
the class. A `Wrapper` has all of them, from the specifications and the policy table, those of later versions too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from enginery.attention.composite import Composite, Part
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import AttnBackend
from enginery.contracts.batch import ForwardBatch


class Wrapper(Composite):
    """Implements `AttnBackend`. Override `attend` or a hook, mark the hook with `hookimpl`, and call `super()`.

    kind: how the wrapper is called in backend ids: `kind(inner's id)`.
    """

    kind: ClassVar[str] = "wrapper"

    def __init__(self, inner: AttnBackend) -> None:
        """Raises `PluginError` where `inner` breaks a rule of backends."""
        super().__init__(BackendRelay(inner, type(inner).__name__))

    def cut(self, batch: ForwardBatch, *, capture: bool) -> Iterator[Part]:
        yield Part(child=0, rows=None, batch=batch)
