"""Triton's interpreter with less work around each operation: the same numbers, in a fraction of the time.

An interpreted operation takes microseconds in numpy and a hundred in wrappers: types and shapes built anew, language modules looked
through and patched for each call. Here types and shapes are kept, and what is patched already is not patched again. For tests, in
which kernels run over a few rows; see conftest.py, which calls `install` once Triton is imported with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any


def install(interpreter: Any) -> None:
    """interpreter: the module `triton.runtime.interpreter`."""
    core = interpreter.tl.core
    _keep_shapes(core)
    _check_sizes_once(interpreter, core)
    _keep_types(interpreter, core)
    _unwrap_tensors_at_once(core)
    _broadcast_only_what_differs(interpreter.TritonSemantic)
    _pair_what_needs_no_promotion(interpreter.TritonSemantic, core)
    _convert_by_a_shift(interpreter)
    _look_for_no_overflow(interpreter.interpreter_builder)
    _patch_once(interpreter)


def _keep_shapes(core: Any) -> None:
    """Of tensors and block types: tuples of a class of Triton's own, each of which makes a type of its elements' types."""

    @functools.cache
    def of_type(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        sizes = core.tuple(shape)
        return sizes, core.validate_block_shape(sizes), str(sizes)

    @functools.cache
    def of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
        numel = 1
        for size in shape:
            numel *= size
        return core.constexpr(numel), core.tuple([core.constexpr(size) for size in shape])

    known: dict[int, tuple[Any, int, str]] = {}  # by the identity of the first of them, which is kept

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if (kept := known.get(id(shape))) is None:
            sizes = tuple(core._unwrap_if_constexpr(size) for size in getattr(shape, "values", shape))
            if not sizes:
                raise TypeError("0d block_type is forbidden")
            kept = of_type(sizes)
            known[id(kept[0])] = kept
        self.element_ty = element_ty
        self.shape, self.numel, said = kept
        self.name = f"<{said}, {element_ty.name}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = of_tensor(tuple(type.shape.values) if type.is_block() else ())

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor


def _check_sizes_once(interpreter: Any, core: Any) -> None:
    """Whether numpy's numbers fit their type: for each result once, without the lookups of a dataclass."""
    handle, pointer = interpreter.TensorHandle, core.pointer_type
    check = handle.__post_init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and type(dtype) is not pointer and data.itemsize * 8 > dtype.primitive_bitwidth:
            check(self)

    handle.__init__ = init


def _keep_types(interpreter: Any, core: Any) -> None:
    """numpy's types of Triton's, which are looked up in a table made for each call; a type is equal to itself."""
    made, of_scalar = interpreter._get_np_dtype, {}

    def numpy_type(type: Any) -> Any:
        name = type.scalar.name
        if name not in of_scalar:
            of_scalar[name] = made(type)
        return of_scalar[name]

    interpreter._get_np_dtype = numpy_type
    for each in (core.dtype, core.pointer_type, core.block_type):
        each.__eq__ = _identity_first(each.__eq__)
    core.dtype.__hash__ = lambda self: hash(self.name)


def _identity_first(equal: Any) -> Any:
    return lambda self, other: self is other or equal(self, other)


def _broadcast_only_what_differs(semantic: Any) -> None:
    """Operands of one shape, and scalars, are what they are."""
    broadcast = semantic.broadcast_impl_value

    def quick(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        blocks = left.is_block(), right.is_block()
        if blocks == (False, False) or (blocks == (True, True) and left.shape.values == right.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = quick


def _unwrap_tensors_at_once(core: Any) -> None:
    """What is no constant is looked at by three questions otherwise, four times an operation."""
    unwrap, tensor = core._unwrap_if_constexpr, core.tensor
    core._unwrap_if_constexpr = lambda value: value if type(value) is tensor else unwrap(value)


def _pair_what_needs_no_promotion(semantic: Any, core: Any) -> None:
    """Operands of one type, a pointer and its offset, and a tensor with a small number: most of all operations.

    A number's tensor is kept, and what is one number stays one beside a block: numpy broadcasts it where it is used.
    """
    check, tensor, pointer = semantic.binary_op_type_checking_impl, core.tensor, core.pointer_type
    floats = (core.float32, core.float16, core.float64)
    ints = (core.int32, core.int64)
    constants = dict[tuple[float, str], Any]()

    def constant(self: Any, value: float, beside: Any, pointers: bool) -> Any:
        kind = type(value)
        if kind is int and -(2**31) <= value < 2**31:
            dtype = core.int32 if pointers and type(beside) is pointer else beside
            known = dtype in floats or dtype in ints
        else:
            dtype, known = beside, kind is float and beside in floats
        if not known:
            return None
        key = (value, dtype.name)
        if key not in constants:
            constants[key] = self.scalar_constant(value, dtype)
        return constants[key]

    def alike(lhs: Any, rhs: Any, left_pointer: bool, right_pointer: bool) -> bool:
        left, right = lhs.dtype, rhs.dtype
        if type(left) is pointer:
            return left_pointer and right in ints
        if type(right) is pointer:
            return right_pointer and left in ints
        return left is right

    def quick(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if arithmetic_check and not div_or_mod:
            left = right = None
            if type(lhs) is tensor:
                left, right = lhs, rhs if type(rhs) is tensor else constant(self, rhs, lhs.dtype, allow_lhs_ptr)
            elif type(rhs) is tensor:
                left, right = constant(self, lhs, rhs.dtype, allow_rhs_ptr), rhs
            if left is not None and right is not None and alike(left, right, allow_lhs_ptr, allow_rhs_ptr):
                blocks = left.type.is_block(), right.type.is_block()
                if blocks == (True, False):
                    return left, tensor(right.handle, left.type.with_element_ty(right.dtype))
                if blocks == (False, True):
                    return tensor(left.handle, right.type.with_element_ty(left.dtype)), right
                return self.broadcast_impl_value(left, right)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.binary_op_type_checking_impl = quick


def _convert_by_a_shift(interpreter: Any) -> None:
    """bfloat16 to float32 and back: its bits are the upper half. Triton's own stay subnormal numbers and what is rounded."""
    convert, numpy = interpreter._convert_float, interpreter.np
    to_even = interpreter._ir.ROUNDING_MODE.RTNE

    def quick(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name == "bf16" and target.name == "fp32":
            return values.astype(numpy.uint32) << numpy.uint32(16)
        if source.name == "fp32" and target.name == "bf16":
            bits = values.view(numpy.uint32)
            size = bits & numpy.uint32(0x7FFFFFFF)
            if not ((size - numpy.uint32(1) < 0x7FFFFF).any() or (rounding == to_even and (bits & numpy.uint32(0x8000)).any())):
                return (bits >> numpy.uint32(16)).astype(numpy.uint16)
        return convert(values, source, target, rounding)

    interpreter._convert_float = quick


def _look_for_no_overflow(builder: Any) -> None:
    """Of each sum of integers, which is computed again with 64 bits for an assertion that is made with `debug` alone."""
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_once(interpreter: Any) -> None:
    """Each launch patches language modules, and so does each function that a kernel calls, though they are patched then."""
    language = interpreter.tl
    originals = {module: module.static_range for module in (language, language.core)}
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)
    looks_for_it = language.core.builtin(_broadcast_only_what_differs).__code__

    @functools.cache
    def builtins_of(module: Any) -> list[tuple[str, Any, Any]]:
        found = [(name, member) for name, member in inspect.getmembers(module) if language.core.is_builtin(member)]
        return [(name, member, _with_semantic(inner(member), semantic)) for name, member in found]

    def inner(member: Any) -> Any:
        """The function itself, if around it is only a look whether there is a `_semantic`."""
        return member.__wrapped__ if getattr(member, "__code__", None) is looks_for_it else member

    def patch_builtins(module: Any, builder: Any, scope: Any) -> None:
        for name, member, patched in builtins_of(module):
            if getattr(module, name) is member:
                scope.set_attr(module, name, patched)

    @functools.cache
    def modules_of(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if any(value is module for module in originals)]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(module.static_range is originals[module] for module in modules_of(self.fn)):
            interpreter._patch_lang(self.fn)
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_builtin = patch_builtins
    interpreter.InterpretedFunction.__call__ = call


def _with_semantic(member: Any, semantic: Any) -> Any:
    def patched(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    return patched
