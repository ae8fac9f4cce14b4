"""The ring: what is written can be read after the process is gone, and digests see every word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.ledger import (
    DTYPES,
    GROUPS,
    OPERATIONS,
    Entry,
    Ledger,
    StepDigest,
    parse_ring,
    read_ring,
    size_of,
)

OPS = st.tuples(
    st.sampled_from(OPERATIONS),
    st.sampled_from(GROUPS),
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    st.sampled_from(DTYPES),
)


def digest(*operations: tuple[str, str, tuple[int, ...], str], phase: str = "target") -> StepDigest:
    ledger = Ledger.in_memory()
    ledger.begin(0, 0)
    ledger.enter(phase)
    for operation in operations:
        ledger.complete(ledger.issue(*operation))
    ledger.end()
    return ledger.last


def test_a_file_outlives_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "rank3"
    ledger = Ledger.in_file(path, rank=3, capacity=8)
    ledger.begin(2, 7)
    ledger.enter("draft", 1)
    ledger.complete(ledger.issue("all_to_all", "ep", (2, 5, 64), "float32"))
    ledger.issue("broadcast", "tp", (5,), "int64")
    ledger.fail("out of memory")
    ring = read_ring(path)
    assert path.stat().st_size == size_of(8)
    assert ring.rank == 3
    assert ring.error == (7, "out of memory")
    first, second = ring.records
    assert (first.epoch, first.step, first.completed, second.completed) == (2, 7, True, False)
    assert second.entry == Entry("draft", 1, 1, "broadcast", "tp", (5,), "int64")
    assert str(first.entry) == "draft 1 #0: all_to_all over ep of 2x5x64"
    assert ledger.phase == "draft pass 1"


@given(operations=st.lists(OPS, max_size=20), capacity=st.integers(1, 7))
def test_the_ring_holds_the_last_ones(
    operations: list[tuple[str, str, tuple[int, ...], str]], capacity: int
) -> None:
    ledger = Ledger.in_memory(capacity=capacity)
    ledger.begin(0, 0)
    ledger.enter("target")
    for operation in operations:
        ledger.complete(ledger.issue(*operation))
    issued = ledger.leave()
    assert [(e.operation, e.group, e.shape, e.dtype) for e in issued] == operations
    records = ledger.ring().records
    kept = range(max(0, len(operations) - capacity), len(operations))
    assert [record.sequence for record in records] == [*kept]
    assert [record.entry for record in records] == [*issued[kept.start :]]
    assert ledger.ring().error is None


def test_a_record_cut_off_in_its_making_is_left_out() -> None:
    ledger = Ledger.in_memory(capacity=4)
    ledger.begin(0, 0)
    for size in range(6):
        ledger.issue("all_reduce", "tp", (size,), "float32")
    data = bytearray(ledger._memory)
    at = ledger._at(4)  # lies where record 0 was
    data[at + 24 : at + 64] = bytes(40)  # the second half was not written yet
    assert [record.sequence for record in parse_ring(bytes(data)).records] == [2, 3, 5]


class Torn(bytearray):
    """Memory that another process reads while it is written: a packed struct is first zeroed and
    then filled from its front, and every state of that may be seen, or be the last."""

    def states(self, write: Callable[[], object]) -> Iterator[bytes]:
        """Every moment of a write; of words, those after the words before their length."""
        seen = bytes(self)
        write()
        after = bytes(self)
        yield seen
        for region in (slice(64, 1024), slice(0, 64), slice(1024, None)):
            old, new = seen[region], after[region]
            changed = [at for at, (one, two) in enumerate(zip(old, new, strict=True)) if one != two]
            if not changed:
                continue
            first, end = changed[0], changed[-1] + 1
            before, rest = seen[: region.start], seen[region.start + len(old) :]
            for at in range(first, end + 1):
                yield before + old[:first] + bytes(at - first) + old[at:] + rest
                yield before + new[:at] + bytes(end - at) + old[end:] + rest
            seen = before + new + rest
        assert seen == after


@given(count=st.integers(0, 300), capacity=st.sampled_from([1, 3, 64]))
def test_no_moment_of_writing_hides_what_was_issued_before(count: int, capacity: int) -> None:
    """The kind: a reader saw a half written count, and with it no record at all."""
    memory = Torn(size_of(capacity))
    ledger = Ledger(memory, 0, capacity)
    ledger.begin(0, 1)
    for size in range(count):
        ledger.complete(ledger.issue("all_reduce", "tp", (size,), "float32"))

    def kept(newest: int) -> list[int]:
        return list(range(max(0, newest + 1 - capacity), newest + 1))

    both = (kept(count - 1), kept(count), kept(count)[:-1])
    for data in memory.states(lambda: ledger.issue("all_reduce", "tp", (count,), "float32")):
        ring = parse_ring(data)
        assert [record.sequence for record in ring.records] in both
        assert [record.entry.shape[0] for record in ring.records] == [
            record.sequence for record in ring.records
        ]
        assert ring.error is None
    for data in memory.states(lambda: ledger.complete(count)):
        assert [record.sequence for record in parse_ring(data).records] == kept(count)
    for data in memory.states(lambda: ledger.fail("no memory")):
        ring = parse_ring(data)
        assert [record.sequence for record in ring.records] == kept(count)
        assert ring.error in (None, (1, "no memory"))


def test_what_is_no_ledger() -> None:
    with pytest.raises(ValueError, match="not a ledger"):
        parse_ring(b"")
    with pytest.raises(ValueError, match="version 2 with 1024 bytes"):
        parse_ring(bytes(Ledger.in_memory()._memory)[:1024])


def test_every_word_counts() -> None:
    base = ("all_reduce", "ep", (4, 8), "float32")
    others = [
        digest(("all_gather", "ep", (4, 8), "float32")),
        digest(("all_reduce", "ep", (8, 4), "float32")),
        digest(("all_reduce", "ep", (4, 8, 0), "float32")),
        digest(("all_reduce", "ep", (4, 8), "bfloat16")),
        digest(base, phase="draft"),
        digest(base, base),
        digest(),
    ]
    for kind in ("wide", "full"):
        found = [getattr(entry, kind) for entry in (digest(base), *others)]
        assert len(set(found)) == len(found)
        assert all(0 <= number < 2**63 for number in found)


@given(operations=st.lists(OPS, max_size=8))
def test_whose_digest_covers_what(operations: list[tuple[str, str, tuple[int, ...], str]]) -> None:
    """Numbers count within a phase, so what a replica issues alone must not shift the wide ones'
    numbers: it is the groups' own order that counts."""
    told = digest(*operations)
    assert told == digest(*operations)
    without_agreement = [entry for entry in operations if entry[1] != "agreement"]
    assert told.full == digest(*without_agreement).full
    assert told.wide == digest(*[entry for entry in operations if entry[1] == "ep"]).wide


def test_a_digest_is_of_the_step_that_ended() -> None:
    ledger = Ledger.in_memory()
    assert ledger.last == StepDigest(step=-1, wide=0, full=0)
    for step in (0, 4):
        ledger.begin(0, step)
        ledger.begin(0, step)  # the exchange before the plan says it, too
        ledger.enter("target")
        ledger.issue("all_reduce", "ep", (step,), "float32")
        assert ledger.last.step == (-1 if step == 0 else 0)
        ledger.end()
        assert ledger.last.step == step
    assert ledger.last == StepDigest(4, *_digests(4))


def _digests(size: int) -> tuple[int, int]:
    told = digest(("all_reduce", "ep", (size,), "float32"))
    return told.wide, told.full
