"""Collectives as models see them, and what every implementation of them shares.

    all_gather(x)        [*shape] → [size, *shape], by rank
    all_reduce(x)        the sum over ranks, added in rank order: ((x0 + x1) + x2) + ...
    all_to_all(x)        [size, *shape] → [size, *shape]: part r goes to rank r, part r came from it
    broadcast(x, root)   the root's x

A ring or tree would add in an order that depends on an element's place; here it depends on ranks
alone (promise P1). Each call is written to the ledger before it is entered and after it is over.
What goes wrong is named: who did not come, in which step, phase and operation. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drumline.core.errors import Diverged, EngineError, GroupEnded, RankLost
from drumline.core.ledger import Ledger

TIMEOUT_SECONDS = 5.0


class Comm(Protocol):
    """One group, as one of its ranks sees it. Every rank must make the same calls in order.

    ``ranks`` are the members' numbers in the engine, ascending; ``rank`` is the own index among
    them. Raises `RankLost` or `Diverged`; after that the group is of no more use.
    """

    kind: str
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_to_all(self, x: Tensor) -> Tensor: ...

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor: ...

    def set_timeout(self, seconds: float) -> None:
        """From the next call on, the longest that one may wait."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Failure:
    """Why a collective did not end well. ``members`` are indices in the group: who is missing or
    differs; none if that is not known. ``differing`` holds (index, value) where two differ."""

    reason: str
    members: tuple[int, ...] = ()
    differing: tuple[tuple[int, str], ...] = ()


class Carrier(Protocol):
    """How bytes get from rank to rank. Tensors are contiguous, and equal in shape on all ranks.

    Each returns a `Failure`, or fills what it was given.
    """

    def gather(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None: ...

    def reduce(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None: ...

    def exchange(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None: ...

    def broadcast(self, x: Tensor, root: int, seconds: float) -> Failure | None: ...

    def close(self) -> None: ...


class RecordedComm:
    """A `Comm` over a `Carrier`, written to a `Ledger`."""

    def __init__(
        self,
        kind: str,
        ranks: tuple[int, ...],
        rank: int,
        carrier: Carrier,
        ledger: Ledger,
        seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """``rank``: the own index in ``ranks``."""
        assert 0 <= rank < len(ranks)
        self.kind = kind
        self.ranks = ranks
        self.rank = rank
        self.carrier = carrier
        self.ledger = ledger
        self._seconds = seconds

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        ticket = self._issue("all_gather", x)
        self._end("all_gather", ticket, self.carrier.gather(x, out, self._seconds))
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, f"sums are of float32, not of {x.dtype}"
        x = x.contiguous()
        out = torch.empty_like(x)
        ticket = self._issue("all_reduce", x)
        self._end("all_reduce", ticket, self.carrier.reduce(x, out, self._seconds))
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        assert x.shape[0] == self.size, f"{x.shape[0]} parts for {self.size} ranks"
        x = x.contiguous()
        out = torch.empty_like(x)
        ticket = self._issue("all_to_all", x)
        self._end("all_to_all", ticket, self.carrier.exchange(x, out, self._seconds))
        return out

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """``x`` on the other ranks says shape and type; it is left as it is."""
        assert 0 <= root < self.size
        out = x.contiguous() if self.rank == root else torch.empty_like(x).contiguous()
        ticket = self._issue("broadcast", x)
        self._end("broadcast", ticket, self.carrier.broadcast(out, root, self._seconds))
        return out

    def set_timeout(self, seconds: float) -> None:
        assert seconds > 0
        self._seconds = seconds

    def close(self) -> None:
        self.carrier.close()

    @property
    def seconds(self) -> float:
        """The longest that a call may wait."""
        return self._seconds

    def _issue(self, operation: str, x: Tensor) -> int:
        dtype = str(x.dtype).removeprefix("torch.")
        return self.ledger.issue(operation, self.kind, tuple(x.shape), dtype)

    def _end(self, operation: str, ticket: int, failure: Failure | None) -> None:
        if failure is not None:
            raise self.error(f"{operation} over {self.kind}", failure)
        self.ledger.complete(ticket)

    def error(self, operation: str, failure: Failure) -> EngineError:
        """The exception that says what happened, in numbers of the engine's ranks."""
        step, phase = self.ledger.step, self.ledger.phase
        if failure.differing:
            values = [(self.ranks[member], value) for member, value in failure.differing]
            return Diverged(f"{phase}: collective over {self.kind}", values, step)
        if failure.members:
            lost = [self.ranks[member] for member in failure.members]
            reason = failure.reason
            if len(lost) > 1:
                reason = f"{reason}; with it {', '.join(map(str, lost[1:]))}"
            return RankLost(lost[0], step, phase, operation, reason)
        return GroupEnded(f"step {step}, {phase}, {operation}: {failure.reason}")


@dataclass(frozen=True)
class Issued:
    """One collective of several that a single call makes, over float32."""

    comm: RecordedComm
    operation: str
    shape: tuple[int, ...]


def launch(issues: Sequence[Issued], call: Callable[[float], tuple[int, Failure | None]]) -> None:
    """Makes ``call(seconds)``, which makes the collectives in order, and tells how many came to
    their end and what is wrong with the next. The ledgers have all of them before it is entered."""
    tickets = [
        one.comm.ledger.issue(one.operation, one.comm.kind, one.shape, "float32") for one in issues
    ]
    done, failure = call(min((one.comm.seconds for one in issues), default=TIMEOUT_SECONDS))
    for one, ticket in zip(issues[:done], tickets[:done], strict=True):
        one.comm.ledger.complete(ticket)
    if failure is not None:
        late = issues[done]
        raise late.comm.error(f"{late.operation} over {late.comm.kind}", failure)
    assert done == len(issues), f"{done} collectives were made of {len(issues)}"
