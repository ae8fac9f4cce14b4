"""Ranks that live as long as the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """``ranks_of(3)``: three ranks with a shared-memory group, started once."""
    started: dict[int, Ranks] = {}

    def make(count: int) -> Ranks:
        if count not in started:
            started[count] = Ranks(count)
            started[count].connect_shm()
        return started[count]

    yield make
    for ranks in started.values():
        ranks.close()
