"""Another machine's share of an engine: its ranks, started here and led by node 0.

It comes to node 0, passes on what is said both ways, and tells of deaths. When node 0 is gone, or
says so, all its ranks end. It decides nothing and answers no client.
"""

from __future__ import annotations

import logging
import socket
import time

from drumline.config import EngineConfig
from drumline.core.errors import DeadlineExceeded, EngineDead
from drumline.engine.messages import (
    Born,
    Died,
    EndAll,
    Here,
    RankRing,
    Relay,
    ToNode,
    Trial,
    Trouble,
    decode_to_node,
    decode_to_rank,
    encode,
)
from drumline.engine.opening import open_engine
from drumline.engine.pipes import Pipe
from drumline.engine.ranks import Ranks
from drumline.fleet.nodes import Nodes, nodes_of

LOG = logging.getLogger("drumline.engine")
LOOK_SECONDS = 0.2
RETRY_SECONDS = 0.2


def serve_node(config: EngineConfig) -> int:
    """Runs until node 0 ends it. Returns 0 if all ranks here left in order; raises
    `DeadlineExceeded` if node 0 is not there, `EngineDead` if it or a rank broke."""
    nodes = nodes_of(config)
    opened = open_engine(config)
    pipe = _come(nodes, config.runtime.startup_timeout_seconds)
    LOG.info("node %d: ranks %s", nodes.own, ", ".join(map(str, nodes.ranks(nodes.own))))
    ranks = Ranks(opened, Trial(), None, nodes)
    try:
        pipe.send(Here(node=nodes.own))
        _Relay(pipe, ranks).run()
    finally:
        ranks.close()
        pipe.drain(1.0)
        pipe.close()
    broken = {rank: code for rank, code in ranks.died.items() if code}
    if broken:
        raise EngineDead(f"ranks ended with codes {broken}; node 0 says why")
    return 0


def _come(nodes: Nodes, seconds: float) -> Pipe[ToNode]:
    """Connects with node 0, which may start later than this machine."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            end = socket.create_connection((nodes.address, nodes.control_port), timeout=seconds)
        except OSError:
            if time.monotonic() > deadline:
                what = f"node 0 at {nodes.address}:{nodes.control_port}"
                raise DeadlineExceeded(what, seconds) from None
            time.sleep(RETRY_SECONDS)
            continue
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Pipe(end, decode_to_node)


class _Relay:
    """Words from ranks to node 0 and back, until all ranks have left or node 0 ends them."""

    def __init__(self, pipe: Pipe[ToNode], ranks: Ranks) -> None:
        self.pipe = pipe
        self.ranks = ranks
        self._born: set[int] = set()
        self._dead: set[int] = set()

    def run(self) -> None:
        while len(self._dead) < len(self.ranks.pipes):
            self.ranks.wait(LOOK_SECONDS, (self.pipe.fileno(),))
            for word in self.pipe.receive():
                match word:
                    case Relay(rank, data):
                        self.ranks.tell(rank, decode_to_rank(data))
                    case EndAll():
                        return
            if self.pipe.gone:
                raise EngineDead("node 0 is gone")
            broke = False
            for rank, said in self.ranks.receive():
                broke = broke or isinstance(said, Trouble)
                self.pipe.send(Relay(rank=rank, data=encode(said)))
            self._tell_of_processes(broke)

    def _tell_of_processes(self, broke: bool) -> None:
        for rank, process in self.ranks.processes.items():
            if rank not in self._born:
                self._born.add(rank)
                self.pipe.send(Born(rank=rank, process=process))
        dead = {rank: code for rank, code in self.ranks.died.items() if rank not in self._dead}
        if broke or any(dead.values()):
            for rank in self.ranks.pipes:
                self.pipe.send(RankRing(rank=rank, data=self.ranks.ring_bytes(rank)))
        for rank, code in dead.items():
            self._dead.add(rank)
            self.pipe.send(Died(rank=rank, code=code))
