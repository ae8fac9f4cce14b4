"""One rank's process: loads, joins its groups, then leads its replica or follows its leader.

    born → Standby … Begin → every group used once → Warm … Serve → steps until told to stop

What breaks here ends every wait of every rank: this one says why, raises the abort word and leaves.
When whoever started it is gone, it ends at once, wherever it is. It decides nothing that the rooms
it joins decide.
"""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from drumline.config.report import config_digest
from drumline.core.cpu import native_paths
from drumline.core.errors import Diverged, GroupEnded, RankLost, UsageError
from drumline.core.ledger import Ledger
from drumline.core.plan import StepPlan
from drumline.engine.channels import SocketPlanSource
from drumline.engine.core import measured_draft_length
from drumline.engine.ends import Ends
from drumline.engine.leader import LeaderLoop, allowed
from drumline.engine.messages import Begin, Birth, Serve, Standby, Trouble, Warm
from drumline.engine.opening import Opened
from drumline.engine.pipes import exit_when_gone, interface_to
from drumline.engine.trial import worker_of
from drumline.lockstep.channel import PlanSource
from drumline.lockstep.conductor import Deadlines
from drumline.lockstep.follower import Follower
from drumline.lockstep.forming import Introduction
from drumline.models.checkpoint import open_checkpoint
from drumline.parallel import gloo
from drumline.parallel.groups import RankComms, connect_gloo, connect_shm, crowded
from drumline.parallel.shm import raise_abort
from drumline.worker.load import load_worker, warm_up
from drumline.worker.survey import survey
from drumline.worker.worker import Worker

EXIT_BROKEN, EXIT_ORPHANED = 1, 3
ALLOWANCE = 4.0  # times the slowest rank's time for a token
LAST_WORDS_SECONDS = 0.05
PLAN_SPIN_SECONDS = 1e-3  # what a leader takes between two steps of a decode, and some more

Word = TypeVar("Word", Begin, Serve)


def serve(birth: Birth, descriptors: Sequence[int]) -> int:
    """Lives the life of a rank; returns its exit code."""
    ends = Ends.of(birth, descriptors)
    exit_when_gone(ends.link.fileno(), EXIT_ORPHANED)
    ledger = Ledger.on_descriptor(ends.ledger, birth.rank)
    try:
        with torch.inference_mode():
            _live(birth, ends, ledger)
    except Exception as error:
        _leave(birth, ends, ledger, error)
        return EXIT_BROKEN
    ends.link.drain(LAST_WORDS_SECONDS)
    return 0


def _live(birth: Birth, ends: Ends, ledger: Ledger) -> None:
    """From birth to the end of the loop; raises what ends it early."""
    resolved, rank = birth.resolved, birth.rank
    if birth.trial.kv_blocks:
        resolved = replace(resolved, num_kv_blocks=birth.trial.kv_blocks[rank])
    runtime = resolved.config.runtime
    if (rank, -1, "load") in birth.trial.faults:
        os.kill(os.getpid(), signal.SIGSTOP)  # a rank that does not come up
    comms = _connect(birth, ends, ledger)
    checkpoint = open_checkpoint(birth.path, resolved.config.model.quantization)
    opened = Opened(Path(birth.path), checkpoint, resolved)
    worker = load_worker(resolved, opened.checkpoint, comms, ledger)
    paths = native_paths() if resolved.ops_backend == "native" else ("reference",)
    introduction = Introduction(rank, config_digest(resolved), paths[0], resolved.num_kv_blocks)
    ends.link.send(Standby(introduction=introduction))
    blocks = _await(ends, Begin).kv_blocks  # of this replica, which the cache holds at least
    opened = replace(opened, resolved=replace(resolved, num_kv_blocks=blocks))
    ledger.begin(0, 0)
    if worker.script is not None:
        survey(worker, worker.script)
        own = (fault for fault in birth.trial.faults if fault[0] == rank)
        worker.script.faults = frozenset((step, place) for _, step, place in own)
    ledger.enter("warmup")
    seconds = warm_up(worker)
    length = measured_draft_length(resolved, worker)
    worker = worker_of(worker, birth.trial, rank)
    ends.link.send(Warm(token_seconds=seconds))
    token_seconds = _await(ends, Serve).token_seconds
    deadlines = Deadlines(runtime.step_timeout_seconds, ALLOWANCE * token_seconds)
    if resolved.mesh.leads(rank):
        LeaderLoop(birth, ends, ledger, comms, opened, worker, length, deadlines).run()
    else:
        (leader,) = ends.plans.values()
        spin = 0.0 if crowded(resolved.mesh) else PLAN_SPIN_SECONDS
        _follow(SocketPlanSource(leader, spin), worker, ledger, comms, deadlines)
    comms.close()


def _connect(birth: Birth, ends: Ends, ledger: Ledger) -> RankComms:
    """The groups this rank is in: over memory that was handed over, or wherever ranks meet."""
    mesh, rank = birth.resolved.mesh, birth.rank
    seconds = birth.resolved.config.runtime.startup_timeout_seconds
    if birth.meeting is not None:
        interface = interface_to(birth.meeting[0])
        if interface is not None:  # torch would take that of the host's name
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        gloo.join(*birth.meeting, rank, mesh.size, seconds)
        return connect_gloo(mesh, rank, ledger, seconds=seconds)
    watch = ends.link.fileno()
    return connect_shm(mesh, rank, ends.segments, ledger, seconds=seconds, watch_fd=watch)


def _follow(
    source: PlanSource, worker: Worker, ledger: Ledger, comms: RankComms, deadlines: Deadlines
) -> None:
    """Executes what the leader ships, until it ships no more."""

    def execute(plan: StepPlan) -> None:
        comms.set_timeout(allowed(deadlines, plan))
        worker.execute(plan)

    follower = Follower(source, execute, ledger)
    while follower.step():
        pass


def _await(ends: Ends, kind: type[Word]) -> Word:
    """The next word from the supervisor, whose own deadline is the only one."""
    while True:
        poll = select.poll()
        poll.register(ends.link.fileno(), ends.link.interest)
        poll.poll()
        words = ends.link.receive()
        if words:
            word = words[0]
            ends.link.unread(words[1:])
            assert isinstance(word, kind), f"{word} where {kind.__name__} is next"
            return word


def _leave(birth: Birth, ends: Ends, ledger: Ledger, error: Exception) -> None:
    """Says why, and ends every wait of the groups this rank is in."""
    words = _last_words(birth.rank, ledger, error)
    if words.kind == "own":
        ledger.fail(words.message)
        traceback.print_exception(error)
    ends.link.send(words)
    for segment in ends.segments.values():
        raise_abort(segment)
    ends.link.drain(LAST_WORDS_SECONDS)


def _last_words(rank: int, ledger: Ledger, error: Exception) -> Trouble:
    text = f"{type(error).__name__}: {error}"
    match error:
        case UsageError():
            return Trouble(kind="usage", message=str(error), rank=rank)
        case RankLost():
            return Trouble(
                kind="lost",
                message=error.reason,
                rank=error.rank,
                step=error.step,
                phase=error.phase,
                operation=error.operation,
            )
        case Diverged():
            values = tuple((who, str(value)) for who, value in error.values)
            return Trouble(
                kind="differs",
                message=str(error),
                rank=rank,
                step=error.step,
                what=error.what,
                values=values,
            )
        case GroupEnded():
            return Trouble(kind="told", message=str(error), rank=rank)
        case _:
            where = ledger.phase
            return Trouble(kind="own", message=text, rank=rank, step=ledger.step, phase=where)
