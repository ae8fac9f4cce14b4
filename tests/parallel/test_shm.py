"""Collectives over shared memory between real processes: bits, order, lateness, death."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from drumline.core.errors import Diverged, EngineError, RankLost
from drumline.core.ledger import Ledger
from drumline.parallel.shm import create_segment, shm_comm
from parallel import jobs
from parallel.ranks import Ranks

MakeRanks = Callable[[int], Ranks]
# One number, a matrix, and more than the 65,536 numbers of a chunk, not a whole number of them.
SHAPES = [(1,), (7, 33), (3, 50_001)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_added_in_rank_order(
    count: int, shape: tuple[int, ...], ranks_of: MakeRanks
) -> None:
    found = ranks_of(count).run(jobs.reduce_all, shape, 3)
    by_hand = jobs.values(0, shape, 3)
    for rank in range(1, count):
        by_hand = by_hand + jobs.values(rank, shape, 3)
    for result in found:
        assert torch.equal(result, by_hand)
    if count > 2 and len(shape) > 1:  # the inputs are such that another order has other bits
        other = sum(jobs.values(rank, shape, 3) for rank in reversed(range(count)))
        assert not torch.equal(other, by_hand)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_gathers_exchanges_and_broadcasts_move_bits(
    count: int, shape: tuple[int, ...], ranks_of: MakeRanks
) -> None:
    ranks = ranks_of(count)
    brought = torch.stack([jobs.values(rank, shape, 5) for rank in range(count)])
    for result in ranks.run(jobs.gather_all, shape, 5):
        assert torch.equal(result, brought)
    parts = [jobs.values(rank, (count, *shape), 6) for rank in range(count)]
    for rank, result in enumerate(ranks.run(jobs.exchange_all, shape, 6)):
        assert torch.equal(result, torch.stack([part[rank] for part in parts]))
    for root in (0, count - 1):
        for result in ranks.run(jobs.broadcast_from, shape, root, 5):
            assert torch.equal(result, brought[root])


def test_integers_keep_all_their_bits(ranks_of: MakeRanks) -> None:
    for result in ranks_of(2).run(jobs.gather_integers, 40):
        assert torch.equal(result[1], torch.arange(40) * 2 + 2**40)


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_may_come_at_different_times(late: int, ranks_of: MakeRanks) -> None:
    busy = [0.0, 0.0]
    busy[late] = 0.15  # beyond all spinning, and beyond several slices of sleep
    assert ranks_of(2).run(jobs.wait_then_reduce, busy) == [2.0, 2.0]


@pytest.mark.parametrize("count", [2, 4])  # 4 ranks share 2 cores, or fewer
def test_many_in_a_row_never_mix(count: int, ranks_of: MakeRanks) -> None:
    assert ranks_of(count).run(jobs.many, 900) == [900] * count


def test_the_ledger_has_every_call_in_order(ranks_of: MakeRanks) -> None:
    ranks = ranks_of(2)
    ranks.run(jobs.begin, 0, 5, "target")
    ranks.run(jobs.reduce_all, (2, 3))
    ranks.run(jobs.gather_integers, 4)
    for found in ranks.run(jobs.entries):
        assert found[-2:] == [
            ("all_reduce", "tp", (2, 3), "float32", True),
            ("all_gather", "tp", (4,), "int64", True),
        ]


# ---------------------------------------------------------------- what goes wrong


@pytest.fixture
def short() -> Iterator[Ranks]:
    """Three ranks of their own, with little patience, in a draft pass of step 17."""
    with Ranks(3) as ranks:
        ranks.connect_shm(seconds=1.0)
        ranks.run(jobs.begin, 0, 17, "draft", 2)
        yield ranks


def test_a_rank_that_does_not_come_is_named(short: Ranks) -> None:
    began = time.monotonic()
    short.start(jobs.reduce_all, [((4,),)] * 3, ranks=[0, 2])
    for rank in (0, 2):
        error = short.outcome(rank)
        assert isinstance(error, RankLost)
        assert (error.rank, error.step, error.phase) == (1, 17, "draft pass 2")
        assert error.operation == "all_reduce over tp"
        assert "nothing after 1 s" in error.reason
    assert 0.9 < time.monotonic() - began < 5
    records = short.run(jobs.entries, ranks=[0])[0]
    assert records[-1] == ("all_reduce", "tp", (4,), "float32", False)  # entered, never left
    with pytest.raises(RuntimeError, match="an earlier collective failed"):
        short.run(jobs.reduce_all, (4,), ranks=[0])


def test_all_that_do_not_come_are_named(short: Ranks) -> None:
    short.start(jobs.reduce_all, [((4,),)] * 3, ranks=[1])
    error = short.outcome(1)
    assert isinstance(error, RankLost)
    assert error.rank == 0
    assert "with it 2" in error.reason


def test_a_death_is_noticed_before_the_deadline() -> None:
    with Ranks(3) as ranks:
        ranks.connect_shm(seconds=60.0)
        ranks.run(jobs.begin, 0, 3, "target")
        ranks.start(jobs.reduce_all, [((4,),)] * 3, ranks=[0, 2])
        began = time.monotonic()
        ranks.kill(1)
        for rank in (0, 2):
            error = ranks.outcome(rank)
            assert isinstance(error, RankLost)
            assert (error.rank, error.step, error.phase) == (1, 3, "target")
            assert f"its process {ranks.processes[1].pid} has ended" in error.reason
        assert time.monotonic() - began < 5


def test_a_rank_that_died_after_it_came_does_not_spoil_the_collective() -> None:
    with Ranks(2) as ranks:
        ranks.connect_shm(seconds=60.0)
        ranks.start(jobs.reduce_all, [((4,),)] * 2, ranks=[1])
        ranks.start(jobs.reduce_all, [((4,),)] * 2, ranks=[0])
        ranks.result(0)
        ranks.start(jobs.die, [()] * 2, ranks=[1])
        ranks.processes[1].join(10)
        assert isinstance(ranks.result(1), torch.Tensor)
        error = _outcome_of(ranks, 0)
        assert isinstance(error, RankLost)
        assert error.rank == 1


def _outcome_of(ranks: Ranks, rank: int) -> object:
    ranks.start(jobs.reduce_all, [((4,),)] * ranks.count, ranks=[rank])
    return ranks.outcome(rank)


def test_a_stopped_rank_is_named_like_an_absent_one(short: Ranks) -> None:
    short.kill(1, signal.SIGSTOP)
    try:
        short.start(jobs.reduce_all, [((4,),)] * 3, ranks=[0, 2])
        error = short.outcome(0)
        assert isinstance(error, RankLost)
        assert error.rank == 1
        assert isinstance(short.outcome(2), RankLost)
    finally:
        short.kill(1, signal.SIGCONT)


def test_the_abort_word_ends_waits_at_once() -> None:
    with Ranks(2) as ranks:
        segment = ranks.connect_shm(seconds=60.0)
        ranks.start(jobs.reduce_all, [((4,),)] * 2, ranks=[0])
        began = time.monotonic()
        ranks.abort(segment)
        error = ranks.outcome(0)
        assert time.monotonic() - began < 2
        assert isinstance(error, EngineError)
        assert "told to end (code 7)" in str(error)
        assert "told to end" in str(_outcome_of(ranks, 1))  # whoever comes later, too


def test_whoever_started_the_ranks_is_missed() -> None:
    mine, theirs = socket.socketpair()
    with Ranks(2) as ranks:
        ranks.connect_shm(seconds=60.0, watch=theirs)
        theirs.close()
        ranks.start(jobs.reduce_all, [((4,),)] * 2, ranks=[0])
        began = time.monotonic()
        mine.close()
        assert "whoever started the ranks is gone" in str(ranks.outcome(0))
        assert time.monotonic() - began < 2


def test_different_calls_are_told_apart() -> None:
    with Ranks(2) as ranks:
        ranks.connect_shm()
        ranks.run(jobs.begin, 0, 9, "target")
        ranks.start(jobs.different_calls, [()] * 2)
        for rank in range(2):
            error = ranks.outcome(rank)
            assert isinstance(error, Diverged)
            assert error.step == 9
            assert error.values == (
                (0, "all_reduce of 24 bytes of float32"),
                (1, "all_gather of 24 bytes of float32"),
            )


def test_a_rank_attaches_once_and_to_its_own_group() -> None:
    segment = create_segment(2, 4096)
    ledger = Ledger.in_memory()
    comm = shm_comm("tp", (4, 5), 0, segment, ledger)
    assert (comm.size, comm.rank, comm.ranks) == (2, 0, (4, 5))
    with pytest.raises(EngineError, match="this rank is there already"):
        shm_comm("tp", (4, 5), 0, segment, ledger)
    small = type(segment)(segment.descriptor, 2, 64 * 1024)
    with pytest.raises(EngineError, match="smaller than its group needs"):
        shm_comm("tp", (4, 5), 1, small, ledger)
    other = type(segment)(segment.descriptor, 2, 2048)
    with pytest.raises(EngineError, match="made for another group"):
        shm_comm("tp", (4, 5), 1, other, ledger)
    comm.close()
    with pytest.raises(RuntimeError, match="closed"):
        comm.all_reduce(torch.ones(1))
    segment.close()


def test_a_segment_has_no_name_and_ends_with_its_holders() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    segment = create_segment(2)
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert after == before
    assert os.fstat(segment.descriptor).st_nlink == 0
    segment.close()
    with pytest.raises(OSError):
        os.fstat(segment.descriptor)
