"""The group of one: nothing travels, and the ledger is the same as with many."""

from __future__ import annotations

from torch import Tensor

from drumline.core.ledger import Ledger
from drumline.parallel.comm import Failure, RecordedComm


class SoloCarrier:
    """A `Carrier` that copies."""

    def gather(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None:
        out[0].copy_(x)
        return None

    def reduce(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None:
        out.copy_(x)
        return None

    def exchange(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None:
        out.copy_(x)
        return None

    def broadcast(self, x: Tensor, root: int, seconds: float) -> Failure | None:
        return None

    def close(self) -> None:
        return None


def solo_comm(kind: str = "tp", rank: int = 0, ledger: Ledger | None = None) -> RecordedComm:
    """The group that rank ``rank`` of the engine is alone in."""
    return RecordedComm(kind, (rank,), 0, SoloCarrier(), ledger or Ledger.in_memory(rank))
