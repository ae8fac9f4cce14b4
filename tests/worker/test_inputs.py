"""What a pass is given, with memory that is used again and without."""

from __future__ import annotations

import random

import pytest
import torch

from drumline.core.plan import Row
from drumline.ops.indices import IndexMemory
from drumline.worker.inputs import PassInputs, build_inputs

CPU = torch.device("cpu")
BLOCK = 4


def make_rows(rng: random.Random, count: int) -> list[Row]:
    rows = []
    for number in range(count):
        start, given, drafted = rng.randrange(9), rng.randint(1, 6), rng.randrange(4)
        blocks = -(-(start + given + drafted) // BLOCK)
        rows.append(
            Row(
                number=number,
                start=start,
                tokens=tuple(rng.randrange(100) for _ in range(given)),
                block_ids=tuple(rng.sample(range(50), blocks)),
                samples=drafted > 0 or rng.random() < 0.5,
                drafts=tuple(rng.randrange(100) for _ in range(drafted)),
            )
        )
    return rows


def plain(inputs: PassInputs) -> tuple[object, ...]:
    batch = inputs.batch
    columns = [column.tolist() for column in (inputs.ids, batch.positions, batch.slots)]
    return (columns, batch.query_start, batch.block_tables, inputs.offsets, inputs.picked)


def test_a_row_and_its_drafts_by_hand() -> None:
    rows = [
        Row(number=0, start=3, tokens=(7, 8), block_ids=(5, 2), samples=True, drafts=(9,)),
        Row(number=1, start=0, tokens=(4,), block_ids=(6,), samples=False),
    ]
    assert plain(build_inputs(rows, BLOCK, CPU, 6)) == (
        [[7, 8, 9, 4, 0, 0], [3, 4, 5, 0, 0, 0], [23, 8, 9, 24, -1, -1]],
        (0, 3, 4, 5, 6),
        ((5, 2), (6,), (0,), (0,)),
        [0, 3],
        [1, 2],
    )


@pytest.mark.parametrize("size_max", [0, 8, 512])
def test_memory_that_is_used_again_holds_the_same(size_max: int) -> None:
    rng = random.Random(3)
    memory = IndexMemory(CPU, size_max)
    for count in (1, 3, 1, 2, 0, 5, 3, 1):
        rows = make_rows(rng, count)
        size = sum(row.width for row in rows) + rng.randrange(3)
        expected = plain(build_inputs(rows, BLOCK, CPU, size))
        assert plain(build_inputs(rows, BLOCK, CPU, size, memory)) == expected


def test_a_size_that_came_makes_no_tensors() -> None:
    memory = IndexMemory(CPU)
    first = memory.columns([1, 2], [3, 4], [5, 6])
    memory.columns([1], [2], [3])
    again = memory.columns([7, 8], [9, 10], [11, 12])
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert [column.tolist() for column in first] == [[7, 8], [9, 10], [11, 12]]
