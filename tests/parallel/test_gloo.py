"""Collectives over torch.distributed: the same bits as over shared memory, at another price."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest
import torch

from drumline.core.errors import ConfigError, EngineError
from drumline.parallel import gloo
from parallel import jobs
from parallel.ranks import Ranks, free_port

COUNT = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Three ranks with a group over shared memory (``shm``) and one over gloo (``comm``)."""
    with Ranks(COUNT) as started:
        started.connect_shm()
        started.run(jobs.join_gloo, free_port())
        yield started


@pytest.mark.parametrize("shape", [(1,), (7, 33)])
def test_bits_are_those_of_rank_order(shape: tuple[int, ...], ranks: Ranks) -> None:
    brought = [jobs.values(rank, shape, 3) for rank in range(COUNT)]
    for result in ranks.run(jobs.reduce_all, shape, 3):
        assert torch.equal(result, (brought[0] + brought[1]) + brought[2])
    for result in ranks.run(jobs.gather_all, shape, 3):
        assert torch.equal(result, torch.stack(brought))
    parts = [jobs.values(rank, (COUNT, *shape), 6) for rank in range(COUNT)]
    for rank, result in enumerate(ranks.run(jobs.exchange_all, shape, 6)):
        assert torch.equal(result, torch.stack([part[rank] for part in parts]))
    for result in ranks.run(jobs.broadcast_from, shape, 2, 3):
        assert torch.equal(result, brought[2])


def test_a_group_may_be_a_part(ranks: Ranks) -> None:
    assert ranks.run(jobs.reduce_pair) == [None, (0, 3.0), (1, 3.0)]


def test_a_timeout_is_an_error_with_its_operation(ranks: Ranks) -> None:
    """Last, because a torch group is of no more use afterwards."""
    ranks.run(jobs.begin, 0, 4, "target")
    ranks.start(jobs.reduce_all, [((4,),)] * COUNT, ranks=[0])
    error = ranks.outcome(0)
    assert isinstance(error, EngineError)
    assert "step 4, target, all_reduce over tp" in str(error)


def test_nobody_to_meet_is_an_error() -> None:
    with pytest.raises(EngineError, match="rank 0 at 127.0.0.1"):
        gloo.join("127.0.0.1", free_port(), 0, 2, 0.5)
    with pytest.raises(ConfigError, match="backend='nccl'"):
        gloo.join("127.0.0.1", 1, 0, 2, 0.5, backend="nccl")


def test_shared_memory_takes_less_than_a_third_of_the_time() -> None:
    """The sum of 4 KB between two processes, in turns within one run."""
    with Ranks(2) as pair:
        pair.connect_shm()
        pair.run(jobs.join_gloo_pair, free_port())
        shm, over_gloo = [], []
        for _ in range(5):
            shm += pair.run(jobs.timed_reduces, 1024, 60, "shm")[0]
            over_gloo += pair.run(jobs.timed_reduces, 1024, 30)[0]
        assert statistics.median(shm) < statistics.median(over_gloo) / 3
