"""Which replica serves a request: the least loaded, or one that has its beginning already.

Load is tokens: of prompts not yet answered, and of output still owed. A replica that was sent a
prompt with the same first blocks is taken while it owes no more beyond the others than these
blocks save: so conversations stay where their beginning lies, and no replica is flooded for it.
Ties go to the lowest index. Remembers a bounded number of blocks, as hashes. Knows no process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from drumline.kvcache import PrefixChain

PREFIXES_MAX = 1 << 16
BLOCK_TOKENS = 16


class Router:
    """Counts what each replica owes, in tokens. ``prefixes_max``: blocks that are remembered."""

    def __init__(self, replica_count: int, prefixes_max: int = PREFIXES_MAX) -> None:
        assert replica_count >= 1
        self.loads = [0] * replica_count
        self._prefixes_max = prefixes_max
        self._owners: OrderedDict[bytes, int] = OrderedDict()  # block key: who had it last
        self._live: dict[int, tuple[int, int]] = {}  # number: (replica, tokens owed)

    def place(
        self, number: int, prompt: Sequence[int], max_tokens: int, open_to: Sequence[bool] = ()
    ) -> int:
        """The replica for a request, which owes its tokens from now on. ``open_to``: which
        replicas take requests, all if it is empty; at least one must."""
        assert number not in self._live
        able = [index for index in range(len(self.loads)) if not open_to or open_to[index]]
        assert able, "no replica takes requests"
        keys = self._keys(prompt)
        found = self._found(keys)
        replica = min(able, key=lambda index: (self.loads[index] - found[index], index))
        owed = len(prompt) - found[replica] + max_tokens
        self.loads[replica] += owed
        self._live[number] = (replica, owed)
        for key in keys:
            self._owners[key] = replica
            self._owners.move_to_end(key)
        while len(self._owners) > self._prefixes_max:
            self._owners.popitem(last=False)
        return replica

    def replica_of(self, number: int) -> int | None:
        """Where a live request is; None if it is unknown."""
        live = self._live.get(number)
        return None if live is None else live[0]

    def produced(self, number: int, token_count: int) -> None:
        """The request has so many more tokens; unknown numbers pass."""
        live = self._live.get(number)
        if live is not None:
            replica, owed = live
            count = min(owed, token_count)
            self.loads[replica] -= count
            self._live[number] = (replica, owed - count)

    def ended(self, number: int) -> None:
        """The request owes nothing any more; unknown numbers pass."""
        live = self._live.pop(number, None)
        if live is not None:
            self.loads[live[0]] -= live[1]

    def _keys(self, prompt: Sequence[int]) -> list[bytes]:
        chain = PrefixChain(BLOCK_TOKENS)
        chain.extend(prompt, len(prompt))
        return chain.keys[1:]

    def _found(self, keys: Sequence[bytes]) -> list[int]:
        """Tokens of the prompt that each replica is taken to have, from the first on."""
        found = [0] * len(self.loads)
        owner: int | None = None
        for key in keys:
            here = self._owners.get(key)
            if here is None or (owner is not None and here != owner):
                break
            owner = here
            found[owner] += BLOCK_TOKENS
        return found
