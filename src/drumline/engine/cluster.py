"""The ranks of several machines, as node 0 sees them: its own, and others' through their nodes.

Has the surface of `Ranks`. Other machines come to a port of this one; what their ranks say and are
told is passed on as bytes. A machine that goes takes its ranks with it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from drumline.config import EngineConfig
from drumline.core.errors import ConfigError
from drumline.core.ledger import Ring, parse_ring
from drumline.engine.messages import (
    Born,
    Died,
    EndAll,
    FromNode,
    FromRank,
    Here,
    RankRing,
    Relay,
    Stop,
    Trial,
    decode_from_node,
    decode_from_rank,
    encode,
)
from drumline.engine.opening import Opened, open_engine
from drumline.engine.pipes import Pipe
from drumline.engine.ranks import Nursery, Ranks
from drumline.engine.verdict import ending_of
from drumline.fleet.nodes import Nodes, nodes_of

if TYPE_CHECKING:
    from drumline.engine.ray_nodes import RayNodes

EXIT_LOST = 255  # the code of ranks whose machine is gone


class Cluster:
    """All ranks of an engine over several machines, of which this is node 0."""

    def __init__(self, opened: Opened, trial: Trial, nursery: Nursery | None, nodes: Nodes) -> None:
        self.nodes = nodes
        self.mesh = opened.resolved.mesh
        self.died: dict[int, int] = {}
        self.processes: dict[int, int] = {}
        self._rings: dict[int, bytes] = {}
        self._nodes: dict[int, Pipe[FromNode]] = {}
        self._unknown: list[Pipe[FromNode]] = []
        self.helpers: RayNodes | None = None  # who started the other machines' shares
        self._listener = _listen(nodes)
        try:
            self.local = Ranks(opened, trial, nursery, nodes)
        except BaseException:
            self._listener.close()
            raise

    def tell(self, rank: int, message: msgspec.Struct) -> None:
        if rank in self.local.pipes:
            self.local.tell(rank, message)
            return
        node = self._nodes.get(self.nodes.node_of(rank))
        if node is not None:
            node.send(Relay(rank=rank, data=encode(message)))

    def where(self, rank: int) -> str:
        """The rank's process and machine, in words."""
        if rank in self.local.pipes:
            return self.local.where(rank)
        node = self.nodes.node_of(rank)
        if node not in self._nodes:
            return f"on node {node}, which has not come"
        return f"process {self.processes.get(rank)} on node {node}"

    def ending(self, rank: int) -> str:
        """How a rank that has died ended, in words."""
        node, code = self.nodes.node_of(rank), self.died[rank]
        if code == EXIT_LOST:
            return f"node {node}, where it was, is gone"
        return f"{ending_of(self.processes.get(rank), code)} on node {node}"

    # ---- hearing -------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.local.closed

    @property
    def nursery_gone(self) -> bool:
        return self.local.nursery_gone

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*self.local.descriptors, *self._descriptors())

    def _descriptors(self) -> list[int]:
        pipes = [*self._nodes.values(), *self._unknown]
        open_ones = [pipe.fileno() for pipe in pipes if not pipe.gone]
        return [self._listener.fileno(), *open_ones]

    def wait(self, seconds: float, also: Sequence[int] = ()) -> None:
        """See `Ranks.wait`."""
        self.local.wait(seconds, (*also, *self._descriptors()))

    def receive(self) -> list[tuple[int, FromRank]]:
        """See `Ranks.receive`."""
        words = self.local.receive()
        self.processes.update(self.local.processes)
        self.died.update(self.local.died)
        self._accept()
        for node, pipe in self._nodes.items():
            for message in pipe.receive():
                match message:
                    case Relay(rank, data):
                        words.append((rank, decode_from_rank(data)))
                    case Born(rank, process):
                        self.processes[rank] = process
                    case Died(rank, code):
                        self.died[rank] = code
                    case RankRing(rank, data):
                        self._rings[rank] = data
            if pipe.gone:
                for rank in self.nodes.ranks(node):
                    self.died.setdefault(rank, EXIT_LOST)
        return words

    def _accept(self) -> None:
        """Machines that come; who says anything else first is none."""
        with contextlib.suppress(BlockingIOError):
            while True:
                end, _ = self._listener.accept()
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._unknown.append(Pipe(end, decode_from_node))
        for pipe in list(self._unknown):
            try:
                words = pipe.receive()
            except msgspec.MsgspecError:
                words, pipe.gone = [], True
            first = words[0] if words else None
            if isinstance(first, Here) and 0 < first.node < self.nodes.count:
                if first.node not in self._nodes:
                    self._nodes[first.node] = pipe
                    pipe.unread(words[1:])
                    self._unknown.remove(pipe)
                    continue
                pipe.gone = True
            if first is not None or pipe.gone:
                self._unknown.remove(pipe)
                pipe.close()

    def ring(self, rank: int) -> Ring | None:
        """See `Ranks.ring`; of another machine's rank what it sent when something broke."""
        if rank in self.local.pipes:
            return self.local.ring(rank)
        data = self._rings.get(rank)
        return None if data is None else parse_ring(data)

    # ---- ending --------------------------------------------------------------------------

    def await_end(self, seconds: float) -> bool:
        """Whether all ranks have left by themselves within so long."""
        deadline = time.monotonic() + seconds
        while len(self.died) < self.mesh.size:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.wait(min(left, 0.1))
            self.receive()
        return True

    def kill(self) -> None:
        """Ends every rank everywhere."""
        self.local.kill()
        for pipe in self._nodes.values():
            pipe.send(EndAll())

    def close(self) -> None:
        """Kills what is still there; afterwards nothing is left here, and soon nothing there."""
        if self.closed:
            return
        for pipe in (*self._nodes.values(), *self._unknown):
            if not pipe.gone:
                pipe.send(EndAll())
                pipe.drain(1.0)
            pipe.close()
        self._nodes.clear()
        self._unknown.clear()
        self._listener.close()
        self.local.close()
        if self.helpers is not None:
            self.helpers.close()


def open_ranks(
    config: EngineConfig, trial: Trial, nursery: Nursery | None
) -> tuple[Opened, Ranks | Cluster]:
    """The checkpoint, and the ranks of an engine on as many machines as its configuration says, or
    as its Ray cluster has. Raises `UsageError`."""
    helpers = None
    if config.parallel.data_parallel_backend == "ray":
        from drumline.engine.ray_nodes import RayNodes  # an extra, and slow to load

        helpers = RayNodes(config)
        config = helpers.config
    try:
        opened, nodes = open_engine(config), nodes_of(config)
        if nodes.own:
            problem = "this machine serves replicas for node 0: drumline serve --headless"
            raise ConfigError("node_rank", nodes.own, problem)
        if nodes.count == 1:
            ranks: Ranks | Cluster = Ranks(opened, trial, nursery)
        else:
            ranks = Cluster(opened, trial, nursery, nodes)
        if helpers is not None and isinstance(ranks, Cluster):
            ranks.helpers = helpers
            helpers.start()
            helpers = None
        return opened, ranks
    finally:
        if helpers is not None:
            helpers.close()


def end_in_order(ranks: Ranks | Cluster, seconds: float) -> None:
    """Tells leaders to stop and waits for all ranks to leave, where they still can."""
    if ranks.closed or ranks.died or ranks.nursery_gone:
        return
    for leader in ranks.mesh.leaders:
        ranks.tell(leader, Stop())
    ranks.await_end(seconds)


def end(ranks: Ranks | Cluster, seconds: float) -> None:
    """For an engine that nobody closes: in order if it can be soon, and then whatever is left."""
    try:
        end_in_order(ranks, seconds)
    finally:
        ranks.close()


def _listen(nodes: Nodes) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((nodes.address, nodes.control_port))
    except OSError as error:
        listener.close()
        problem = f"cannot listen on {nodes.address}:{nodes.control_port}: {error.strerror}"
        raise ConfigError("master_addr", nodes.address, problem) from None
    listener.listen(nodes.count)
    listener.setblocking(False)
    return listener
