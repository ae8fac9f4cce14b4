"""Groups of ranks anywhere, over torch.distributed.

gloo on CPUs; nccl has its place here, and comes with GPUs. Between ranks of one host shared memory
is many times quicker. torch reports that a peer is lost, not which one: whoever holds the ranks'
processes knows better.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from drumline.core.errors import ConfigError, EngineError
from drumline.core.ledger import Ledger
from drumline.parallel.comm import TIMEOUT_SECONDS, Failure, RecordedComm

BACKENDS = ("gloo",)


def join(
    address: str, port: int, rank: int, ranks: int, seconds: float, backend: str = "gloo"
) -> None:
    """Meets all ``ranks`` of the engine at ``tcp://address:port``, where rank 0 listens.

    Raises EngineError if they are not all there within ``seconds``.
    """
    if backend not in BACKENDS:
        raise ConfigError("backend", backend, f"supported are {', '.join(BACKENDS)}")
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=seconds),
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise EngineError(f"rank {rank} at {address}:{port}: {reason}") from None


def leave() -> None:
    """Gives everything of `join` back."""
    if dist.is_initialized():
        dist.destroy_process_group()


class GlooCarrier:
    """A `Carrier` over a process group of torch.distributed."""

    def __init__(self, group: ProcessGroup, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks

    def gather(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None:
        parts = list(out.unbind(0))
        return _run(lambda: dist.all_gather(parts, x, group=self.group, async_op=True), seconds)

    def reduce(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None:
        gathered = x.new_empty((len(self.ranks), *x.shape))
        failure = self.gather(x, gathered, seconds)
        if failure is None:
            out.copy_(gathered[0])
            for part in gathered[1:].unbind(0):  # in rank order, which all_reduce does not promise
                out.add_(part)
        return failure

    def exchange(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None:
        return _run(
            lambda: dist.all_to_all_single(out, x, group=self.group, async_op=True), seconds
        )

    def broadcast(self, x: Tensor, root: int, seconds: float) -> Failure | None:
        source = self.ranks[root]
        return _run(lambda: dist.broadcast(x, src=source, group=self.group, async_op=True), seconds)

    def close(self) -> None:
        return None  # groups end with `leave`


def _run(call: Callable[[], Work | None], seconds: float) -> Failure | None:
    try:
        work = call()
        assert work is not None
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        return Failure(" ".join(str(error).split()))
    return None


def gloo_comm(
    kind: str,
    ranks: tuple[int, ...],
    rank: int,
    ledger: Ledger,
    *,
    seconds: float = TIMEOUT_SECONDS,
) -> RecordedComm | None:
    """The group ``ranks`` after `join`. Every rank of the engine must call this for every group, in
    one order; those outside get None. ``rank``: the own number in the engine."""
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds), backend="gloo")
    if rank not in ranks:
        return None
    assert group is not None
    return RecordedComm(kind, ranks, ranks.index(rank), GlooCarrier(group, ranks), ledger, seconds)
