"""EAGLE-1 against its formulas; and what all tap drafters do with slots, bits and passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting.golden import Golden, GoldenEagle, GoldenMtp
from drafting.golden_world import BLOCK, Piece, World, build, random_tokens
from drumline.models.tiny_drafts import write_eagle, write_mtp

TinyPath = Callable[..., Path]
TOKENS = random_tokens(1, 21)
K = 3


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=2, layers=2, hidden=48)


@pytest.fixture(scope="module")
def mtp(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mtp(target, tmp_path_factory.mktemp("mtp"), 5, draft_vocab=60)


def logits_by_position(world: World, sequence: Any) -> dict[int, torch.Tensor]:
    network = world.drafter.network
    return {p: network.compute_logits(x[None])[0] for p, x in world.entries(sequence).items()}


def taps_of(world: World, tokens: list[int]) -> dict[int, torch.Tensor]:
    return dict(world.run_target([Piece(world.sequence(tokens), len(tokens) - 1)]).taps)


def compare(world: World, golden: Golden) -> None:
    sequence = world.sequence(TOKENS)
    world.step([Piece(sequence, 7, samples=False)], K)
    (drafts,) = world.step([Piece(sequence, len(TOKENS) - 8, k=K)], K)
    logits = logits_by_position(world, sequence)
    first, *rest, expected = golden.chain(TOKENS, taps_of(world, TOKENS), K)
    for entry in range(1, len(TOKENS)):
        torch.testing.assert_close(logits[entry], first[entry - 1], atol=1e-4, rtol=0)
    for index, row in enumerate(rest):
        torch.testing.assert_close(logits[len(TOKENS) + index], row[0], atol=1e-4, rtol=0)
    assert drafts == tuple(expected.tolist())
    assert first.std() > 0.5, "logits so flat that anything would agree"


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"embedding": True}, {"layers": 2}],
    ids=["plain", "no_bias", "embedding", "deep"],
)
def test_logits_and_drafts_are_the_formulas(
    options: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    folder = write_eagle(target, tmp_path, 5, **options)
    compare(build("eagle", target, folder), GoldenEagle(target, folder))


def test_the_hidden_state_is_the_normed_one(target: Path, tmp_path: Path) -> None:
    folder = write_eagle(target, tmp_path, 5)
    golden = GoldenEagle(target, folder)
    golden.final = lambda hidden: hidden  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="not close"):
        compare(build("eagle", target, folder), golden)


# ---------------------------------------------------------------- slots and steps


def one_step(target: Path, mtp: Path, **more: Any) -> tuple[dict[int, torch.Tensor], Any]:
    """The reference: everything in one prefill, then drafts."""
    world = build("mtp", target, mtp, **more)
    sequence = world.sequence(TOKENS)
    (drafts,) = world.step([Piece(sequence, len(TOKENS) - 1, k=K)], K)
    return world.entries(sequence), drafts


def same_entries(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor], end: int) -> None:
    assert all(torch.equal(one[p], other[p]) for p in range(1, end))


@pytest.mark.parametrize("padded", [True, False])
def test_any_way_of_stepping_gives_the_same_bits(target: Path, mtp: Path, padded: bool) -> None:
    """Chunks, acceptance, rejection, K = 0 phases and company change nothing; stale entries of
    rejected drafts are overwritten, accepted ones are made anew from the target's hidden state."""
    entries, drafts = one_step(target, mtp, disable_padded_drafter_batch=not padded)
    world = build("mtp", target, mtp, disable_padded_drafter_batch=not padded)
    sequence, other = world.sequence(TOKENS), world.sequence(random_tokens(9, 30))
    world.step([Piece(other, 3, samples=False), Piece(sequence, 2, samples=False)], 2)
    world.step([Piece(sequence, 3, k=2), Piece(other, 4, samples=False)], 2)  # n = 6
    world.step([Piece(sequence, 1, rejected=(11, 12), k=2)], 2)  # none accepted
    world.step([Piece(other, 2, k=3), Piece(sequence, 3, rejected=(9,), k=0)], 3)  # two accepted
    world.step([Piece(sequence, 1, k=0), Piece(other, 1, rejected=(5, 6), k=1)], 0)
    world.step([Piece(sequence, 9, samples=False)], 0)
    last = len(TOKENS) - 1 - sequence.computed
    found, _ = world.step([Piece(sequence, last, rejected=(8,), k=K), Piece(other, 1, k=1)], K)
    assert found == drafts
    same_entries(entries, world.entries(sequence), len(TOKENS) + K - 1)


def test_a_padded_pass_takes_what_was_rejected_too(target: Path, mtp: Path) -> None:
    sizes = {}
    for padded in (True, False):
        world = build("mtp", target, mtp, disable_padded_drafter_batch=not padded)
        a, b = world.sequence(TOKENS), world.sequence(random_tokens(9, 30))
        world.step([Piece(a, 5, k=2), Piece(b, 6, k=1)], 2)
        world.passes.clear()
        world.step([Piece(a, 2, rejected=(7,), k=2), Piece(b, 1, rejected=(8, 9), k=1)], 2)
        sizes[padded] = [len(recorded.ids) for recorded in world.passes]
        live = [sum(slot >= 0 for slot in recorded.slots) for recorded in world.passes]
        assert live == [3, 1]  # b has its one draft after the first pass
    assert sizes == {True: [6, 2], False: [3, 1]}


def test_a_missing_slot_is_carried_to_the_next_step(target: Path, mtp: Path) -> None:
    """Blocks end before the new token: its entry is made in the next step, from the same hidden
    state, and every later draft is as if nothing had been short."""
    entries, drafts = one_step(target, mtp)
    world = build("mtp", target, mtp)
    sequence = world.sequence(TOKENS)
    assert world.step([Piece(sequence, 2 * BLOCK, k=0, short=True)], K) == [()]
    assert max(world.entries(sequence)) == 2 * BLOCK - 1
    world.step([Piece(sequence, 1, k=1)], K)
    made = [p for p, s in zip(world.passes[-K].positions, world.passes[-K].slots, strict=True)
            if s >= 0]  # fmt: skip
    assert made == [2 * BLOCK, 2 * BLOCK + 1]
    world.step([Piece(sequence, 2, k=0), Piece(world.sequence(TOKENS), 4, samples=False)], 0)
    world.step([Piece(sequence, 1, k=0, short=True)], 0)  # and again, with a draft length of 0
    world.step([Piece(sequence, 1, k=0)], 0)
    (found,) = world.step([Piece(sequence, len(TOKENS) - 1 - sequence.computed, k=K)], K)
    assert found == drafts
    same_entries(entries, world.entries(sequence), len(TOKENS) + K - 1)


def test_entries_wait_until_a_row_drafts_or_a_block_is_full(target: Path, mtp: Path) -> None:
    """Steps in which nobody drafts make no pass; the next one makes all their entries, with the
    bits that they would have had, and drafts the same."""
    entries, drafts = one_step(target, mtp)
    world = build("mtp", target, mtp)
    a, b = world.sequence(TOKENS), world.sequence(random_tokens(9, 30))

    def made(pieces: list[Piece], draft_k: int) -> list[int]:
        """Positions of a's entries that the step's first pass makes."""
        world.passes.clear()
        world.step(pieces, draft_k)
        if not world.passes:
            assert world.ledger.passes == []
            return []
        own = set(a.block_ids)
        first = world.passes[0]
        places = zip(first.positions, first.slots, strict=True)
        return [p for p, slot in places if slot >= 0 and slot // BLOCK in own]

    seen: dict[int, torch.Tensor] = {}
    keep = world.entries
    assert made([Piece(a, 2, k=0)], 0) == []
    assert (
        made([Piece(a, 1, rejected=(7, 8), k=0)], 3) == []
    )  # no row drafts, whatever the step does
    assert made([Piece(a, 1, k=0)], 0) == [1, 2, 3, 4]  # a block of four is full
    seen |= keep(a)
    assert made([Piece(a, 1, k=0), Piece(b, 2, k=0)], 0) == []
    assert made([Piece(a, 1, k=0), Piece(b, 1, k=1)], 1) == [5, 6]  # b drafts, and all goes along
    seen |= keep(a)
    assert made([Piece(a, 1, k=0)], 0) == []
    world.drafter.forget(b.number)  # another's leave takes nothing of a's
    last = len(TOKENS) - 1 - a.computed
    found = world.step([Piece(a, last, k=K)], K)
    seen |= keep(a)
    assert found == [drafts]
    same_entries(entries, seen, len(TOKENS) + K - 1)


def test_a_carried_row_does_not_outlive_its_sequence(target: Path, mtp: Path) -> None:
    world = build("mtp", target, mtp)
    sequence = world.sequence(TOKENS)
    world.step([Piece(sequence, 2 * BLOCK, k=0, short=True)], K)
    world.drafter.forget(sequence.number)
    sequence.computed, sequence.fresh = 0, True
    (drafts,) = world.step([Piece(sequence, len(TOKENS) - 1, k=K)], K)
    assert drafts == one_step(target, mtp)[1]


def test_after_a_prefix_hit_one_position_is_enough(target: Path, mtp: Path) -> None:
    """The last matched position is computed again; entries up to it are in the shared blocks."""
    _, drafts = one_step(target, mtp)
    world = build("mtp", target, mtp)
    first = world.sequence(TOKENS)
    world.step([Piece(first, 2 * BLOCK, samples=False)], K)
    second = world.sequence(TOKENS)
    second.block_ids = (*first.block_ids[:2], *second.block_ids[2:])
    second.computed = 2 * BLOCK - 1
    world.passes.clear()
    (found,) = world.step([Piece(second, len(TOKENS) - 2 * BLOCK, k=K)], K)
    assert found == drafts
    assert min(p for p, s in zip(world.passes[0].positions, world.passes[0].slots, strict=True)
               if s >= 0) == 2 * BLOCK  # fmt: skip


def test_a_step_skipped_is_an_error_of_ours(target: Path, mtp: Path) -> None:
    world = build("mtp", target, mtp)
    sequence = world.sequence(TOKENS)
    world.step([Piece(sequence, 4, samples=False)], 0)
    sequence.computed += 1
    with pytest.raises(AssertionError, match="missing"):
        world.step([Piece(sequence, 4, samples=False)], 0)


# ---------------------------------------------------------------- passes and range


@pytest.mark.parametrize("draft_k", [0, 1, 3])
def test_passes_without_rows_are_those_with_rows(target: Path, mtp: Path, draft_k: int) -> None:
    """Where others take part in them; there no entry waits."""
    world = build("mtp", target, mtp)
    world.shared = True
    sequence = world.sequence(TOKENS)
    for pieces in ([], [Piece(sequence, 3, samples=False)], [Piece(sequence, 2, k=draft_k)]):
        world.passes.clear()
        world.step(pieces, draft_k)
        assert len(world.passes) == max(1, draft_k)
    assert world.drafter.traits.passes(0) == 1


@pytest.mark.parametrize("padded", [True, False])
def test_no_position_outside_the_drafters_range(target: Path, mtp: Path, padded: bool) -> None:
    """At every length around its end: as many drafts as fit, then none, and no pass beyond. The
    rope table ends there too, so one step too far would raise."""
    limit = 16
    for length in range(limit - 8, limit + 4):
        world = build("mtp", target, mtp, own_range=limit, disable_padded_drafter_batch=not padded)
        assert world.drafter.traits.positions_max == limit
        (drafts,) = world.step([Piece(world.sequence(TOKENS), length - 1, k=8)], 8)
        assert len(drafts) == max(0, min(8, limit - length))
        assert len(world.passes) == 8
        assert all(0 <= p < limit for recorded in world.passes for p in recorded.positions)


def test_speculators_mtp_is_the_reference_here(target: Path, mtp: Path) -> None:
    compare(build("mtp", target, mtp), GoldenMtp(target, mtp))
