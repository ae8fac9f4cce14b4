"""A checkpoint whose weights are quantized as they are asked for (``--quantization``).

Matrices of float numbers become blocks of the wanted kind, the embedding and the head Q8_0, as
llama.cpp's files have them. Norms, biases and routers stay what they are, and so does a matrix
whose rows are not whole blocks of 32. Nothing is kept: a backend asks once for each weight, so
that memory holds one weight beside what the backend makes of it. It refuses to change blocks of
one kind into another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from drumline.core.errors import ConfigError
from drumline.models.layers import EMBEDDING, HEAD
from drumline.ops.quant import BLOCK_LAYOUTS, bytes_per_row
from drumline.ops.quantize import QUANTIZERS, quantize
from drumline.ops.weights import FLOAT_KINDS, WeightTensor

BLOCK = 32  # columns to a block of every kind that can be asked for


class QuantizedTensors(Mapping[str, WeightTensor]):
    """``stored`` with its matrices in blocks of ``kind`` (Q8_0, Q4_1 or Q4_0).

    Raises `ConfigError` if matrices are in blocks of another kind already, or if there is none
    whose rows are whole blocks.
    """

    def __init__(self, stored: Mapping[str, WeightTensor], kind: str) -> None:
        assert kind in QUANTIZERS, kind
        self.stored = stored
        self.kind = kind
        flag = kind.lower()
        names = [name for name in stored if self._wanted(name) == kind]
        for name in names:
            other = stored[name].kind
            if other not in FLOAT_KINDS and other != kind:
                problem = f"the checkpoint's weights are {other} already ({name}); leave it out"
                raise ConfigError("quantization", flag, problem)
        if not names:
            problem = f"no weight of the checkpoint has rows of whole blocks of {BLOCK}"
            raise ConfigError("quantization", flag, problem)

    def __getitem__(self, name: str) -> WeightTensor:
        weight = self.stored[name]
        kind = self._wanted(name)
        if kind is None or weight.kind not in FLOAT_KINDS:
            return weight
        blocks = quantize(kind, weight.to_float())
        return WeightTensor(weight.name, weight.shape, kind, blocks)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def kind_of(self, name: str) -> str:
        """The kind a weight comes out as; quantizes nothing."""
        stored = self.stored[name].kind
        return self._wanted(name) or stored if stored in FLOAT_KINDS else stored

    def _wanted(self, name: str) -> str | None:
        """The kind a weight is to have; None where it stays."""
        shape = self.stored[name].shape
        if len(shape) != 2 or not name.endswith(".weight") or shape[1] % BLOCK:
            return None
        if name in (EMBEDDING, HEAD):
            return "Q8_0"
        return None if name.endswith(".gate.weight") else self.kind  # a router's

    @property
    def nbytes(self) -> int:
        """Bytes of all weights once they are quantized; quantizes nothing."""
        return sum(self._bytes(name) for name in self.stored)

    def _bytes(self, name: str) -> int:
        weight, kind = self.stored[name], self._wanted(name)
        if kind is None or weight.kind not in FLOAT_KINDS:
            return weight.nbytes
        assert kind in BLOCK_LAYOUTS
        return math.prod(weight.shape[:-1]) * bytes_per_row(kind, weight.shape[-1])
