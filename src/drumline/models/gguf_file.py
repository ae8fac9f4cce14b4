"""The GGUF container, versions 2 and 3, little endian: metadata and a directory of tensors.

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata     key string, type u32, value
    directory    name string, axes u32, axis lengths u64 (fastest first), type u32, offset u64
    padding to general.alignment, then the tensors' bytes

Written from the published specification (docs/gguf.md of ggml). The file is mapped, not read:
opening costs the metadata only. Every broken file is a CheckpointError that says where.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.core.errors import CheckpointError

# ggml type id → (name, elements a block, bytes a block), for the types this engine reads.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# Known names of other types, for the message that refuses them.
_OTHER_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_AXES = 4


@dataclass(frozen=True)
class GGUFTensor:
    """A directory entry. ``shape`` is outermost axis first, ``start`` counts bytes of the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open file. ``buffer`` is a private mapping: writable for torch, never written back."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    buffer: mmap.mmap


def read_gguf(path: Path) -> GGUFFile:
    """Opens ``path``. CheckpointError for anything that is not a whole file of known types."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise CheckpointError(path, "truncated: shorter than a GGUF header")
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
    cursor = _Cursor(path, buffer)
    magic = bytes(buffer[:4])
    if magic != b"GGUF":
        raise CheckpointError(path, f"not a GGUF file: it begins with {magic!r}")
    cursor.at = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        kind = "big-endian GGUF" if swapped else f"GGUF version {version}"
        raise CheckpointError(path, f"{kind} is not supported; supported are versions 2 and 3")
    tensor_count, key_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.name("metadata key")
        if key in metadata:
            raise CheckpointError(path, f"metadata key {key} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("<I"))
    tensors = _read_directory(cursor, tensor_count, metadata)
    return GGUFFile(path, version, metadata, tensors, buffer)


class _Cursor:
    """Reads forward through the mapped file and refuses to run past its end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.at = 0

    def take(self, nbytes: int) -> int:
        """Advances, and returns where the bytes begin."""
        start, self.at = self.at, self.at + nbytes
        if self.at > len(self.buffer):
            raise CheckpointError(
                self.path, f"truncated: the header goes on past the file's {len(self.buffer)} bytes"
            )
        return start

    def scalar(self, form: str) -> Any:
        return struct.unpack_from(form, self.buffer, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.take(length)
        return self.buffer[start : start + length].decode("utf-8", errors="replace")

    def name(self, what: str) -> str:
        """A string that can stand in a message: anything else is a sign of a broken header."""
        text = self.string()
        if not text or not text.isprintable():
            raise CheckpointError(self.path, f"{what} {text[:80]!r} is not printable text")
        return text

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or nested:
            raise CheckpointError(self.path, f"metadata value type {kind} is unknown")
        element, count = self.scalar("<I"), self.scalar("<Q")
        if element in _SCALARS:
            form = _SCALARS[element]
            start = self.take(count * struct.calcsize(form))
            return list(struct.unpack_from(f"<{count}{form[1]}", self.buffer, start))
        if count > len(self.buffer):  # each element takes at least one byte
            self.take(count)
        return [self.value(element, nested=True) for _ in range(count)]


def _read_directory(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
    path, size = cursor.path, len(cursor.buffer)
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name, axes = cursor.name("tensor name"), cursor.scalar("<I")
        if not 1 <= axes <= _MAX_AXES:
            raise CheckpointError(path, f"tensor {name} has {axes} axes, expected 1..{_MAX_AXES}")
        lengths = [cursor.scalar("<Q") for _ in range(axes)]
        entries.append((name, tuple(reversed(lengths)), cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(path, f"general.alignment {alignment!r} is not a power of two")
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_id, offset in entries:
        if type_id not in TENSOR_TYPES:
            known = ", ".join(kind for kind, _, _ in TENSOR_TYPES.values())
            found = _OTHER_TYPES.get(type_id, f"type {type_id}")
            raise CheckpointError(
                path, f"tensor {name} is stored as {found}, not supported; supported are {known}"
            )
        kind, elements, nbytes = TENSOR_TYPES[type_id]
        if shape[-1] % elements:
            raise CheckpointError(
                path,
                f"tensor {name} has rows of {shape[-1]}, {kind} needs a multiple of {elements}",
            )
        total = math.prod(shape) // elements * nbytes
        start = base + offset
        if offset % alignment:
            raise CheckpointError(
                path, f"tensor {name} begins at offset {offset}, not a multiple of {alignment}"
            )
        if start + total > size:
            raise CheckpointError(
                path, f"truncated: tensor {name} ends at byte {start + total}, the file at {size}"
            )
        if name in tensors:
            raise CheckpointError(path, f"tensor {name} occurs twice")
        tensors[name] = GGUFTensor(name, shape, kind, start, total)
    return tensors
