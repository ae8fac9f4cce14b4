"""Log-probabilities as a user sees them: the token, its rank, and the best alternatives.

log-softmax in float64 over a pinned tree sum. Ranks and alternatives follow the one order of
tokens (`order`), so the token of rank 1 is the one greedy decoding takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.core.request import PositionLogprobs, TokenLogprob
from drumline.sampling.order import best_ids, rank_of
from drumline.sampling.reduce import log_sum_exp

Values = NDArray[np.floating[Any]]


def position_logprobs(values: Values, maximum: float, token: int, wanted: int) -> PositionLogprobs:
    """Reports ``token`` under ``softmax(values)``, ``values`` being ``[vocab]`` with that maximum.

    ``wanted`` alternatives, best first (-1: all of them). A banned token has log-probability -inf.
    """
    shifted = np.subtract(values, maximum, dtype=np.float64)
    total = log_sum_exp(shifted)
    best = best_ids(values, len(values) if wanted < 0 else wanted)
    top = tuple(
        TokenLogprob(int(one), float(shifted[one]) - total, rank)
        for rank, one in enumerate(best, start=1)
    )
    own = TokenLogprob(token, float(shifted[token]) - total, rank_of(values, token))
    return PositionLogprobs(own, top)
