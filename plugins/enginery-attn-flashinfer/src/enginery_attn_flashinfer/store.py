"""FlashInfer's kernels on disk: which are missing, and compiling those. For all plugins that run FlashInfer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from enginery.api import AttnNeeds, Unsupported

_TARGET: Final = "FLASHINFER_CUDA_ARCH_LIST"
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModuleStore:
    """Implements `enginery.api.KernelStore`. modules: FlashInfer's specs of what a backend loads; imports FlashInfer.

    Modules are compiled for the device they are needed for, and lie in a folder named for it, wherever they were compiled.
    """

    modules: Callable[[AttnNeeds, object | None], Sequence[Any]]

    def missing(self, needs: AttnNeeds, options: object | None) -> Sequence[str]:
        """See `KernelStore`."""
        return [module.name for module in self._modules(needs, options) if not module.is_compiled]

    def compile(self, needs: AttnNeeds, options: object | None) -> None:
        """See `KernelStore`."""
        compile_missing(self._modules(needs, options))

    def _modules(self, needs: AttnNeeds, options: object | None) -> Sequence[Any]:
        if needs.compute_capability is not None:
            os.environ.setdefault(_TARGET, "{}.{}".format(*needs.compute_capability))  # FlashInfer reads it when it is imported
        return self.modules(needs, options)


def compile_missing(modules: Sequence[Any]) -> int:
    """Compile those that are not on disk, all at once. Returns how many. Raises `Unsupported` with the compiler's words.

    Each where FlashInfer looks when it loads it: what its own `build_jit_specs` has compiled, ninja compiles again there, because
    its log is elsewhere (0.6.11; 97 s became 220).
    """
    import flashinfer

    missing = {module.name: module for module in modules if not module.is_compiled}
    try:
        if missing and os.environ.get("FLASHINFER_DISABLE_JIT"):  # FlashInfer's own switch, which its next function overlooks
            raise RuntimeError(f"compiling is switched off by FLASHINFER_DISABLE_JIT, and not on disk are {', '.join(missing)}")
        if missing:
            _log.info("compiling %d of FlashInfer's modules, which takes a minute or two: %s", len(missing), ", ".join(missing))
            with ThreadPoolExecutor(len(missing)) as pool:
                list(pool.map(lambda module: module.build(verbose=False), missing.values()))
    except (RuntimeError, OSError) as error:
        raise Unsupported(
            f"FlashInfer {flashinfer.__version__} could not compile its kernels: {error}; it needs nvcc and ninja for that, or the "
            "package flashinfer-jit-cache, which has them compiled"
        ) from error
    return len(missing)
