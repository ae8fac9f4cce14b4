"""How often drafts are right, per position of a verify pass: measured, fading, in integers.

    position   0        1        2          rate[i]: draft i is right, given those before it
    rate      900      700      650  /1024
    chance    900      615      390  /1024  all up to i are right: the product

A draft that was asked for and not proposed counts as wrong, because the step was planned for it.
Counts fade by 1/64 with every executed step, and what has faded leaves the prior standing: for one
request what is true of all; for all together a constant at position 0, and at the others the rate
of the position before, because a drafter that is right once mostly goes on. Knows no cost.
"""

from __future__ import annotations

UNIT = 1024  # probability 1
RATE_PRIOR = 614  # 0.6: a drafter nobody has measured yet is worth trying

_ONE = 1 << 20  # one observation, so that fading has room below it
_FADE_SHIFT = 6
_FADED_AFTER = 1024  # steps after which nothing of a count is left worth a multiplication
_WEIGHT_ALL = 2 * _ONE  # observations that the constant prior counts for
_WEIGHT_OF_ALL = 8 * _ONE  # observations that all requests count for in one of them


class _Counts:
    __slots__ = ("right", "step", "tried")

    def __init__(self, size: int, step: int) -> None:
        self.tried = [0] * size
        self.right = [0] * size
        self.step = step

    def fade_to(self, step: int) -> None:
        behind = min(step - self.step, _FADED_AFTER)
        self.step = step
        for counts in (self.tried, self.right):
            for index, count in enumerate(counts):
                for _ in range(behind if count else 0):
                    count -= count >> _FADE_SHIFT
                counts[index] = 0 if behind == _FADED_AFTER else count

    def add(self, asked_count: int, accepted_count: int) -> None:
        for index in range(min(asked_count, accepted_count + 1)):
            self.tried[index] += _ONE
        for index in range(accepted_count):
            self.right[index] += _ONE

    def rate(self, index: int, prior: int, weight: int) -> int:
        return (self.right[index] * UNIT + weight * prior) // (self.tried[index] + weight)


class Acceptance:
    """Rates of all requests together and of each. ``prior``: of position 0, in 1/1024."""

    def __init__(self, num_speculative_tokens: int, prior: int = RATE_PRIOR) -> None:
        assert 0 <= prior <= UNIT
        self._size = num_speculative_tokens
        self._prior = prior
        self._step = 0
        self._all = _Counts(num_speculative_tokens, 0)
        self._each: dict[int, _Counts] = {}
        self._rates: list[int] | None = None  # of all, until something is learned or fades

    def observe(self, number: int, asked_count: int, accepted_count: int) -> None:
        """A row was asked for ``asked_count`` drafts; the first ``accepted_count`` were right."""
        assert 0 <= accepted_count <= asked_count <= self._size
        if not asked_count:
            return
        own = self._each.get(number)
        self._rates = None
        if own is None:
            own = self._each[number] = _Counts(self._size, self._step)
        for counts in (self._all, own):
            counts.fade_to(self._step)
            counts.add(asked_count, accepted_count)

    def rates(self) -> list[int]:
        """Per position, of all requests together."""
        if self._rates is None:
            self._all.fade_to(self._step)
            self._rates, rate = [], self._prior
            for index in range(self._size):
                rate = self._all.rate(index, rate, _WEIGHT_ALL)
                self._rates.append(rate)
        return self._rates

    def chances(self, number: int) -> list[int]:
        """That all drafts up to a position are right, for one request."""
        rates = self.rates()
        own = self._each.get(number)
        if own is not None:
            own.fade_to(self._step)
            rates = [own.rate(index, rate, _WEIGHT_OF_ALL) for index, rate in enumerate(rates)]
        chance, chances = UNIT, []
        for rate in rates:
            chance = chance * rate // UNIT
            chances.append(chance)
        return chances

    def fade(self) -> None:
        """A step was executed."""
        self._step += 1
        self._rates = None

    def forget(self, number: int) -> None:
        """The request has ended; what it taught stays with all."""
        self._each.pop(number, None)
