"""Launching a kernel again for another layer, without Triton's look at every argument."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

_ALIGNMENT = 16  # bytes; Triton compiles another variant for tensors that begin elsewhere


class Launches:
    """The kernels of one plan, as they were compiled for the first layer of a kind.

    `kernel[grid](...)` takes the host 30 to 50 us, most of it to find which variant 40 arguments want. Layers of a kind want the
    same one, and a compiled kernel is launched in 13. In a step of prompts and decoding requests there are three to a layer.
    """

    def __init__(self) -> None:
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def run(
        self,
        kernel: Any,
        grid: tuple[int, int],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[float],
        constants: Callable[[], Mapping[str, Any]],
        *,
        kind: Hashable,
    ) -> None:
        """Launch it. constants: the kernel's last arguments, by name, and options of the compiler.

        kind: of what constants, and integers among `numbers`, depend on, all that plan and tensors do not say.
        """
        key = kernel, kind, *[(each.dtype, each.stride(), each.data_ptr() % _ALIGNMENT == 0) for each in tensors]
        if found := self._compiled.get(key):
            compiled, values = found
            compiled[(*grid, 1)](*tensors, *numbers, *values)
            return
        stated = constants()
        compiled = kernel[grid](*tensors, *numbers, **stated)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[key] = compiled, tuple(stated[name] for name in kernel.arg_names[len(tensors) + len(numbers) :])
