"""What this machine can do at best, measured now: reading memory, and multiplying in registers.

Needs the native module. Numbers of a shared machine change from second to second, so whoever
compares a step with them measures both by turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from drumline.core.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

READ_BYTES = 256 * 2**20  # well beyond any cache
ROUNDS = 2_000_000  # of ten independent multiply-adds: some milliseconds
SIGNALS = 20_000  # there and back: a millisecond or a few


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes read per second, multiply-adds per second of int8 and of float32 numbers, and how long
    threads take to see what another wrote; None for one thread."""

    bytes_per_second: float
    int8_macs_per_second: float
    float_macs_per_second: float
    signal_seconds: float | None = None


class Probe:
    """Measures limits on ``threads`` threads along one instruction-set path."""

    def __init__(self, threads: int, path: str) -> None:
        try:
            import drumline._native as native
        except ImportError:
            raise UsageError("roofline needs the native module, which was not built") from None
        self._native = native
        self.threads = threads
        self.path = path
        self._bytes: NDArray[np.uint8] = np.ones(READ_BYTES, dtype=np.uint8)

    def measure(self, repeats: int = 3) -> Limits:
        """The best of a few tries: what disturbs can only make them slower."""
        native, threads, path = self._native, self.threads, self.path
        address = self._bytes.ctypes.data
        seconds = min(
            native.read_seconds(address, READ_BYTES, threads, path) for _ in range(repeats)
        )
        int8 = max(native.int8_macs_per_second(ROUNDS, threads, path) for _ in range(repeats))
        single = max(native.float_macs_per_second(ROUNDS, threads, path) for _ in range(repeats))
        signal = None
        if threads > 1:
            signal = min(native.signal_seconds(SIGNALS) for _ in range(repeats))
        return Limits(READ_BYTES / seconds, int8, single, signal)
