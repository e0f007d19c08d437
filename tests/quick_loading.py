"""The installed plugins are imported, checked and asked once in a process, and not for each engine that a test builds, 0.14 s each.

What was loaded serves again as long as nothing that it comes from is another: paths, the environment, the plugins wanted, functions
of the loader, and every name in each plugin's package. Tests that install plugins add a path, and so load them anew. What is absent
is looked for once, too: choosing a backend asks for the same absent modules dozens of times. `inspect.getattr_static`, by which
backends and plugins are checked, looks at each class once, as it does from Python 3.12 on. A command's function is asked once what
flags it has: an app is built for each command line, 50 ms. And pytest, which in each phase of each test looks twice through all
loggers for those that do not propagate, looks again when there is another one.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import _pytest.logging
import typer.main

from enginery.plugin import discovery, loading, registry
from enginery.plugin.discovery import Wanted
from enginery.plugin.loading import Loaded

Key = tuple[object, ...]


_PATHS: list[str] = []  # `sys.path` when all tests were collected: some of their files put folders on it


def install() -> None:
    """Once, before anything is loaded."""
    _load_once()
    _miss_once()
    _read_flags_once()
    _find_loggers_once()
    if sys.version_info < (3, 12):
        _look_once()


def begin() -> None:
    """Once all tests were collected: from here on other paths are those of a test's own plugins."""
    _PATHS[:] = sys.path


def _load_once() -> None:
    load, kept = loading.load, dict[Key, tuple[Loaded, list[tuple[ModuleType, dict[str, object]]]]]()

    def quick(wanted: Wanted) -> Loaded:
        if _PATHS and sys.path != _PATHS:
            return load(wanted)
        key = (
            wanted,
            tuple(sys.path),
            _environment(os.environ),
            discovery.distributions,
            loading.discover,
            loading.present_devices,
        )
        loaded, modules = kept.get(key, (None, []))
        if loaded is None or any(not _is_as_it_was(module, names) for module, names in modules):
            loaded = load(wanted)
            kept[key] = loaded, [(module, dict(vars(module))) for module in loaded.manager.get_plugins()]
        return loaded

    registry.load = quick


def _environment(variables: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((name, value) for name, value in variables.items() if not name.startswith("PYTEST_"))


def _is_as_it_was(module: ModuleType, names: Mapping[str, object]) -> bool:
    now = vars(module)
    return sys.modules.get(module.__name__) is module and all(now.get(name) is value for name, value in names.items())


def _miss_once() -> None:
    find, absent = importlib.util.find_spec, set[str]()

    def quick(name: str, package: str | None = None) -> ModuleSpec | None:
        if name in sys.modules or name not in absent or (sys.path != _PATHS and _may_be_elsewhere(name)):
            found = find(name, package)
            if found is None and sys.path == _PATHS and package is None:
                absent.add(name)
            return found
        return None

    importlib.util.find_spec = quick


def _may_be_elsewhere(name: str) -> bool:
    """Whether a test's own paths, if these are all that is new, may have what the others have not."""
    if "." in name or not {*_PATHS} <= {*sys.path}:
        return True
    return PathFinder.find_spec(name, [path for path in sys.path if path not in _PATHS]) is not None


def _look_once() -> None:
    find, kept = inspect._shadowed_dict, WeakKeyDictionary[type, object]()

    def quick(kind: type) -> object:
        try:
            return kept[kind]
        except KeyError:
            return kept.setdefault(kind, find(kind))

    inspect._shadowed_dict = quick


def _read_flags_once() -> None:
    read = functools.cache(typer.main.get_params_from_function)

    def quick(function: Callable[..., object]) -> dict[str, object]:
        return {name: copy.copy(flag) for name, flag in read(function).items()}

    typer.main.get_params_from_function = quick


def _find_loggers_once() -> None:
    kind = _pytest.logging.catching_logs
    if "attached_loggers" not in getattr(kind, "__slots__", ()):
        return  # an older pytest, which looks for none
    known, apart, root = 0, list[logging.Logger](), logging.root

    def enter(self: Any) -> logging.Handler:
        nonlocal known
        found = root.manager.loggerDict
        if known != len(found):
            known, apart[:] = (
                len(found),
                [each for each in found.values() if isinstance(each, logging.Logger) and not each.propagate],
            )
        self.attached_loggers += [root, *apart]
        for logger in self.attached_loggers:
            logger.addHandler(self.handler)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(root.level, self.level))
        return self.handler

    kind.__enter__ = enter
