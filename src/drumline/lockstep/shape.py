"""What the leaders tell each other before a step: one fixed-length vector of int64 from each.

    equal   version, step, epoch, config digest, ledger step, ledger digest
    max     flags: error, stop, drain, pause, work, drafts
            rows, target tokens, tokens of a draft pass after the first,
            tokens of the first draft pass for each draft length, microseconds for each
    min     wish, mode
    sum     tokens expected × 1024 for each draft length

Every field is folded by itself: `join` is commutative and associative, and `neutral` changes
nothing. Fields that must be equal raise `Diverged` where they are not. A replica with nothing to
run gives the neutral element of all but the equal fields, so that it decides nothing for others.
The length follows from the configured draft length alone. Knows no rule of decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.core.errors import Diverged

Vector = tuple[int, ...]

VERSION = 1
LIMIT = 2**62  # sums stop here
UNDECIDED = 2**62  # of the fields that take a minimum
_NOTHING = -(2**63)  # of fields that must be equal: says nothing

MODE_LIVE, MODE_FIXED = 0, 1

EQUAL_FIELDS = ("version", "step", "epoch", "config digest", "ledger step", "ledger digest")
_EQUAL = len(EQUAL_FIELDS)
_FLAGS = 6
_MAX_FIXED = _FLAGS + 3


@dataclass(frozen=True, slots=True)
class StepShape:
    """A leader's vector by name; lists have an entry for each draft length 0..K.

    ``ledger_step``, ``ledger_digest``: what the last executed step issued over several replicas,
    -1 and 0 before the first. ``drafts``: some row can bring a draft. ``target_tokens`` and
    ``pass_tokens`` are upper bounds, known before acceptance: ``first_pass_tokens[k]`` of the
    first draft pass of a step of length k, ``later_pass_tokens`` of every pass after it.
    ``wish``, ``mode``: None says nothing. ``micros``, ``expected``: empty says nothing.
    """

    step: int
    epoch: int
    config_digest: int
    ledger_step: int = -1
    ledger_digest: int = 0
    error: bool = False
    stop: bool = False
    drain: bool = False
    pause: bool = False
    work: bool = False
    drafts: bool = False
    rows: int = 0
    target_tokens: int = 0
    later_pass_tokens: int = 0
    first_pass_tokens: tuple[int, ...] = ()
    micros: tuple[int, ...] = ()
    wish: int | None = None
    mode: int | None = None
    expected: tuple[int, ...] = ()

    def encode(self, num_speculative_tokens: int) -> Vector:
        """The vector of `length` (num_speculative_tokens) numbers."""
        count = num_speculative_tokens + 1
        silent = (0,) * count
        for values in (self.first_pass_tokens, self.micros, self.expected):
            assert len(values) in (0, count)
            assert all(0 <= value <= LIMIT for value in values)
        return (
            VERSION,
            self.step,
            self.epoch,
            self.config_digest,
            self.ledger_step,
            self.ledger_digest,
            int(self.error),
            int(self.stop),
            int(self.drain),
            int(self.pause),
            int(self.work),
            int(self.drafts),
            self.rows,
            self.target_tokens,
            self.later_pass_tokens,
            *(self.first_pass_tokens or silent),
            *(self.micros or silent),
            UNDECIDED if self.wish is None else self.wish,
            UNDECIDED if self.mode is None else self.mode,
            *(self.expected or silent),
        )

    @classmethod
    def decode(cls, vector: Vector) -> StepShape:
        """The shape that was encoded; lists of zeros come back as nothing said."""
        count = (len(vector) - _EQUAL - _MAX_FIXED - 2) // 3
        assert len(vector) == length(count - 1)
        _, step, epoch, config_digest, ledger_step, ledger_digest = vector[:_EQUAL]
        error, stop, drain, pause, work, drafts = map(bool, vector[_EQUAL : _EQUAL + _FLAGS])
        rows, target_tokens, later_pass_tokens = vector[_EQUAL + _FLAGS : _EQUAL + _MAX_FIXED]
        lists = vector[_EQUAL + _MAX_FIXED :]
        first, micros, expected = lists[:count], lists[count : 2 * count], lists[2 * count + 2 :]
        wish, mode = lists[2 * count : 2 * count + 2]
        return cls(
            step=step,
            epoch=epoch,
            config_digest=config_digest,
            ledger_step=ledger_step,
            ledger_digest=ledger_digest,
            error=error,
            stop=stop,
            drain=drain,
            pause=pause,
            work=work,
            drafts=drafts,
            rows=rows,
            target_tokens=target_tokens,
            later_pass_tokens=later_pass_tokens,
            first_pass_tokens=first if any(first) else (),
            micros=micros if any(micros) else (),
            wish=None if wish == UNDECIDED else wish,
            mode=None if mode == UNDECIDED else mode,
            expected=expected if any(expected) else (),
        )


def length(num_speculative_tokens: int) -> int:
    """Numbers in a vector, for a configured draft length."""
    return _EQUAL + _MAX_FIXED + 2 + 3 * (num_speculative_tokens + 1)


def neutral(num_speculative_tokens: int) -> Vector:
    """What changes no other vector that it is joined with."""
    count = num_speculative_tokens + 1
    return (
        *(_NOTHING,) * _EQUAL,
        *(0,) * (_MAX_FIXED + 2 * count),
        UNDECIDED,
        UNDECIDED,
        *(0,) * count,
    )


def join(left: Vector, right: Vector) -> Vector:
    """Both vectors folded into one. Raises `Diverged` where equal fields are not; it knows no
    ranks and calls them 0 and 1, see `join_all`."""
    return join_all((left, right), (0, 1))


def join_all(vectors: Sequence[Vector], ranks: Sequence[int]) -> Vector:
    """The fold of what all members gave, in the order of ``ranks``. Raises `Diverged` that names
    the first field that differs, each rank and its value."""
    _check_equal(vectors, ranks)
    if len(vectors) == 1:
        return vectors[0]
    count = (len(vectors[0]) - _EQUAL - _MAX_FIXED - 2) // 3
    end = _EQUAL + _MAX_FIXED + 2 * count  # of fields that take a maximum; equal ones: what is said
    sums = map(sum, zip(*(vector[end + 2 :] for vector in vectors), strict=True))
    return (
        *map(max, *(vector[:end] for vector in vectors)),
        *map(min, *(vector[end : end + 2] for vector in vectors)),
        *(total if total < LIMIT else LIMIT for total in sums),
    )


def _check_equal(vectors: Sequence[Vector], ranks: Sequence[int]) -> None:
    heads = [vector[:_EQUAL] for vector in vectors]
    sizes = [len(vector) for vector in vectors]
    if heads.count(heads[0]) == len(heads) == sizes.count(sizes[0]):
        return
    columns = [*zip(EQUAL_FIELDS, zip(*heads, strict=True), strict=True), ("length", sizes)]
    step = max(head[1] for head in heads)
    for name, values in columns:
        said = [(rank, v) for rank, v in zip(ranks, values, strict=True) if v != _NOTHING]
        if len({value for _, value in said}) > 1:
            raise Diverged(name, said, step)
