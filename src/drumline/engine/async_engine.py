"""`AsyncEngine`: many callers on one event loop, one engine in a process of its own.

A thin asynchronous edge around `EngineCore`: it starts the process, hands submissions over, and
spreads what comes back to the streams that wait for it. Every accepted stream ends exactly once,
with a finish reason, also when the process dies. It refuses to know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

from drumline.config import EngineConfig
from drumline.core.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    Refused,
    RequestError,
    UsageError,
)
from drumline.core.params import SamplingParams
from drumline.core.request import FinishReason
from drumline.engine.facts import EngineFacts, make_intake, open_tokenizer
from drumline.engine.intake import Prompt, Submission
from drumline.engine.link import EngineLink
from drumline.engine.messages import (
    Cancel,
    Deltas,
    Fatal,
    FromEngine,
    Ping,
    Pong,
    Ready,
    Refusal,
    Start,
    Stop,
    Submit,
)
from drumline.engine.outputs import OutputDelta
from drumline.models.tokenizer import Tokenizer

LOG = logging.getLogger("drumline.engine")
WATCH_SECONDS = 0.5  # from one sign of progress to the next question
STOP_SECONDS = 10.0  # for the process to leave by itself
INLINE_CHARACTERS = 20_000  # longer prompts are encoded in a thread, so that the loop goes on


class Stream:
    """The deltas of one submission's samples, in order of arrival. Iterate it once.

    Leaving the iterator early, or `close`, cancels what still runs.
    """

    def __init__(self, engine: AsyncEngine, submission: Submission) -> None:
        self.submission = submission
        self._engine = engine
        self._items: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        self._running = {request.number for request in submission.requests}

    @property
    def running(self) -> tuple[int, ...]:
        """Numbers of the samples whose last delta has not come."""
        return tuple(sorted(self._running))

    def deliver(self, delta: OutputDelta) -> None:
        if delta.number in self._running:
            self._items.put_nowait(delta)
            if delta.finish_reason is not None:
                self._running.discard(delta.number)

    def refuse(self, error: Exception) -> None:
        self._running.clear()
        self._items.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        """Ends after every sample has. Raises `Refused` or `RequestError` if the engine turned
        the submission away."""
        try:
            while self._running or not self._items.empty():
                item = await self._items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.close()

    def close(self) -> None:
        self._engine.release(self)
        self._running.clear()


class AsyncEngine:
    """Use as ``async with await AsyncEngine.start(config) as engine``."""

    def __init__(
        self, config: EngineConfig, link: EngineLink, facts: EngineFacts, tokenizer: Tokenizer
    ) -> None:
        self.config = config
        self.facts = facts
        self.tokenizer = tokenizer
        self.intake = make_intake(facts, tokenizer)
        self.death: str | None = None  # why there is no engine any more
        self.dead = asyncio.Event()
        self._link = link
        # By sample, until its last delta; None if nobody waits for that any more.
        self._streams: dict[int, Stream | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._pong: asyncio.Future[Pong | None] | None = None
        self._overdue: DeadlineExceeded | None = None
        self._closing = False
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, config: EngineConfig) -> Self:
        """Starts the process and waits until it has loaded, at most startup_timeout_seconds.

        Raises `UsageError` for what was asked wrongly, `EngineDead` or `DeadlineExceeded`.
        """
        seconds = config.runtime.startup_timeout_seconds
        link = await EngineLink.open()
        try:
            link.send(Start(config=config))
            facts = await asyncio.wait_for(_loaded(link), seconds)
            tokenizer = await asyncio.to_thread(open_tokenizer, Path(facts.model_path), config)
        except TimeoutError:
            await link.close()
            raise DeadlineExceeded("engine start-up", seconds) from None
        except BaseException:
            await link.close()
            raise
        return cls(config, link, facts, tokenizer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def default_params(self) -> SamplingParams:
        return self.facts.default_params

    @property
    def process_id(self) -> int:
        return self._link.process.pid

    # ---- requests ------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        exact_max_tokens: bool = False,
    ) -> Stream:
        """Raises at once: `RequestError` for what intake refuses, `Refused` if the queue is full,
        `EngineDead` if there is no engine any more."""
        self._check_room(params.n)
        ids = None
        if prompt.character_count > INLINE_CHARACTERS:
            ids = await asyncio.to_thread(self.intake.encode, prompt)
            self._check_room(params.n)
        submission = self.intake.admit(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            exact_max_tokens=exact_max_tokens,
            token_ids=ids,
        )
        stream = Stream(self, submission)
        for request in submission.requests:
            self._streams[request.number] = stream
        self._idle.clear()
        self._link.send(Submit(requests=submission.requests))
        return stream

    def _check_room(self, samples: int) -> None:
        """Counts what the engine still has to end, cancelled samples too."""
        self._check_alive()
        limit = self.facts.limits.samples_max
        if samples <= limit < len(self._streams) + samples:
            queued = self.config.server.max_num_queued_reqs
            raise Refused(f"the queue is full: max_num_queued_reqs={queued}")

    def release(self, stream: Stream) -> None:
        """Forgets a stream; samples that still run are cancelled."""
        running = stream.running
        if running and self.death is None:
            self._streams |= dict.fromkeys(running)
            self._link.send(Cancel(numbers=running))

    # ---- health --------------------------------------------------------------------------

    async def check_health(self) -> Pong:
        """A round trip through the engine's loop, which answers between two steps.

        Raises `EngineDead`, or `DeadlineExceeded` if no step ended within a step's deadline.
        """
        if self.death is not None:
            raise EngineDead(self.death)
        if self._overdue is not None:
            raise self._overdue
        return await self._ask()

    async def _ask(self) -> Pong:
        """Callers that come while a question is open share its answer."""
        if self._pong is None:
            self._pong = asyncio.get_running_loop().create_future()
            self._link.send(Ping())
        seconds = self.facts.step_deadline_seconds
        try:
            pong = await asyncio.wait_for(asyncio.shield(self._pong), seconds)
        except TimeoutError:
            what = f"a step of the engine's process {self.process_id}"
            raise DeadlineExceeded(what, seconds) from None
        if pong is None:
            raise EngineDead(self.death or "the engine was closed")
        return pong

    async def _watch(self) -> None:
        """While something is in flight, asks for a sign of progress. Under ``enforce`` an engine
        that gives none within a step's deadline is killed; under ``observe`` it is reported."""
        mode = self.config.runtime.watchdog
        while mode != "off" and self.death is None:
            await asyncio.sleep(WATCH_SECONDS)
            if not self._streams:
                continue
            try:
                await self._ask()
            except DeadlineExceeded as late:
                if self._overdue is None:
                    LOG.error("watchdog: %s", late)
                self._overdue = late
                if mode == "enforce":
                    self._die(f"watchdog: {late}")
                    self._link.kill()
            except EngineError:
                return

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDead(self.death)
        if self._closing:
            raise Refused("the engine is shutting down")

    # ---- the process ---------------------------------------------------------------------

    async def _read(self) -> None:
        """Spreads messages until the process is gone."""
        while (message := await self._link.receive()) is not None:
            self._overdue = None
            self._spread(message)
        self._die("the engine was closed" if self._closing else await self._link.ending())

    def _spread(self, message: FromEngine) -> None:
        match message:
            case Deltas(deltas):
                for delta in deltas:
                    stream = self._streams.get(delta.number)
                    if stream is not None:
                        stream.deliver(delta)
                    if delta.finish_reason is not None:
                        self._streams.pop(delta.number, None)
            case Refusal(numbers, text, full):
                stream = self._streams.get(numbers[0])
                if stream is not None:
                    stream.refuse(Refused(text) if full else RequestError(text))
                for number in numbers:
                    self._streams.pop(number, None)
            case Pong() if self._pong is not None:
                self._pong.set_result(message)
                self._pong = None
            case Fatal(text):
                self._die(text)
        if not self._streams:
            self._idle.set()

    def _die(self, text: str) -> None:
        """Everything in flight ends: with ``abort`` if we closed the engine, else ``error``."""
        if self.death is not None:
            return
        self.death = text
        reason = FinishReason.ABORT if self._closing else FinishReason.ERROR
        error = None if self._closing else text
        for number, stream in self._streams.items():
            if stream is not None:
                stream.deliver(OutputDelta(number=number, finish_reason=reason, error=error))
        self._streams.clear()
        self._idle.set()
        if self._pong is not None:
            self._pong.set_result(None)
            self._pong = None
        self.dead.set()

    async def drain(self, seconds: float) -> None:
        """Takes nothing new, and waits until what is in flight has ended, at most so long."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def close(self) -> None:
        """Aborts what is in flight, stops the process, and leaves nothing behind."""
        self._closing = True
        if self.death is None:
            self._link.send(Stop())
            await asyncio.wait({self._reader}, timeout=STOP_SECONDS)
        self._watcher.cancel()
        await self._link.close()
        await asyncio.wait({self._reader, self._watcher})


async def _loaded(link: EngineLink) -> EngineFacts:
    """What the process says when it has loaded."""
    message = await link.receive()
    match message:
        case Ready(facts):
            return facts
        case Fatal(text, usage):
            raise (UsageError if usage else EngineDead)(text)
        case _:
            raise EngineDead(await link.ending())
