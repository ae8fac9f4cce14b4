"""Each old decision makes ranks part, is caught, and names who and where; without it all is well.

The same world, the same requests, the same seed: only the switch differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from drumline.core.errors import Diverged, EngineError, RankLost
from drumline.core.plan import Row
from drumline.lockstep.mutants import Mutant, input_fits_in_drafter
from drumline.scheduler import DraftLength, TableDraftLength, dynamic_sd_lookup

from ..scheduler.world import make_request
from .world import DENSE, MTP, NGRAM, World

SEEDS = range(5)


def table() -> DraftLength:
    """The table of the scenario, for batches of at most four."""
    return TableDraftLength(3, dynamic_sd_lookup([[1, 1, 3], [2, 2, 2], [3, 4, 0]], 3))


def uneven(world: World) -> None:
    for number in range(4):
        world.send(1, make_request(number, [number + 1] * 3, 20))
    world.send(0, make_request(4, [9] * 3, 30))


def one_busy(world: World) -> None:
    world.send(1, make_request(0, [3] * 3, 20))


def near_limit(world: World) -> None:
    """Rank 0 ends at the longest length there is, rank 1 is far from it."""
    world.send(0, make_request(0, [5] * 50, 14))
    world.send(1, make_request(1, [6] * 10, 40))


def drains(world: World) -> None:
    """Rank 0 is done long before rank 1."""
    world.send(0, make_request(0, [5] * 3, 3))
    world.send(1, make_request(1, [6] * 3, 20))


def prefill_beside(world: World) -> None:
    world.send(1, make_request(0, [6] * 3, 20))
    world.baton.until(lambda: len(world.members[1].plans) > 3, "steps of a row that decodes")
    world.send(0, make_request(1, [5] * 40, 3))


# The decisions of a leader that make ranks part.
SCENARIOS: dict[Mutant, tuple[Callable[[World], None], dict[str, Any]]] = {
    Mutant.SKIP_DRAFTER_LOCALLY: (near_limit, {"skill": 0.0}),
    Mutant.CHOOSE_K_LOCALLY: (uneven, {"length": table}),
    Mutant.CHOOSE_MODE_LOCALLY: (drains, {"buckets": (4, 8, 16)}),
    Mutant.IDLE_TARGET_ONLY: (one_busy, {}),
    Mutant.IDLE_DRAFTS_ONCE: (one_busy, {}),
    Mutant.WIDEN_WHILE_DECODING: (prefill_beside, {"skill": 0.0}),
    Mutant.PAD_BEFORE_EXCHANGE: (uneven, {}),
    Mutant.RETURN_ON_EMPTY_QUEUE: (one_busy, {}),
    Mutant.SLEEP_ALONE: (one_busy, {}),
}


@pytest.mark.parametrize("mutant", list(SCENARIOS))
def test_a_local_decision_is_caught_and_named(mutant: Mutant) -> None:
    script, options = SCENARIOS[mutant]
    for seed in SEEDS:
        World(seed, **options).play(script).check()
        world = World(seed, expects_errors=True, mutants=frozenset([mutant]), **options)
        world.play(script)
        assert world.errors, "nobody noticed"
        for error in world.errors.values():
            assert isinstance(error, EngineError)
        assert any(isinstance(error, RankLost | Diverged) for error in world.errors.values())


def test_the_old_gate_fails_on_one_rank_while_the_other_drafts() -> None:
    """The report says who is missing in which draft pass of which step."""
    script, options = SCENARIOS[Mutant.SKIP_DRAFTER_LOCALLY]
    mutants = frozenset([Mutant.SKIP_DRAFTER_LOCALLY])
    world = World(expects_errors=True, mutants=mutants, **options)
    world.play(script)
    edge, far = world.members
    assert (edge.mutant.skip_count, far.mutant.skip_count) == (1, 0)
    lost = world.errors[1]
    assert isinstance(lost, RankLost)
    assert (lost.rank, lost.step, lost.phase) == (0, far.plans[-1].step, "draft pass 0")
    size = far.plans[-1].draft_sizes[0]
    assert lost.operation == f"draft 0 #0: all_gather over ep of {size}x4"
    assert (edge.plans[-1].step, edge.plans[-1].draft_sizes) == (lost.step, ())
    assert len(far.plans[-1].draft_sizes) == 3


def test_a_wake_that_was_returned_from_alone_names_the_exchange() -> None:
    script, options = SCENARIOS[Mutant.RETURN_ON_EMPTY_QUEUE]
    mutants = frozenset([Mutant.RETURN_ON_EMPTY_QUEUE])
    world = World(expects_errors=True, mutants=mutants, **options)
    world.play(script)
    lost = world.errors[1]
    assert isinstance(lost, RankLost)
    assert (lost.rank, lost.phase, lost.operation) == (0, "agree", "exchange")


@pytest.mark.parametrize("drafter", [DENSE, NGRAM])
def test_a_drafter_without_shared_collectives_completes_whatever_is_decided(drafter: Any) -> None:
    """What decides is whether passes are shared, not whether there is a drafter."""
    for mutant in (Mutant.CHOOSE_K_LOCALLY, Mutant.SKIP_DRAFTER_LOCALLY, Mutant.IDLE_TARGET_ONLY):
        script, options = SCENARIOS[mutant]
        world = World(mutants=frozenset([mutant]), drafter=drafter, **options)
        world.play(script)
        assert world.baton.timeouts == 0
        assert not world.errors


def decode_row(committed: int, drafts: int = 0) -> Row:
    return Row(0, committed - 1, (1,), (0,), True, (2,) * drafts, draft_limit=99, draft_max=3)


def test_the_gate_of_the_first_report() -> None:
    """4095 committed and 3 scheduled are 4098, and 3 more do not fit into 4100. The trimmed row
    counts with the slots it was scheduled with."""
    assert not input_fits_in_drafter([decode_row(4095, 3)], 3, 3, 4100)
    assert not input_fits_in_drafter([decode_row(4095, 1)], 3, 3, 4100)
    assert input_fits_in_drafter([decode_row(4094, 3)], 3, 3, 4100)
    assert not input_fits_in_drafter([decode_row(10), decode_row(4095)], 3, 3, 4100)
    assert input_fits_in_drafter([], 3, 3, 4100)
    assert MTP.drafter_range is None
