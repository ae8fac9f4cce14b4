"""What drafters with passes of their own share: laying tokens out, and a row while it is drafted.

A pass holds live tokens, sequence by sequence, and masked ones, which stand alone at position 0,
read block 0 and write nothing. Knows no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drumline.drafting.base import DraftRow, Proposal
from drumline.ops.base import PagedBatch
from drumline.ops.indices import IndexMemory, index_tensor
from drumline.sampling.draft import DraftSampler, DraftToken


@dataclass(slots=True)
class PassInputs:
    """The tokens of one pass. A token's ``reach`` is the last position it attends to: its own,
    or the end of a block whose tokens see each other both ways."""

    block_size: int
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    reach: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    query_start: list[int] = field(default_factory=lambda: [0])
    tables: list[tuple[int, ...]] = field(default_factory=list)

    def add(
        self, token: int, position: int, block_ids: tuple[int, ...], reach: int | None = None
    ) -> int:
        """One live token of the sequence being laid out; returns its index in the pass."""
        assert position < len(block_ids) * self.block_size, "a token without a slot"
        self.ids.append(token)
        self.positions.append(position)
        self.reach.append(position if reach is None else reach)
        block, offset = divmod(position, self.block_size)
        self.slots.append(block_ids[block] * self.block_size + offset)
        return len(self.ids) - 1

    def close(self, block_ids: tuple[int, ...]) -> None:
        """Ends a sequence, unless nothing was added."""
        if self.query_start[-1] < len(self.ids):
            self.query_start.append(len(self.ids))
            self.tables.append(block_ids)

    def mask(self, count: int) -> None:
        """Tokens that write nothing and whose results nobody reads."""
        for _ in range(count):
            self.ids.append(0)
            self.positions.append(0)
            self.reach.append(0)
            self.slots.append(-1)
            self.close((0,))

    def batch(self, device: torch.device) -> PagedBatch:
        """Where the tokens sit; its positions are how far they see."""
        reach, slots = index_tensor(self.reach, device), index_tensor(self.slots, device)
        return PagedBatch(reach, slots, tuple(self.query_start), tuple(self.tables))

    def laid_out(self, memory: IndexMemory, first_key: int = 0) -> tuple[Tensor, PagedBatch]:
        """Ids and batch in memory that the next pass will use again."""
        ids, reach, slots = memory.columns(self.ids, self.reach, self.slots)
        starts, tables = tuple(self.query_start), tuple(self.tables)
        return ids, PagedBatch(reach, slots, starts, tables, first_key)


@dataclass(slots=True)
class Lane:
    """One row while it is drafted: its k, its drafts, and its last token's index in the pass."""

    row: DraftRow
    k: int
    at: int = -1
    drafts: list[DraftToken] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(draft.token_id for draft in self.drafts)

    def wants(self, index: int) -> bool:
        """Whether draft ``index`` is still to be made; a row whose logits gave none stops."""
        return index < self.k and len(self.drafts) == index


def draw(sampler: DraftSampler, lanes: Sequence[Lane], logits: Tensor) -> None:
    """The next draft of each of ``lanes``, from ``[lanes, draft vocab]`` logits."""
    windows = [lane.row.sampling_row(lane.ids) for lane in lanes]
    for lane, draft in zip(lanes, sampler.draw(logits, windows), strict=True):
        if draft is not None:
            lane.drafts.append(draft)


def proposal(lanes: Sequence[Lane]) -> Proposal:
    """What the lanes hold, row by row."""
    return Proposal.of([lane.drafts for lane in lanes])
