"""Replicas that agree, as threads of which one runs at a time, on a clock of their own.

`Baton` hands the turn on by a seeded choice, at every place where a rank could be overtaken. When
nobody can run, the earliest deadline passes; when nobody has one, the world stands still, and that
is an assertion that fails and says who waits for what. So a run is a function of its seed, and no
test waits for time.

`World` has the real scheduler, conductor, replica and leader on every rank, a hash for a model
(`tests/scheduler/world.py`), and collectives that only come to their end when all members of the
group issue the same one.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from drumline.config.mesh import GroupKind, Mesh
from drumline.core.errors import Diverged, EngineError, RankLost
from drumline.core.ledger import Entry, Ledger
from drumline.core.plan import Event, StepPlan, StepResult
from drumline.core.request import FinishReason, Request
from drumline.core.traits import Collective, DrafterTraits, ModelTraits, PerToken
from drumline.fleet.leader import Leader, Life
from drumline.fleet.replica import Arrivals, Replica
from drumline.kvcache import BlockPool
from drumline.lockstep.channel import Wake
from drumline.lockstep.conductor import Deadlines, GroupConductor
from drumline.lockstep.decide import Rules
from drumline.lockstep.follower import Follower, Shipper
from drumline.lockstep.local import LocalGroup, LocalPlans, LocalWakes
from drumline.lockstep.mutants import Mutant, MutantConductor
from drumline.lockstep.script import build_script, pass_sizes
from drumline.scheduler import DraftLength, Scheduler, SchedulerSettings, TokenFinish

from ..scheduler.world import HashWorker, alone

TARGET = ModelTraits(
    body=(
        Collective("all_gather", "ep", (PerToken(), 8)),
        Collective("all_to_all", "ep", (PerToken(2), 8)),
    )
)
SHARDED = ModelTraits(body=(Collective("all_reduce", "tp", (PerToken(), 8)), *TARGET.body))
DRAFT = ModelTraits(body=(Collective("all_gather", "ep", (PerToken(), 4)),))
MTP = DrafterTraits("mtp", True, True, True, first_pass=DRAFT, later_pass=DRAFT)
STATELESS = DrafterTraits("tests", True, False, first_pass=DRAFT, later_pass=DRAFT)
BLOCK = DrafterTraits("dflash", True, True, True, True, 1, first_pass=DRAFT)
DENSE = DrafterTraits("dense", True, True)
NGRAM = DrafterTraits("ngram")


class Stuck(AssertionError):
    """Nobody can run, and no deadline is left to pass."""


class Over(BaseException):
    """The world ends; a thread that still waits unwinds."""


@dataclass
class Task:
    name: str
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None
    deadline: float | None = None
    what: str = ""
    timed_out: bool = False
    done: bool = False
    error: BaseException | None = None


class Baton:
    """Runs tasks one at a time. ``timeouts`` counts deadlines that passed."""

    def __init__(self, seed: int, turn_limit: int = 200_000) -> None:
        self.time = 0.0
        self.timeouts = 0
        self.turns = 0
        self._turn_limit = turn_limit
        self._random = random.Random(seed)
        self._tasks: list[Task] = []
        self._threads: list[threading.Thread] = []
        self._back = threading.Semaphore(0)
        self._current: Task | None = None
        self._over = False

    def now(self) -> float:
        return self.time

    def spawn(self, name: str, body: Callable[[], None]) -> None:
        task = Task(name)

        def run() -> None:
            task.turn.acquire(timeout=60)
            try:
                if not self._over:
                    body()
            except Over:
                pass
            except BaseException as error:
                task.error = error
            task.done = True
            self._back.release()

        self._tasks.append(task)
        self._threads.append(threading.Thread(target=run, name=name, daemon=True))

    def run(self) -> None:
        """Until all tasks are done. Raises `Stuck`, or what a task raised."""
        for thread in self._threads:
            thread.start()
        try:
            while any(not task.done for task in self._tasks):
                self._give(self._next())
                if self._current is not None and self._current.error is not None:
                    raise self._current.error
        finally:
            self._over = True
            for task, thread in zip(self._tasks, self._threads, strict=True):
                if not task.done:
                    task.turn.release()
                thread.join(timeout=10)

    def _next(self) -> Task:
        self.turns += 1
        assert self.turns <= self._turn_limit, "never ends"
        open_tasks = [task for task in self._tasks if not task.done]
        able = [task for task in open_tasks if task.ready is None or task.ready()]
        if able:
            return self._random.choice(able)
        timed = [task for task in open_tasks if task.deadline is not None]
        if not timed:
            raise Stuck("; ".join(f"{task.name} waits for {task.what}" for task in open_tasks))
        first = min(timed, key=lambda task: task.deadline or 0.0)
        assert first.deadline is not None
        self.time = max(self.time, first.deadline)
        self.timeouts += 1
        first.timed_out = True
        return first

    def _give(self, task: Task) -> None:
        self._current = task
        task.ready = None
        task.turn.release()
        assert self._back.acquire(timeout=60), f"{task.name} does not hand on"

    # ---- called by the task that has the turn --------------------------------------------

    def wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> bool:
        """As `Waiter.wait`; others may run before, even if it is ready."""
        task = self._current
        assert task is not None
        task.ready, task.what = ready, what
        task.deadline = None if timeout is None else self.time + timeout
        task.timed_out = False
        self._back.release()
        task.turn.acquire(timeout=60)
        if self._over:
            raise Over
        task.deadline = None
        return not task.timed_out

    def notify(self) -> None:
        """Whoever can run is looked for at every turn."""

    def pass_on(self) -> None:
        self.wait(lambda: True, None, "its turn")

    def until(self, ready: Callable[[], bool], what: str) -> None:
        self.wait(ready, None, what)


class Network:
    """Carries Wakes, each for as long as it likes; from one sender to one receiver in order."""

    def __init__(self, count: int, baton: Baton, seed: int) -> None:
        self.wakes = LocalWakes.connect(count, baton)
        self.closed = False
        self._baton = baton
        self._random = random.Random(seed)
        self._flying: dict[tuple[int, int], list[Wake]] = defaultdict(list)
        for index, wakes in enumerate(self.wakes):
            wakes.send = partial(self._send, index)  # type: ignore[method-assign]

    def _send(self, sender: int, wake: Wake) -> None:
        for receiver in range(len(self.wakes)):
            if receiver != sender:
                self._flying[sender, receiver].append(wake)

    def carry(self) -> None:
        while True:
            self._baton.until(lambda: self.closed or any(self._flying.values()), "a Wake")
            flying = [pair for pair, wakes in self._flying.items() if wakes]
            if not flying:
                return
            pair = self._random.choice(flying)
            self.wakes[pair[1]].inbox.append(self._flying[pair].pop(0))


class Meeting:
    """Collectives of one group: the i-th of each member must be the same, and ends for all."""

    def __init__(self, ranks: Sequence[int], baton: Baton, timeout: float) -> None:
        self.ranks = ranks
        self.baton = baton
        self.timeout = timeout
        self.gone: dict[int, str] = {}
        self._came: dict[int, list[Entry]] = {rank: [] for rank in ranks}

    def meet(self, rank: int, step: int, entry: Entry) -> None:
        own = self._came[rank]
        own.append(entry)
        number = len(own) - 1

        def missing() -> list[int]:
            return [other for other in self.ranks if len(self._came[other]) <= number]

        def ready() -> bool:
            lost = missing()
            return not lost or any(other in self.gone for other in lost)

        came = self.baton.wait(ready, self.timeout, f"{entry} of step {step}")
        lost = [other for other in missing() if not came or other in self.gone]
        if lost:
            reason = self.gone.get(lost[0], f"has not come within {self.timeout:g} s")
            where = f"draft pass {entry.part}" if entry.phase == "draft" else entry.phase
            raise RankLost(lost[0], step, where, str(entry), reason)
        said = [(other, str(self._came[other][number])) for other in self.ranks]
        if len({text for _, text in said}) > 1:
            raise Diverged("operation", said, step)


class Hands:
    """What any rank does with a plan: the script's collectives, with all that share them."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.ledger = Ledger.in_memory(rank)
        self.log: dict[int, list[Entry]] = defaultdict(list)
        self.faults: dict[int, Exception] = {}  # step: what breaks in it

    def issue(self, plan: StepPlan, compute: Callable[[], None] = lambda: None) -> None:
        """Executes the plan's script; ``compute`` is the target's own work."""
        options, ledger = self.world.options, self.ledger
        model = SHARDED if options.tp > 1 else TARGET
        for one in build_script(plan, model, options.drafter, options.tp):
            ledger.enter(one.phase, one.part)
            if one.phase == "target":
                compute()
            if plan.step in self.faults:
                raise self.faults[plan.step]
            for entry in (*one.body, *([one.tokens] if one.tokens else [])):
                shape = tuple(extent for extent in entry.shape if isinstance(extent, int))
                ticket = ledger.issue(entry.operation, entry.group, shape, entry.dtype)
                meeting = self.world.meeting_of(entry.group, self.rank)
                meeting.meet(self.rank, plan.step, ledger.leave()[-1])
                ledger.complete(ticket)
            one.check(ledger.leave(), self.rank, plan.step)
            self.log[plan.step] += ledger.leave()
        ledger.end()


class Hand(Hands):
    """A follower: executes plans as they come, until there are no more."""

    def __init__(self, world: World, rank: int, plans: LocalPlans) -> None:
        super().__init__(world, rank)
        self.follower = Follower(plans.sources[rank], self.issue, self.ledger)

    def live(self) -> None:
        try:
            while self.follower.step():
                self.world.baton.pass_on()
        except Exception as error:
            self.world.left(self.rank, str(error))
            self.world.errors[self.rank] = error
            if not self.world.expects_errors:
                raise


class Member(Hands):
    """One replica's leader: everything it has, and its thread's loop."""

    def __init__(self, world: World, index: int, options: Options) -> None:
        super().__init__(world, index * options.tp)
        self.index = index
        self.options = options
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.inbox: list[Callable[[], None]] = []
        self.events: list[Event] = []
        self.plans: list[StepPlan] = []
        self.inside = False  # a step is under way
        self.pool = BlockPool(options.block_count, 4)
        settings = SchedulerSettings(
            max_model_len=64,
            max_num_seqs=options.seats,
            max_num_batched_tokens=16,
            num_speculative_tokens=options.k,
            drafter_range=options.drafter_range,
        )
        length = None if options.length is None else options.length()
        self.scheduler = Scheduler(settings, self.pool, length)
        self.worker = HashWorker(self.pool, options.skill, seed=index)
        rules = Rules.of(options.k, options.drafter, options.adaptive, options.buckets)
        conductor = GroupConductor(
            world.group.member(self.rank),
            rules,
            self.ledger,
            config_digest=options.digests.get(self.rank, 7),
            drafter=options.drafter,
            deadlines=Deadlines(2.0),
        )
        self.conductor = conductor
        sealing = MutantConductor(conductor, options.mutants, options.gate_limit)
        self.mutant = sealing
        self.replica = Replica(
            scheduler=self.scheduler,
            conductor=sealing if options.mutants else conductor,
            executor=self,
            intake=self,
            emitter=self,
            finish=TokenFinish(),
            clock=world.baton,
            trouble=self.trouble,
        )
        self.leader = Leader(self.replica, conductor, world.wakes[index], self.pending)
        followers = range(self.rank + 1, self.rank + options.tp)
        self.plans_out = LocalPlans(followers, world.baton)
        self.shipper = Shipper(self.plans_out, self.ledger, lambda plan: 2.0)
        self.hands = [Hand(world, rank, self.plans_out) for rank in followers]

    # ---- seams ---------------------------------------------------------------------------

    def pending(self) -> bool:
        return bool(self.requests or self.cancelled)

    def take(self, limit: int) -> Arrivals:
        self.world.baton.pass_on()
        requests, self.requests = self.requests[:limit], self.requests[limit:]
        cancelled, self.cancelled = self.cancelled, []
        return Arrivals(tuple(requests), tuple(cancelled))

    def emit(self, events: Sequence[Event]) -> None:
        self.events += events

    def execute(self, plan: StepPlan) -> StepResult:
        self.inside = True
        self.plans.append(plan)
        if plan.agreed and not self.options.mutants:
            self._check_room(plan)
        results: list[StepResult] = []
        if self.hands:
            self.shipper.ship(plan)
        self.issue(plan, lambda: results.append(self.worker.execute(plan)))
        self.inside = False
        return results[0]

    def _check_room(self, plan: StepPlan) -> None:
        """What this rank has to run fits into what was agreed."""
        drafter = self.options.drafter
        assert sum(row.width for row in plan.rows) <= plan.target_size
        assert len(plan.rows) <= plan.group_rows
        if drafter is not None and plan.draft_sizes:
            shapes = [(row.width, row.samples) for row in plan.rows]
            own = pass_sizes(drafter, shapes, plan.draft_k)
            pairs = zip(own, plan.draft_sizes, strict=True)
            assert all(count <= size for count, size in pairs)

    def trouble(self) -> EngineError | None:
        return self.shipper.settle()

    # ---- its thread ----------------------------------------------------------------------

    def live(self) -> None:
        leader = self.leader
        try:
            while leader.life is not Life.GONE:
                if leader.rests:
                    self.world.baton.until(self._something, f"work ({leader.life})")
                if leader.rests and self.world.errors:
                    break  # every wait watches the supervisor's pipe, a sleeper's too
                while self.inbox:
                    self.inbox.pop(0)()
                    self.world.baton.pass_on()
                leader.turn()
            self.plans_out.close()
            self.world.left(self.rank, "has left")
        except Exception as error:
            self.plans_out.close()
            self.world.left(self.rank, str(error))
            self.world.errors[self.rank] = error
            if not self.world.expects_errors:
                raise

    def _something(self) -> bool:
        if self.leader.life is Life.PAUSED or self.world.errors:
            return bool(self.inbox or self.world.errors)
        return bool(self.inbox or self.pending() or self.world.wakes[self.index].inbox)

    def tokens(self, number: int) -> tuple[int, ...]:
        return tuple(t for event in self.events if event.number == number for t in event.tokens)

    def reasons(self, number: int) -> list[FinishReason]:
        return [e.finish_reason for e in self.events if e.number == number and e.finish_reason]


def wide(log: dict[int, list[Entry]]) -> dict[int, list[tuple[str, int, str, tuple[int, ...]]]]:
    """What of a log spans replicas, in order."""
    return {
        step: [(e.phase, e.part, e.operation, e.shape) for e in entries if e.group == "ep"]
        for step, entries in log.items()
    }


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a world is made of; every rank alike but for ``digests``."""

    dp: int = 2
    tp: int = 1
    k: int = 3
    drafter: DrafterTraits | None = MTP
    length: Callable[[], DraftLength] | None = None
    adaptive: bool = False
    buckets: tuple[int, ...] = ()
    skill: float = 0.5
    seats: int = 4
    block_count: int = 64
    drafter_range: int | None = None
    gate_limit: int = 64
    mutants: frozenset[Mutant] = frozenset()
    digests: dict[int, int] = field(default_factory=dict)


class World:
    """An agreement group and whoever uses it (`play`), from one seed."""

    def __init__(self, seed: int = 0, *, expects_errors: bool = False, **options: Any) -> None:
        self.options = Options(**options)
        self.baton = Baton(seed)
        self.expects_errors = expects_errors
        self.errors: dict[int, Exception] = {}
        mesh = Mesh(self.options.dp, self.options.tp, expert_parallel=True)
        self.group = LocalGroup(mesh.leaders, self.baton)
        self.network = Network(self.options.dp, self.baton, seed)
        self.wakes = self.network.wakes
        kinds: tuple[GroupKind, ...] = ("tp", "ep")
        groups = {mesh.group(kind, rank) for kind in kinds for rank in mesh.ranks}
        meetings = {group: Meeting(group, self.baton, timeout=2.0) for group in sorted(groups)}
        self._meetings = {
            (kind, rank): meetings[mesh.group(kind, rank)] for kind in kinds for rank in mesh.ranks
        }
        self.members = [Member(self, index, self.options) for index in range(self.options.dp)]
        self.sent: dict[int, tuple[int, Request]] = {}
        self.cancelled: set[int] = set()

    @property
    def hands(self) -> list[Hand]:
        return [hand for member in self.members for hand in member.hands]

    def meeting_of(self, kind: str, rank: int) -> Meeting:
        return self._meetings[kind, rank]

    def left(self, rank: int, why: str) -> None:
        self.group.leave(rank, why)
        for meeting in self._meetings.values():
            meeting.gone[rank] = why
        self.network.closed = all(member.rank in self.group.gone for member in self.members)

    def send(self, rank: int, request: Request) -> None:
        self.sent[request.number] = (rank, request)
        self.members[rank].requests.append(request)

    def cancel(self, number: int) -> None:
        self.cancelled.add(number)
        self.members[self.sent[number][0]].cancelled.append(number)

    def tell(self, rank: int, what: Callable[[Leader], None]) -> Callable[[], bool]:
        """Puts a word into a leader's inbox; returns whether it was heard; one who has
        left needs no telling."""
        heard: list[bool] = []
        leader = self.members[rank].leader

        def hear() -> None:
            what(leader)
            heard.append(True)

        self.members[rank].inbox.append(hear)
        return lambda: bool(heard) or leader.life is Life.GONE

    def tell_all(self, what: Callable[[Leader], None], order: Sequence[int] | None = None) -> None:
        """To every leader, one after the other; waits until all have heard it."""
        heard = []
        for rank in order or range(self.options.dp):
            heard.append(self.tell(rank, what))
            self.baton.pass_on()
        self.baton.until(lambda: all(one() for one in heard), "leaders to hear")

    def pause(self, order: Sequence[int] | None = None) -> None:
        self.tell_all(Leader.pause, order)
        self.baton.until(lambda: all(m.leader.paused for m in self.members), "the pause")

    def quiet(self) -> None:
        """Waits until every request has ended and all sleep."""
        self.baton.until(
            lambda: all(m.leader.life is Life.ASLEEP and not m.pending() for m in self.members),
            "all to sleep",
        )

    def play(self, script: Callable[[World], None], stops: bool = True) -> World:
        """Runs the ranks and ``script`` beside each other, and stops the ranks after it."""

        def supervise() -> None:
            script(self)
            if stops and not self.expects_errors:
                self.quiet()
                self.tell_all(Leader.stop)

        for one in (*self.members, *self.hands):
            self.baton.spawn(f"rank {one.rank}", one.live)
        self.baton.spawn("network", self.network.carry)
        self.baton.spawn("supervisor", supervise)
        self.baton.run()
        return self

    # ---- the laws ------------------------------------------------------------------------

    def check(self) -> None:
        """Standard checks: all ended, tokens right, equal logs, one exchange each, blocks back."""
        assert self.baton.timeouts == 0, "a deadline passed"
        for number, (rank, request) in self.sent.items():
            member = self.members[rank]
            told, whole = (member.tokens(number), *member.reasons(number)), alone(request)
            if number in self.cancelled and told != whole:
                whole = (whole[0][: len(told[0])], FinishReason.ABORT)
            assert told == whole
        first = self.members[0]
        for hand in self.hands:
            leader = self.members[hand.rank // self.options.tp]
            assert hand.log == leader.log, "collective logs differ within a replica"
        for member in self.members:
            assert self.options.tp > 1 or member.log == first.log, "collective logs differ"
            assert wide(member.log) == wide(first.log), "collective logs differ"
            assert member.conductor.exchange_count == first.conductor.exchange_count
            assert member.conductor.exchange_count == member.conductor.next_step
            assert [p.draft_k for p in member.plans] == [p.draft_k for p in first.plans]
            assert [p.step for p in member.plans] == [p.step for p in first.plans]
            assert member.replica.draft_length_histogram == first.replica.draft_length_histogram
            assert member.pool.used_count == 0
            assert not member.scheduler.has_work
