"""Processes that stand for ranks: started once, given one job after another.

    with Ranks(3) as ranks:
        ranks.connect_shm()
        ranks.run(job, argument)        job(state, argument) in each; results by rank

``state`` is what a rank keeps between jobs; ``state["comm"]`` is its group. Every wait has a
deadline. Jobs are functions of modules, not of tests, because they travel by name.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from drumline.config.mesh import Mesh
from drumline.core.ledger import Ledger
from drumline.parallel import gloo
from drumline.parallel.groups import (
    Group,
    connect_gloo,
    connect_shm,
    create_segments,
    segments_of,
)
from drumline.parallel.shm import Segment, create_segment, raise_abort, shm_comm

Job = Callable[..., Any]
SECONDS = 30.0


class Ranks:
    """``count`` processes, numbered as ranks."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "drumline.parallel.shm", "drumline.models.llama"])
        self.count = count
        self.segments: list[Segment] = []
        self.pipes: list[Connection[Any, Any]] = []
        self.processes: list[BaseProcess] = []
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # end of file: they go
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        for segment in self.segments:
            segment.close()
        self.segments = []

    # ---- jobs ----------------------------------------------------------------------------

    def run(self, job: Job, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """``job(state, *arguments)`` on every rank (or on ``ranks``), at the same time."""
        return self.run_each(job, [arguments] * self.count, ranks)

    def run_each(
        self, job: Job, arguments: Sequence[Any], ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """The same with each rank's own arguments."""
        self.start(job, arguments, ranks)
        return [self.result(rank) for rank in (range(self.count) if ranks is None else ranks)]

    def start(self, job: Job, arguments: Sequence[Any], ranks: Sequence[int] | None = None) -> None:
        for rank in range(self.count) if ranks is None else ranks:
            self.pipes[rank].send_bytes(pickle.dumps((job, arguments[rank])))

    def result(self, rank: int) -> Any:
        """What the job gave back; raises what it raised."""
        pipe = self.pipes[rank]
        assert pipe.poll(SECONDS), f"rank {rank} does not answer"
        good, value = pickle.loads(pipe.recv_bytes())
        if not good:
            raise _rebuilt(*value)
        return value

    def outcome(self, rank: int) -> Any:
        """What the job gave back or raised."""
        try:
            return self.result(rank)
        except Exception as error:
            return error

    def kill(self, rank: int, by: int = signal.SIGKILL) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, by)

    # ---- groups --------------------------------------------------------------------------

    def connect_shm(
        self,
        kind: str = "tp",
        members: Sequence[int] | None = None,
        *,
        name: str = "comm",
        seconds: float = 10.0,
        chunk_bytes: int = 1 << 18,
        watch: socket.socket | None = None,
    ) -> Segment:
        """Puts a group over shared memory into the state of its members, under ``name``."""
        group = tuple(range(self.count) if members is None else members)
        segment = create_segment(len(group), chunk_bytes)
        self.segments.append(segment)
        for rank in group:
            arguments = (name, kind, group, segment, seconds, watch is not None)
            self.pipes[rank].send_bytes(pickle.dumps((_attach, arguments)))
            pid = self.processes[rank].pid
            assert pid is not None
            send_handle(self.pipes[rank], segment.descriptor, pid)
            if watch is not None:
                send_handle(self.pipes[rank], watch.fileno(), pid)
        for rank in group:
            self.result(rank)
        return segment

    def connect_mesh(self, mesh: Mesh, over: str = "shm", seconds: float = 20.0) -> None:
        """Puts the `RankComms` of every rank into its state, as ``state["comms"]``."""
        assert mesh.size == self.count
        if over == "gloo":
            self.run(_connect_gloo, mesh, free_port(), seconds)
            return
        segments = create_segments(mesh)
        self.segments += segments.values()
        for rank in range(self.count):
            own = segments_of(segments, rank)
            self.pipes[rank].send_bytes(pickle.dumps((_connect, (mesh, own, seconds))))
            pid = self.processes[rank].pid
            assert pid is not None
            for segment in own.values():
                send_handle(self.pipes[rank], segment.descriptor, pid)
        for rank in range(self.count):
            self.result(rank)

    def abort(self, segment: Segment) -> None:
        raise_abort(segment, 7)


def _serve(rank: int, count: int, pipe: Connection[Any, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    state: dict[str, Any] = {"rank": rank, "count": count, "pipe": pipe}
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            job, arguments = pickle.loads(pipe.recv_bytes())
            try:
                with torch.inference_mode():
                    answer = (True, job(state, *arguments))
            except Exception as error:
                answer = (False, (type(error), str(error), vars(error)))
            # Plain pickles: tensors go as bytes, and outlive the process that made them.
            pipe.send_bytes(pickle.dumps(answer))


def _rebuilt(kind: type[Exception], text: str, fields: dict[str, Any]) -> Exception:
    """An exception from another process, whose arguments are not its message."""
    error = kind.__new__(kind, text)
    vars(error).update(fields)
    return error


def _connect(
    state: dict[str, Any], mesh: Mesh, segments: dict[Group, Segment], seconds: float
) -> None:
    own = {
        group: Segment(recv_handle(state["pipe"]), segment.ranks, segment.chunk_bytes)
        for group, segment in segments.items()
    }
    ledger = state.setdefault("ledger", Ledger.in_memory(state["rank"]))
    state["comms"] = connect_shm(mesh, state["rank"], own, ledger, seconds=seconds)
    for segment in own.values():
        segment.close()


def _connect_gloo(state: dict[str, Any], mesh: Mesh, port: int, seconds: float) -> None:
    gloo.join("127.0.0.1", port, state["rank"], state["count"], seconds)
    ledger = state.setdefault("ledger", Ledger.in_memory(state["rank"]))
    state["comms"] = connect_gloo(mesh, state["rank"], ledger, seconds=seconds)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _attach(
    state: dict[str, Any],
    name: str,
    kind: str,
    group: tuple[int, ...],
    segment: Segment,
    seconds: float,
    watched: bool,
) -> None:
    descriptor = recv_handle(state["pipe"])
    watch_fd = recv_handle(state["pipe"]) if watched else -1
    own = Segment(descriptor, segment.ranks, segment.chunk_bytes)
    ledger = state.setdefault("ledger", Ledger.in_memory(state["rank"]))
    state[name] = shm_comm(
        kind,
        group,
        group.index(state["rank"]),
        own,
        ledger,
        seconds=seconds,
        watch_fd=watch_fd,
    )
    own.close()
