"""Names for the content of full blocks: a hash chain over committed tokens.

Key i stands for everything in blocks 0..i, because the key of block i - 1 goes into it: two
sequences share key i only if they agree from the first token on. The hash is cryptographic and
the same in every process, so keys can be compared across ranks. Knows no block index.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

KEY_BYTES = 16


class PrefixChain:
    """The keys of one sequence's full blocks. Committed tokens never change, so keys only grow.

    ``extra`` is whatever else the cached values depend on (an adapter, a cache salt); chains with
    different extras share nothing.
    """

    __slots__ = ("_block_size", "keys")

    def __init__(self, block_size: int, extra: Sequence[str | int] = ()) -> None:
        assert block_size > 0
        self._block_size = block_size
        self.keys: list[bytes] = [_root_key(extra)]  # keys[0] is the root, keys[i + 1] block i

    def extend(self, token_ids: Sequence[int], length: int) -> None:
        """Adds the keys of the full blocks within the first ``length`` tokens."""
        size = self._block_size
        assert length <= len(token_ids)
        for block in range(len(self.keys) - 1, length // size):
            tokens = token_ids[block * size : (block + 1) * size]
            packed = struct.pack(f"<{size}I", *tokens)
            self.keys.append(_digest(self.keys[-1], packed))


def _root_key(extra: Sequence[str | int]) -> bytes:
    # repr keeps 1 and "1" apart, and the tuple's commas keep ("ab",) and ("a", "b") apart.
    return _digest(b"root", repr(tuple(extra)).encode())


def _digest(parent: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(parent + content, digest_size=KEY_BYTES).digest()
