"""Where a row's drafts may stand, and what they may take from others: never more than is left.

    position    0 ........ n - 1 | n ... n + k - 1 |       k = clamp(draft_limit - n, 0,
                 committed       | next drafts     | draft_limit       min(draft_k, draft_max))

The rule is one per row: near a limit of its own a row drafts less, and nobody else does.
Knows sequences and blocks; what is drafted is the worker's business.
"""

from __future__ import annotations

from collections.abc import Iterable

from drumline.scheduler.draft_length import DraftLength
from drumline.scheduler.sequence import Sequence
from drumline.scheduler.settings import SchedulerSettings


def grant_drafts(decoding: Iterable[Sequence], allowance: int) -> int:
    """Trims drafts to the allowance, the latest first; returns how many stay."""
    granted = 0
    for sequence in decoding:
        if sequence.drafts:
            sequence.trim_drafts(allowance - granted)
            granted += len(sequence.drafts)
            # Their slots were kept when they came; who lost the slots lost the drafts.
            assert sequence.table.capacity >= sequence.committed_count + len(sequence.drafts)
    return granted


def draft_max(sequence: Sequence, settings: SchedulerSettings, length: DraftLength) -> int:
    """The most drafts a request may get: its own limit, and what pays for it."""
    configured = settings.num_speculative_tokens
    asked = sequence.request.num_speculative_tokens
    most = configured if asked is None else min(asked, configured)
    return min(most, length.row_max(sequence.number)) if most else 0


def reserve_ahead(sequence: Sequence, settings: SchedulerSettings, end: int, count_max: int) -> int:
    """Takes slots past ``end``, the row's last target token, and returns the draft limit: the
    first position that may hold no draft. Slots ahead are taken only if nobody lacks them.

    A drafter that keeps state wants the new token's slot also where it may not draft.
    """
    length_max = sequence.request.length_max
    if settings.drafter_keeps_state and not count_max:
        sequence.table.reserve_most(min(length_max, end + 1))
    if not count_max:
        return 0
    limit = length_max
    if settings.drafter_range is not None:
        limit = min(limit, settings.drafter_range)
    # All drafts kept and one token more, then the next drafts, then the limit itself.
    limit = min(limit, sequence.table.reserve_most(min(limit, end + 1 + count_max + 1)))
    return max(0, limit - 1)
