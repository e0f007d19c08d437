"""tests/quick_interpreter.py gives what Triton's own interpreter gives."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")
from triton.language import core, semantic
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")

OPERATIONS = ("add", "sub", "mul", "minimum", "and_", "less_than", "equal", "fdiv", "mod")


def plain() -> Any:
    """Triton's pairing of two operands, from a second copy of its module."""
    spec = importlib.util.spec_from_file_location("triton.language.plain_semantic", semantic.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonSemantic.binary_op_type_checking_impl


def operands() -> list[Any]:
    numpy = interpreter.np
    pointer = core.pointer_type(core.float32)
    made: list[Any] = [0, 3, -2, 2**31, 2**40, 0.5, -0.0, float("inf"), 1e-300, True]
    for dtype, data in (
        *((each, interpreter._get_np_dtype(each)) for each in (core.float16, core.float32, core.float64)),
        *((each, interpreter._get_np_dtype(each)) for each in (core.int8, core.int32, core.uint32, core.int64, core.int1)),
        (pointer, numpy.uint64),
    ):
        made.append(core.tensor(interpreter.TensorHandle(numpy.array([5], dtype=data), dtype), dtype))
        for shape in ((2,), (1, 2), (2, 1)):
            values = numpy.arange(1, 3).astype(data).reshape(shape)
            made.append(core.tensor(interpreter.TensorHandle(values, dtype), core.block_type(dtype, list(shape))))
    return made


def told(own: Any, operation: str, left: Any, right: Any) -> object:
    more = (False,) if operation in ("add", "sub", "mul") else ()
    more = (core.PropagateNan.NONE,) if operation == "minimum" else (False,) if operation == "fdiv" else more
    try:
        found = getattr(own, operation)(left, right, *more)
    except Exception as error:
        return type(error).__name__
    data = found.handle.data
    return str(found.type), str(found.handle.dtype), str(data.dtype), data.shape, data.tobytes()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_operations_give_what_tritons_own_give(operation: str) -> None:
    own, check = interpreter.TritonSemantic(interpreter.interpreter_builder), plain()
    pairs = [pair for pair in itertools.product(operands(), repeat=2) if any(isinstance(each, core.tensor) for each in pair)]
    quick = [told(own, operation, *pair) for pair in pairs]
    with patch.object(interpreter.TritonSemantic, "binary_op_type_checking_impl", check):
        slow = [told(own, operation, *pair) for pair in pairs]
    for pair, found, expected in zip(pairs, quick, slow, strict=True):
        assert found == expected, (operation, *(getattr(each, "type", each) for each in pair))


def test_bfloat16_is_widened_as_torch_widens_it() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).short()
    found = interpreter._convert_float(bits.numpy().view("uint16"), core.bfloat16, core.float32, None)
    expected = bits.view(torch.bfloat16).float().view(torch.int32)
    nan = bits.view(torch.bfloat16).isnan()
    found = torch.from_numpy(found.view("int32"))
    assert torch.equal(found[~nan], expected[~nan])
    assert found.view(torch.float32)[nan].isnan().all()


@pytest.mark.parametrize("rounding", [None, interpreter._ir.ROUNDING_MODE.RTNE])
def test_bfloat16_is_narrowed_as_triton_narrows_it(rounding: Any) -> None:
    """Numbers whose lower half is empty, as they are once they have been rounded, and others."""
    spec = importlib.util.spec_from_file_location("triton.runtime.plain_interpreter", interpreter.__file__)
    assert spec is not None
    assert spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {spec.name: plain}):  # dataclasses look for it
        spec.loader.exec_module(plain)
    halves = torch.arange(2**16, dtype=torch.int64) << 16
    normal = halves[(halves & 0x7F800000 != 0) | (halves & 0x7FFFFFFF == 0)]
    for bits in (normal, normal + 0x7FFF, normal + 0x8000, normal + 0xFFFF, halves, halves + 1):
        values = bits.to(torch.uint32).view(torch.float32).numpy()
        found = interpreter._convert_float(values, core.float32, core.bfloat16, rounding)
        expected = plain._convert_float(values, core.float32, core.bfloat16, rounding)
        assert found.dtype == expected.dtype
        assert (found == expected).all()
