"""Steps recorded on a CPU: a step runs once, and what it did is done again, without the Python between.

    recorded      embed(..) | aten.clamp, copy_ | norm(..) | linear(..) | rotate(..) | attend(..) | ...      each with its arguments

A call of a plugin's kernel is one of addresses and sizes, told by the plugin (`RecordCalls`). Of torch's operators views and empty
tensors are made once and kept; what writes is done again on the same memory; the result of anything else is computed again and
copied over the first one. All that a recording makes is kept while it lives, and is nobody else's.

A step that cannot be repeated so is refused: it reads numbers back, its shapes depend on numbers, it draws random ones, or an
address was taken for a call that nobody told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from enginery.contracts.ops import HostCalls, RecordCalls
from enginery.errors import Unsupported

_aten: Final = torch.ops.aten
_READS: Final = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__)
_REFUSED: Final = {
    torch.Tag.nondeterministic_seeded: "draws random numbers",
    torch.Tag.data_dependent_output: "reads numbers back",
    torch.Tag.dynamic_output_shape: "has a result whose shape depends on numbers",
}
_EMPTY: Final = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)


class HostRecording(NamedTuple):
    """What a step did, in order. kept: every tensor that it made."""

    calls: HostCalls
    kept: Sequence[object]

    def replay(self) -> None:
        for function, arguments in self.calls:
            function(*arguments)


class HostCapture:
    """Records what a function does. tellers: `record_calls` of every operation and backend that it may call."""

    def __init__(self, tellers: Sequence[RecordCalls]) -> None:
        self.tellers = tuple(dict.fromkeys(tellers))

    def __call__(self, run: Callable[[], None]) -> HostRecording:
        """Runs it once. Raises `Unsupported` for what cannot be repeated; then nothing is kept."""
        calls: HostCalls = []
        addresses, operators = _Addresses(), _Operators(calls)
        with ExitStack() as told:
            for tell in self.tellers:
                told.callback(tell, None)
                tell(calls)
            with addresses, operators:
                run()
        if addresses.taken - {number for _, arguments in calls for number in arguments if type(number) is int}:
            raise Unsupported(
                "an address was taken for a call that nobody told: the plugin that made it has no record_calls for it"
            )
        return HostRecording(calls, operators.kept)


class _Addresses(TorchFunctionMode):
    """Notes the addresses that are taken of tensors, and refuses what reads their numbers past torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func in _READS:
            raise Unsupported(f"{func.__name__} reads numbers back")
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.data_ptr and isinstance(result, int) and result:
            self.taken.add(result)
        return result


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees torch's operators without torch's compiler, which it would import for that: 2 s of a server's start."""

    _should_skip_dynamo = classmethod(lambda cls: False)


class _Operators(OperatorMode):
    """Appends what does the same again to `calls`, for each of torch's operators."""

    def __init__(self, calls: HostCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls
        self.kept: list[object] = []
        self._constants: set[int] = set()  # memory that is filled with numbers of Python's, once

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        with torch._C.DisableTorchFunction():
            if _is_made_of_others(func):
                with self:
                    return func.decompose(*args, **(kwargs or {}))
            return self._done(func, args, dict(kwargs or {}))

    def _done(self, func: OpOverload, args: tuple[object, ...], given: Mapping[str, object]) -> object:
        _refuse(func, args, given)
        told, written = len(self.calls), list(_written(func, args, given))
        looked = [_look(tensor) for tensor in written]
        result = func(*args, **given)
        del self.calls[told:]  # what the operator told of itself is done again with it
        self.kept.append((args, given, result))
        found = _of_the_host(func, result)
        again = partial(func, **given) if given else func
        if [_look(tensor) for tensor in written] != looked:
            raise Unsupported(f"{func} gives a tensor another shape or other memory")
        if torch.Tag.inplace_view in func.tags:
            return result
        if written:
            self._check_writes(func, written, found)
            self.calls.append((again, args))
        elif func is _aten.lift_fresh.default:
            self._constants.update(map(_storage, found))
        elif not _shares(found, (args, given)) and func.overloadpacket not in _EMPTY:
            self.calls.append((partial(_compute, again, found), args))
        return result

    def _check_writes(self, func: OpOverload, written: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
        """found: the results. Raises `Unsupported` for what cannot be done again."""
        places = set(map(_storage, written))
        if {_storage(each) for each in found} - places:
            raise Unsupported(f"{func} writes to a tensor and makes another")
        if places & self._constants:
            raise Unsupported(f"{func} writes to a tensor that was made of Python's numbers")


def _of_the_host(func: OpOverload, result: object) -> list[torch.Tensor]:
    """The tensors of a result. Raises `Unsupported` where there is anything else."""
    found = [each for each in _tensors(result) if each.device.type == "cpu" and each.layout is torch.strided]
    if result is not None and len(found) < len(tree_leaves(result)):
        raise Unsupported(f"{func} gives {result!r:.60}, which is no tensor of the host")
    return found


def _compute(again: Callable[..., object], kept: Sequence[torch.Tensor], *arguments: object) -> None:
    for place, value in zip(kept, tree_leaves(again(*arguments)), strict=True):
        place.copy_(value)


def _is_made_of_others(func: OpOverload) -> bool:
    """Whether the operator is one that torch runs as others, which are then seen one by one."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()  # type: ignore[no-untyped-call]
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU")


def _refuse(func: OpOverload, args: tuple[object, ...], given: Mapping[str, object]) -> None:
    if func is _aten.index.Tensor and all(each.dtype in (torch.int64, torch.int32) for each in _tensors(args[1])):
        return  # it is marked for the sake of masks
    for tag, why in _REFUSED.items():
        if tag in func.tags:
            raise Unsupported(f"{func} {why}")
    if any(isinstance(each, torch.Generator) for each in tree_leaves((args, given))):
        raise Unsupported(f"{func} draws random numbers")


def _written(func: OpOverload, args: tuple[object, ...], given: Mapping[str, object]) -> Iterator[torch.Tensor]:
    """The tensors that the operator's schema says it writes to."""
    for place, stated in enumerate(func._schema.arguments):
        if stated.alias_info is not None and stated.alias_info.is_write:
            value = args[place] if place < len(args) and not stated.kwarg_only else given.get(stated.name)
            yield from _tensors(value)


def _tensors(values: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shares(found: Sequence[torch.Tensor], given: object) -> bool:
    """Whether the results are views of what was given. Raises `Unsupported` where some are."""
    places = {_storage(each) for each in _tensors(given) if each.layout is torch.strided}
    views = {_storage(each) in places for each in found}
    if len(views) > 1:
        raise Unsupported("an operator gives views and new tensors at once")
    return views == {True}
