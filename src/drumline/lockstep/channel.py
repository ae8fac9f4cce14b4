"""The seams between ranks, as the deciding rooms see them: agreement, wake, plans.

    leaders      ── exchange(vector) ──►  all vectors, in rank order     AgreementChannel
    a leader     ── wake ──►  sleeping leaders                           WakeChannel
    a leader     ── plan ──►  its followers ── acknowledgement ──►       PlanChannel, PlanSource

Real ones are shared memory and sockets; `lockstep.local` has those of one process. A seam says
who did not come and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drumline.lockstep.shape import Vector


@dataclass(frozen=True, slots=True)
class Wake:
    """There is work: come into exchange ``step`` of ``epoch``, which is the sender's next."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A follower's word after a plan: the digest of everything it issued in it (`StepDigest.full`),
    and why it cannot go on, if it cannot."""

    rank: int
    sequence: int
    digest: int
    error: str | None = None


class AgreementChannel(Protocol):
    """The one collective of the agreement group. One exchange at a time."""

    @property
    def ranks(self) -> Sequence[int]:
        """The members, ascending."""
        ...

    def exchange(self, vector: Vector, timeout: float) -> Sequence[Vector]:
        """Gives this rank's vector and returns everybody's, in the order of ``ranks``. Raises
        `RankLost` that names a rank which has not come within ``timeout`` seconds, or died."""
        ...


class WakeChannel(Protocol):
    """Between the leaders of an agreement group; never waits."""

    def send(self, wake: Wake) -> None:
        """To every other leader."""
        ...

    def receive(self) -> Sequence[Wake]:
        """What has come since the last call."""
        ...

    def filenos(self) -> Sequence[int]:
        """Descriptors that become readable when something comes; none where there are none."""
        ...


class PlanChannel(Protocol):
    """The leader's end of the way to its followers."""

    @property
    def followers(self) -> Sequence[int]:
        """Their ranks, ascending."""
        ...

    def send(self, sequence: int, plan: bytes) -> None:
        """Ships a plan to every follower."""
        ...

    def collect(self, sequence: int, timeout: float) -> Sequence[Acknowledgement]:
        """One from each follower, in the order of ``followers``. Raises `RankLost`."""
        ...


class PlanSource(Protocol):
    """A follower's end. Waits for plans without a deadline: its leader may sleep; the end of the
    leader's or the supervisor's pipe ends the wait."""

    def receive(self) -> tuple[int, bytes] | None:
        """The next (sequence, plan); None when there will be none."""
        ...

    def acknowledge(self, word: Acknowledgement) -> None: ...
