"""One nursery for all engines of several ranks, so that each starts in a moment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel_engine.fleet import Fleets


@pytest.fixture(scope="session")
def _nursery() -> Iterator[Fleets]:
    fleets = Fleets()
    yield fleets
    fleets.close()


@pytest.fixture
def fleets(_nursery: Fleets) -> Iterator[Fleets]:
    yield _nursery
    _nursery.close_all()
