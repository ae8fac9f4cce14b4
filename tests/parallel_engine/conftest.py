"""One nursery for all engines of several ranks, so that each starts in a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.engine.core import EngineCore
from drumline.models import tiny_drafts
from parallel_engine.cases import Lasting, Placed
from parallel_engine.fleet import Fleets, config, run


@pytest.fixture(scope="session")
def _nursery() -> Iterator[Fleets]:
    fleets = Fleets()
    yield fleets
    fleets.close()


@pytest.fixture
def fleets(_nursery: Fleets) -> Iterator[Fleets]:
    yield _nursery
    _nursery.close_all()


# ---------------------------------------------------------------- for the cases


@pytest.fixture(scope="session")
def case_model(tiny_path: Callable[..., Path]) -> Path:
    """A tiny model with experts, and its drafters."""
    path = tiny_path("qwen3_moe", 21)
    tiny_drafts.add_mtp(path, 0)
    tiny_drafts.write_dflash(path, path / "dflash", 0)
    return path


@pytest.fixture(scope="session")
def truth(case_model: Path) -> Callable[[Placed], list[tuple[int, ...]]]:
    """Tokens by one rank without speculation."""
    core = EngineCore.load(config(case_model))

    def tokens_of(jobs: Placed) -> list[tuple[int, ...]]:
        plain = [replace(job, fields=()) for _, job in jobs]
        return [out.token_ids for out in run(core, plain)]

    return tokens_of


@pytest.fixture(scope="module")
def lasting(_nursery: Fleets, case_model: Path) -> Iterator[Lasting]:
    engines = Lasting(_nursery, case_model)
    yield engines
    engines.close()
