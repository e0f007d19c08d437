"""From the bytes of a body to its type, or to what is wrong with it.

Bodies become their types in one go, without dicts and lists in between. That call holds the GIL until it ends, so what could make
it long, or its result many times larger than the body, is looked for first, by searches that take milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
import msgspec.inspect

from enginery.errors import RequestError
from enginery.plugin.near import did_you_mean
from enginery.serve.schemas.completions import UNSUPPORTED

MAX_VALUES: Final = 1 << 18  # texts (names too), arrays and objects
MAX_NUMBERS: Final = 1 << 21  # and what else commas part
MAX_DIGITS: Final = 100  # of a number, in a row: reading one takes the square of its digits
_MAX_NAME: Final = 100
_MAX_MESSAGE: Final = 600
_64_BITS: Final = 19  # digits that a number beyond 64 bits has at the least
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"  # which a parser may ignore (RFC 8259, 8.1), and Windows writes
_Parts = Mapping[str, "_Parts"]
_PARTS: Final[_Parts] = {  # what has fields below a field, by names; schemas, arguments and metadata are left as they are
    "messages": {"content": {}, "tool_calls": {"function": {}}},
    "input": {"content": {}, "output": {}},
    "tools": {"function": {}},
    "response_format": {"json_schema": {}},
}
_ONLY_DIGITS: Final = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
_HALF: Final = re.compile(rb"\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w)\\u[dD][c-fC-F]\w\w")
_TEXT: Final = re.compile(rb'"[^"]*+"?')
_UNKNOWN: Final = re.compile(r"Object contains unknown field `((?!.*` - at `\$).*)`", re.DOTALL)  # of the body itself
_UNKNOWN_WITHIN: Final = re.compile(r"^Object contains unknown field `(\w+)` - at ")
_JSON_NAMES: Final = {"array": "an array", "str": "a string", "bool": "a boolean", "null": "null"}
RequestT = TypeVar("RequestT", bound=msgspec.Struct)


def decode_request(body: bytes | bytearray, kind: type[RequestT]) -> RequestT:
    """Decode and check a body. Raises `RequestError` for whatever is wrong, with the name of the field."""
    body = body.removeprefix(_BYTE_ORDER_MARK)
    if not body:
        raise RequestError("the body is empty, but must be a JSON object")
    if told := too_much(body):
        raise RequestError(f"the body has {told}")
    try:
        request = _decode(body, kind)
        if _has_digits(body, _64_BITS):
            _refuse_long_numbers(request)
        return request
    except msgspec.ValidationError as error:
        raise _refusal(_shortened(str(error)), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        half = _HALF.search(body)  # msgspec says then that the body is truncated, or where the pair ends
        why = f"{half[0].decode()} is half of a character, as where a text was cut; leave it out" if half else _place(body) or error
        raise RequestError(f"the body is not JSON: {why}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error


def _place(body: bytes | bytearray) -> UnicodeDecodeError | None:
    """Where it is no UTF-8, if anywhere; msgspec says the place within one of its texts."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error
    return None


def too_much(body: bytes | bytearray) -> str | None:
    """What the body has too much of, if anything. The exact count, which leaves texts out, follows only if a quick one is high."""
    num_values = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    if num_values <= MAX_VALUES and body.count(b",") <= MAX_NUMBERS and not _has_digits(body, MAX_DIGITS + 1):
        return None
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # quotes are the ends of texts now
    num_values = plain.count(b'"') // 2
    if num_values <= MAX_VALUES:
        plain = _TEXT.sub(b" ", plain)
        num_values += plain.count(b"[") + plain.count(b"{")
    if num_values > MAX_VALUES:
        return f"more than {MAX_VALUES:,} texts, arrays and objects; send less, or in parts"
    if plain.count(b",") > MAX_NUMBERS:
        return f"more than {MAX_NUMBERS:,} numbers; send less, or in parts"
    return f"a number of more than {MAX_DIGITS} digits" if _has_digits(plain, MAX_DIGITS + 1) else None


def _has_digits(body: bytes | bytearray, count: int) -> bool:
    """Whether `count` digits follow each other, in a number or in a text."""
    return b"0" * count in body.translate(_ONLY_DIGITS)


def _decode(body: bytes | bytearray, kind: type[RequestT]) -> RequestT:
    decoder: msgspec.json.Decoder[RequestT] = _decoder(kind)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        if b"null" not in body:
            raise
        return decoder.decode(_without_nulls(body))


@functools.cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:  # a cached function cannot be generic
    return msgspec.json.Decoder(kind)


def _without_nulls(body: bytes | bytearray) -> bytes:
    """The body without fields that are null, of itself and of its parts, whatever their names are.

    Clients send back what they received, with null where there was nothing.
    """
    return bytes(_pruned(msgspec.Raw(body), _PARTS))


def _pruned(value: msgspec.Raw, parts: _Parts) -> msgspec.Raw:
    """An object, or each of a list, without its fields that are null, and so below. parts: what is below, by the fields' names."""
    with contextlib.suppress(msgspec.ValidationError):
        every = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
        fields = {name: raw for name, raw in every.items() if len(memoryview(raw)) != 4 or bytes(raw) != b"null"}
        fields |= {name: _pruned(fields[name], parts[name]) for name in fields.keys() & parts.keys()}
        return msgspec.Raw(msgspec.json.encode(fields))
    with contextlib.suppress(msgspec.ValidationError):
        items = msgspec.json.decode(value, type=list[dict[str, msgspec.Raw]])
        return msgspec.Raw(msgspec.json.encode([_pruned(msgspec.Raw(msgspec.json.encode(item)), parts) for item in items]))
    return value


def _refuse_long_numbers(request: msgspec.Struct) -> None:
    for name in request.__struct_fields__:
        if _is_too_long(getattr(request, name)):
            raise RequestError(f"{name} has a whole number of more than 64 bits", param=name)


def _is_too_long(value: object) -> bool:
    """Whether a whole number in `value` is beyond 64 bits, and so cannot be passed on between processes."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return True
    return False


def _refusal(message: str, kind: type[msgspec.Struct]) -> RequestError:
    """An error of msgspec in the words of this server."""
    if unknown := _UNKNOWN.fullmatch(message):
        name = unknown[1][:_MAX_NAME]
        why = UNSUPPORTED.get(name) or f"there is no such field{did_you_mean(name, kind.__struct_fields__)}"
        return RequestError(f"{name!r} is not accepted: {why}", param=name)
    if other := re.fullmatch(r"Expected `object`, got `(\w+)`", message):
        return RequestError(f"the body must be a JSON object, and is {_JSON_NAMES.get(other[1], 'a number')}")
    why = "".join(f"; {UNSUPPORTED[name]}" for name in _UNKNOWN_WITHIN.findall(message) if name in UNSUPPORTED)
    return RequestError(_with_choices(message, kind) + why, param=_param(message))


def _shortened(message: str) -> str:
    """Shorten a message, which may quote the client, in its middle: msgspec says at the end where the error is."""
    half = _MAX_MESSAGE // 2
    return message if len(message) <= _MAX_MESSAGE else f"{message[:half]}…{message[-half:]}"


def _with_choices(message: str, kind: type[msgspec.Struct]) -> str:
    """The message of msgspec. Where a value is none of the allowed ones, it lists these."""
    found = re.fullmatch(r"Invalid (?:enum )?value (.+) - at `\$\.(.+)`", message, re.DOTALL)
    if found is None:
        return message
    types = [msgspec.inspect.type_info(kind)]
    for step in re.findall(r"\[|[^.\[\]]+", re.sub(r"\[[^\]]*\]", "[", found[2])):
        types = [inner for outer in types for inner in _inside(outer, step)]
    choices = dict.fromkeys(repr(value) for outer in types for value in _values(outer))
    told = f"{found[2]} is {found[1]}, but must be {' or '.join(choices)}".replace(" True", " true").replace(" False", " false")
    why = f"; {UNSUPPORTED[found[2]]}" if found[2] in UNSUPPORTED else ""
    return told + why if choices else message


def _inside(outer: msgspec.inspect.Type, step: str) -> list[msgspec.inspect.Type]:
    """The types of a field of that name, or of items where the step is a bracket."""
    match outer:
        case msgspec.inspect.UnionType():
            return [inner for each in outer.types for inner in _inside(each, step)]
        case msgspec.inspect.Metadata():
            return _inside(outer.type, step)
        case msgspec.inspect.ListType() if step == "[":
            return [outer.item_type]
        case msgspec.inspect.StructType() if step == outer.tag_field:
            return [msgspec.inspect.LiteralType((outer.tag,))]
        case msgspec.inspect.StructType():
            return [field.type for field in outer.fields if field.encode_name == step]
    return []


def _values(outer: msgspec.inspect.Type) -> list[object]:
    """All values that a literal type allows."""
    match outer:
        case msgspec.inspect.UnionType():
            return [value for each in outer.types for value in _values(each)]
        case msgspec.inspect.LiteralType():
            return list(outer.values)
    return []


def _param(message: str) -> str | None:
    """The field that msgspec's message points to."""
    found = re.search(r"(?:at|in) `\$\.(\w+)", message) or re.search(r"missing required field `(\w+)`", message)
    return found[1] if found else None
