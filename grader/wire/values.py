"""Messages between two processes: JSON for the shape of a value, raw bytes for its tensors, and never pickle.

A value is None, a bool, a number, a string, a list, a dict with string keys, a numpy array or a torch tensor, nested
as you like. On the wire a message is two lengths, a JSON header and a body of raw bytes:

    {"loss": 0.5, "grad": tensor}  ->  {"dict": {"loss": 0.5, "grad": {"array": ["float32", [2, 3], 0]}}} + 24 bytes

A dict is tagged, so no key of a student can pass for an array. Tuples arrive as lists. A student's message may hold
anything: what does not parse raises MessageError, and nothing in it is ever executed. msgspec would save 40 lines, but
accepts messages that are refused here.
"""

import ctypes
import json
import math
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the grader's own process does without torch
    import torch

MAX_HEADER = 2 << 20  # bytes of JSON; as objects of Python they take 12 to 25 times as much
MAX_BODY = 16 << 20  # bytes of all tensors of one message; as float64, where they are compared, up to 8 times as many
MAX_TEXT = 10_000  # characters of one text, the rest is left out: it may be matched, formatted and shown
MAX_BITS = 64  # of an integer
ALIGNMENT = 16  # torch.frombuffer wants its offset to be a multiple of the item size
LENGTHS = struct.Struct("!II")

Fields = dict[str, Any]  # names and values that cross the boundary: arguments of a run, and what ranks report

# bfloat16 has no numpy type: it is widened to float32, which holds each of its values exactly.
DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32", "float64"
)  # fmt: skip
WIRE_DTYPES = {"bfloat16": "uint16"} | {name: name for name in DTYPES}


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element on the wire."""
    return np.dtype(WIRE_DTYPES[dtype]).itemsize


class MessageError(ValueError):
    """Bytes that are no message, or a value that cannot be one."""


class TooMuchError(MessageError):
    """More messages than a run may send: most likely, a student's loop never ends."""


def pack(value: object) -> bytes:
    """Return the bytes of one message. Raises MessageError for a type not listed above, or for too many bytes."""
    body = bytearray()
    try:
        header = json.dumps(_encode(value, body)).encode()
    except RecursionError:
        raise MessageError("the value is nested too deeply, or contains itself") from None
    if len(header) > MAX_HEADER:
        raise MessageError(f"the value has {len(header) >> 20} MiB of text, at most {MAX_HEADER >> 20} can be sent")
    return b"".join([LENGTHS.pack(len(header), len(body)), header, body])


def _encode(value: Any, body: bytearray) -> Any:
    """Return a value as JSON, and append the bytes of its tensors to `body`."""
    torch = sys.modules.get("torch")  # where torch is not imported, nothing can be a tensor
    if value is None or isinstance(value, bool | int | float | str):
        return _bounded(value)
    if isinstance(value, list | tuple):
        return [_encode(item, body) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise MessageError(f"a dict needs strings as keys, got {list(value)[:5]}")
        return {"dict": {key: _encode(item, body) for key, item in value.items()}}
    if isinstance(value, np.generic):
        return value.item()
    tensor = torch is not None and isinstance(value, torch.Tensor)
    if not tensor and not isinstance(value, np.ndarray):
        raise MessageError(
            f"a {type(value).__name__} cannot be sent, only None, numbers, strings, lists, dicts, tensors"
        )
    array: Any = plain_tensor(value) if tensor else value
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype not in WIRE_DTYPES:
        raise MessageError(f"an array of {dtype} cannot be sent, only {', '.join(WIRE_DTYPES)}")
    offset = len(body)
    if offset + array.nbytes > MAX_BODY:
        raise MessageError(f"the value has more than the {MAX_BODY >> 20} MiB of tensors that can be sent")
    body += tensor_bytes(array) if tensor else array.tobytes()
    body += bytes(-len(body) % ALIGNMENT)
    return {"array": [dtype, list(array.shape), offset]}


def _bounded(value: object) -> object:
    """Return the value. Raises MessageError for an integer that no array can hold: arithmetic with it may fail."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise MessageError(f"an integer of {value.bit_length()} bits cannot be sent, at most {MAX_BITS}")
    return value


def plain_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor without its subclass: a student's __torch_function__ must not decide on its bytes."""
    import torch

    try:
        with torch._C.DisableTorchFunctionSubclass():
            plain = torch.Tensor.as_subclass(tensor, torch.Tensor).detach()
    except (NotImplementedError, RuntimeError) as error:
        raise MessageError(f"this tensor has no plain memory that could be sent: {error}") from None
    if plain.device.type != "cpu":
        raise MessageError(f"a tensor on {plain.device} cannot be sent, only one on cpu")
    return plain


def tensor_bytes(plain: "torch.Tensor") -> bytes:
    """Return the elements of a plain tensor in the order of its indices, whatever its strides are."""
    flat = plain.contiguous()
    # Not by numpy(), which keeps the storage that it looks at from being resized for good.
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def to_array(dtype: str, shape: list[int], raw: bytes | memoryview) -> np.ndarray:
    """Return raw bytes as a read-only numpy array; bfloat16 is widened to float32."""
    array = np.frombuffer(raw, WIRE_DTYPES[dtype]).reshape(shape)
    if dtype == "bool":
        return array.view(np.uint8) != 0  # a forged bool of 2 would be neither True nor False
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def to_bytes(array: np.ndarray, dtype: str) -> bytes:
    """Return an array as raw bytes, the inverse of to_array; bfloat16 is rounded to nearest, ties to even."""
    if dtype != "bfloat16":
        return array.astype(WIRE_DTYPES[dtype]).tobytes()
    bits = array.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16).tobytes()


def to_tensor(dtype: str, shape: list[int], raw: bytes | memoryview) -> "torch.Tensor":
    """Return raw bytes as a torch tensor with its own memory."""
    import torch

    if not len(raw):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)


MakeArray = Callable[[str, list[int], memoryview], object]  # to_array or to_tensor


def unpack(header: bytes | bytearray, body: bytes | bytearray | memoryview, make: MakeArray) -> Any:
    """Return the value of a message. Every length, type and offset is checked before use: the sender may be lying."""
    try:
        return _decode(json.loads(header), memoryview(body), make)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise MessageError(f"not a message: {type(error).__name__}: {str(error)[:200]}") from None


def _decode(node: object, body: memoryview, make: MakeArray) -> object:
    """Return the value of a JSON node. The inverse of _encode; raises for what _encode never makes."""
    if isinstance(node, list):
        return [_decode(item, body, make) for item in node]
    if isinstance(node, str):
        return clip(node)
    if not isinstance(node, dict):
        return _bounded(node)
    ((tag, content),) = node.items()
    if tag == "dict":
        return {clip(key): _decode(item, body, make) for key, item in content.items()}
    if tag != "array":
        raise ValueError(f"unknown tag {tag[:50]!r}")
    dtype, shape, offset = content
    if not all(type(n) is int and 0 <= n < 1 << 40 for n in [*shape, offset]) or len(shape) > 32:
        raise ValueError("not a shape or offset")
    length = math.prod(shape) * item_bytes(dtype)
    return make(dtype, shape, body[offset : offset + length])  # which refuses if the body ends before


def clip(text: str) -> str:
    """Make a text fit to be shown: not too long, and valid as UTF-8, which JSON's lone surrogates are not."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}... ({len(text)} characters)"
    return text if text.isascii() else text.encode(errors="replace").decode()


class Frames:
    """Cuts a stream of bytes, which arrives in any pieces, into messages."""

    def __init__(self, make: MakeArray = to_array) -> None:
        self._make = make
        self._buffer = bytearray()
        self.sizes = (0, 0)  # of the message that was yielded last: bytes of its header, of its body

    @property
    def incomplete(self) -> int:
        """Return the number of bytes that are no whole message yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield every message that is complete now. Raises MessageError for one that is too large."""
        self._buffer += data
        first = LENGTHS.size
        while len(self._buffer) >= first:
            header, body = LENGTHS.unpack_from(self._buffer)
            if header > MAX_HEADER or body > MAX_BODY:
                raise MessageError(f"a message of {header} + {body} bytes is announced")
            end = first + header + body
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[:end])
            del self._buffer[:end]
            self.sizes = (header, body)
            yield unpack(message[first : first + header], memoryview(message)[first + header :], self._make)


def receive(connection: socket.socket, make: MakeArray = to_array) -> Any:
    """Block until one message is there and return it. Raises EOFError when the other side has gone."""
    header, body = LENGTHS.unpack(_read(connection, LENGTHS.size))
    return unpack(_read(connection, header), _read(connection, body), make)


def _read(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other side has closed the connection")
        view = view[count:]
    return data
