"""Match acceptance in compiled code: the tokens of whole windows, from logits, in one call.

It takes the requests that most are: nothing edits their logits (no bans, bias or penalties), and
nobody wants to know more than the token. Of others it says nothing, and `accept.Verifier` or
`draft.DraftSampler` goes on as ever; what it takes has the same tokens there, which a test holds.
What a request asks of a draw is read once, when it is first seen. Knows no drafts' origin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from drumline._native import Recipe, match_windows
from drumline.core.random import MASK, seed_key
from drumline.core.request import Request
from drumline.sampling.match import Ask
from drumline.sampling.noise import TokenTable
from drumline.sampling.processors import edits


class NativeMatcher:
    """A `match.Matcher`. ``path`` names an instruction set of the native module; the windows of a
    call are spread over ``threads``. ``table``, ``sharpening``: as in `draw.LogitDraw`;
    ``greedy``: every token is the best one, whatever the request's temperature."""

    def __init__(
        self,
        path: str,
        threads: int = 1,
        table: TokenTable | None = None,
        sharpening: float = 1.0,
        greedy: bool = False,
    ) -> None:
        self.path = path
        self.threads = threads
        self._table = table  # whose addresses the recipes hold
        self._sharpening = sharpening
        self._greedy = greedy
        self._recipes: dict[int, tuple[Request, Recipe | None]] = {}

    def __call__(
        self, logits: Tensor, vocab: int, asks: Sequence[Ask]
    ) -> list[tuple[int, ...] | None]:
        assert logits.nbytes % (4 * vocab) == 0, "rows of float32 logits"
        assert logits.is_contiguous(), "rows end to end"
        jobs = []
        passed = False
        for request, position, drafts, row in asks:
            recipe = self._recipe(request)
            if recipe is None:
                passed = True
            else:
                jobs.append((recipe, position, drafts, row))
        found = match_windows(jobs, logits.data_ptr(), vocab, self.threads, self.path)
        if not passed:
            return found  # type: ignore[return-value]
        answers = iter(found)
        return [None if self._recipe(ask[0]) is None else next(answers) for ask in asks]

    def forget(self, number: int) -> None:
        self._recipes.pop(number, None)

    def _recipe(self, request: Request) -> Recipe | None:
        """What draws of the request are made by; None: not here."""
        entry = self._recipes.get(request.number)
        if entry is None or entry[0] is not request:
            entry = self._recipes[request.number] = (request, self._read(request))
        return entry[1]

    def _read(self, request: Request) -> Recipe | None:
        params = request.params
        if edits(request):
            return None
        assert 0 <= request.sample_index <= MASK, "a counter word has 32 bits"
        return Recipe(
            self._greedy or params.greedy,
            params.temperature,
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            params.top_k,
            params.top_p,
            self._sharpening,
            *seed_key(request.seed),
            request.sample_index,
            0 if self._table is None else self._table.ids.ctypes.data,
        )
