"""One weight as a checkpoint stores it: floats of some width, or raw GGUF blocks.

Backends decide what to make of it (`Ops.load_linear`); nothing here computes beyond the
conversion to float32. The data may be a view of a memory-mapped file and is never written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.ops.quant import BLOCK_LAYOUTS, bytes_per_row, dequantize

FLOAT_KINDS: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
KINDS: tuple[str, ...] = (*FLOAT_KINDS, *BLOCK_LAYOUTS)


@dataclass(frozen=True, eq=False)
class WeightTensor:
    """A named weight of a checkpoint.

    ``kind`` F32, F16 or BF16: ``data`` has that dtype and ``shape``. A block kind (Q8_0, Q4_0,
    Q4_1, Q4_K, Q5_K, Q6_K): ``data`` is uint8 ``[rows, bytes_per_row]`` with the file's blocks
    as they are, where rows is the product of all axes of ``shape`` but the last.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: Tensor

    def __post_init__(self) -> None:
        if self.kind in FLOAT_KINDS:
            dtype, stored = FLOAT_KINDS[self.kind], self.shape
        else:
            dtype = torch.uint8
            stored = (math.prod(self.shape[:-1]), bytes_per_row(self.kind, self.shape[-1]))
        given = (self.data.dtype, tuple(self.data.shape))
        assert given == (dtype, stored), f"{self.name}: {self.kind} {self.shape} in {given}"

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.data.numel() * self.data.element_size()

    def to_float(self) -> Tensor:
        """Float32 of ``shape``: contiguous, in fresh memory (torch aligns it to 64 bytes)."""
        if self.kind in FLOAT_KINDS:
            return self.data.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        return dequantize(self.kind, self.data).view(self.shape)
