"""Who may form a group, and what it settles: capacities and the slowest rank's time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drumline.config.mesh import Mesh
from drumline.core.errors import Diverged
from drumline.lockstep.forming import Introduction, form


def ranks(*capacities: int) -> list[Introduction]:
    return [
        Introduction(rank, "abc", "avx2", blocks, 0.001 * (rank + 1))
        for rank, blocks in enumerate(capacities)
    ]


def test_case_33_the_least_counts_within_a_replica_and_nowhere_else() -> None:
    assert form(Mesh(tp=2), ranks(12, 11)).kv_blocks == (11,)
    assert form(Mesh(dp=2), ranks(12, 6)).kv_blocks == (12, 6)
    formed = form(Mesh(dp=2, tp=2, expert_parallel=True), ranks(12, 9, 8, 10))
    assert formed.kv_blocks == (9, 8)
    assert formed.token_seconds == 0.004
    assert formed.table() == (
        "KV blocks: rank 0: 12, rank 1: 9, rank 2: 8, rank 3: 10; used by replica: 9, 8"
    )


@pytest.mark.parametrize(
    ("field", "what"), [("config_digest", "config digest"), ("instruction_set", "instruction set")]
)
def test_ranks_that_would_compute_other_bits_refuse(field: str, what: str) -> None:
    people = ranks(4, 4, 4)
    people[1] = replace(people[1], **{field: "other"})
    with pytest.raises(Diverged, match=f"{what} differs") as caught:
        form(Mesh(dp=3), people)
    assert [value for _, value in caught.value.values].count("other") == 1
    assert caught.value.values[1] == (1, "other")
