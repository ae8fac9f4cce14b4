"""The draft vocabulary: the tokens that the target's own answers use most.

A head over 8,192 rows costs a sixth of one over 49,152 and loses what the target rarely says. The
format's two tables: ``d2t`` an offset (target id = draft id + d2t[draft id]), ``t2d`` a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.training.features import Example


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """``ids``: target ids in ascending order ``[size]``; all of them where nothing is left out."""

    ids: Tensor
    target_size: int

    @property
    def size(self) -> int:
        return self.ids.shape[0]

    @property
    def full(self) -> bool:
        return self.size == self.target_size

    @property
    def d2t(self) -> Tensor:
        return self.ids - torch.arange(self.size)

    @property
    def t2d(self) -> Tensor:
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.ids] = True
        return mask

    def coverage(self, examples: Iterable[Example]) -> float:
        """Share of the answers' tokens that can be drafted at all."""
        mask = self.t2d
        inside = [mask[one.ids[one.answer :]] for one in examples]
        return float(torch.cat(inside).float().mean())


def full_vocabulary(target_size: int) -> DraftVocabulary:
    return DraftVocabulary(torch.arange(target_size), target_size)


def choose_vocabulary(
    examples: Sequence[Example], target_size: int, size: int, always: Iterable[int]
) -> DraftVocabulary:
    """The ``size`` most frequent ids of the answers (as written, and as the target would have
    gone on greedily), ``always`` among them; ties, and what never occurs, by the lowest id."""
    forced = sorted({token for token in always if 0 <= token < target_size})
    if not max(1, len(forced)) <= size <= target_size:
        raise ConfigError(
            "draft_vocab_size",
            size,
            f"must be between {max(1, len(forced))} (the special tokens) and {target_size} "
            "(the target's vocabulary)",
        )
    counts = torch.zeros(target_size, dtype=torch.int64)
    for one in examples:
        said = torch.cat((one.ids[one.answer :], one.best[one.answer - 1 :]))
        counts += torch.bincount(said, minlength=target_size)
    counts[torch.tensor(forced, dtype=torch.int64)] = torch.iinfo(torch.int64).max
    order = torch.sort(counts, descending=True, stable=True).indices
    return DraftVocabulary(order[:size].sort().values, target_size)
