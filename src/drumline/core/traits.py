"""What the deciding rooms must know of the computing ones; made when a model is loaded.

Three questions about a drafter are kept apart here, because confusing them is how ranks come to
wait for each other: does it run a model forward, has it state that must see every committed token,
and how many passes does a draft length cost. A fourth, which groups its collectives span, follows
from what a pass issues. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PerToken:
    """An extent that follows from the size of a pass: ``count`` for each of its tokens."""

    count: int = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a pass. ``operation`` and ``group`` are words of `core.ledger`; ``shape``
    is that of the tensor this rank gives: numbers, extents per token, or None for an extent that
    the replica's own rows decide (how many rows have logits)."""

    operation: str
    group: str
    shape: tuple[int | PerToken | None, ...]
    dtype: str = "float32"

    def at(self, size: int) -> Collective:
        """The same with the extents of a pass of ``size`` tokens."""
        shape = tuple(
            extent.count * size if isinstance(extent, PerToken) else extent for extent in self.shape
        )
        return Collective(self.operation, self.group, shape, self.dtype)


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What one pass of the target issues, in order: ``body`` through all layers, ``logits`` for
    each time that logits are computed. Nothing on one rank.

    ``logits`` stay within a replica (vocabulary shards), so their extents may be the replica's own.
    """

    body: tuple[Collective, ...] = ()
    logits: tuple[Collective, ...] = ()

    def __post_init__(self) -> None:
        # A size that only one replica knows must not stand before other replicas.
        assert all(None not in entry.shape for entry in self.body)
        assert all(entry.group == "tp" for entry in self.logits)


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """``positions_max``: positions the drafter can take, None if it has no limit of its own.

    ``runs_forward``: EAGLE, MTP, draft model, DFlash, hidden-state extraction do; n-gram and
    suffix do not. ``stateful``: it keeps keys and values (or the like), which must follow every
    committed token, also at K = 0. ``needs_taps``: its state is made from the target's hidden
    states. ``reads_hidden``: it reads the hidden states after the last layer; where nobody does,
    that layer is spared all rows without logits. ``in_one_pass``: all drafts come from one pass
    (block and parallel drafters).
    ``queries_ahead``: positions queried beyond the last draft (1 for block drafters).
    ``catch_up``: tokens its first pass may take beyond a row's target tokens (1 for a draft
    model, which reads the new token too when it meets a sequence).
    ``drafts_max``: the most drafts that its passes make, None if as many as a step has: the others
    come from a lookup.
    ``first_pass``, ``later_pass``: what those passes issue on this mesh; nothing on one rank.
    """

    method: str
    runs_forward: bool = False
    stateful: bool = False
    needs_taps: bool = False
    reads_hidden: bool = True
    in_one_pass: bool = False
    queries_ahead: int = 0
    catch_up: int = 0
    drafts_max: int | None = None
    positions_max: int | None = None
    first_pass: ModelTraits = ModelTraits()
    later_pass: ModelTraits = ModelTraits()

    @property
    def groups(self) -> tuple[str, ...]:
        """Kinds of groups its collectives span: none, tp, ep."""
        issued = (*self.first_pass.body, *self.later_pass.body)
        issued += (*self.first_pass.logits, *self.later_pass.logits)
        if not issued:
            return ()
        return tuple(sorted({entry.group for entry in issued}))

    def passes(self, k: int) -> int:
        """Draft passes in a step of draft length ``k``; a stateful drafter always makes one."""
        if not self.runs_forward:
            return 0
        if self.drafts_max is not None:
            k = min(k, self.drafts_max)
        wanted = min(k, 1) if self.in_one_pass else k
        return max(wanted, 1) if self.stateful else wanted

    def pass_bound(self, index: int, width: int, samples: bool, k: int) -> int:
        """Most tokens that pass ``index`` takes of one row, known before acceptance.

        ``width``: the row's target tokens, drafts included. ``samples``: it finishes its prefill
        or decodes. ``k``: the step's draft length. The first pass of a stateful drafter takes
        what the target took; later passes take one token of each row that samples. So a pass
        after the first has one bound, whatever the draft length.
        """
        bound = width + self.catch_up if self.stateful and index == 0 else 0
        if not samples or (k == 0 and self.stateful):
            return bound
        if self.in_one_pass:
            return bound + k + self.queries_ahead if self.stateful else 1
        return bound if bound else 1

    @property
    def drafter_range(self) -> int | None:
        """``positions_max`` as the scheduler takes it: shortened by what is queried ahead."""
        return None if self.positions_max is None else self.positions_max - self.queries_ahead
