"""`AsyncEngine`: many callers on one event loop, one engine in a process of its own.

A thin asynchronous edge around `EngineCore`: it starts the process, hands submissions over, and
spreads what comes back to the streams that wait for it. Every accepted stream ends exactly once,
with a finish reason, also when the process dies. It refuses to know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import zmq
import zmq.asyncio

from drumline.config import EngineConfig
from drumline.core.errors import (
    DeadlineExceeded,
    EngineDead,
    Refused,
    RequestError,
    UsageError,
)
from drumline.core.params import SamplingParams
from drumline.core.request import FinishReason
from drumline.engine.facts import EngineFacts, make_intake, with_template
from drumline.engine.intake import Intake, Prompt, Submission
from drumline.engine.messages import (
    Cancel,
    Deltas,
    Fatal,
    FromEngine,
    Ping,
    Pong,
    Ready,
    Refusal,
    Stop,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)
from drumline.engine.outputs import OutputDelta
from drumline.engine.process import QUEUE_MESSAGES_MAX, engine_process
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tokenizer import Tokenizer

LOG = logging.getLogger("drumline.engine")
WATCH_SECONDS = 1.0
LIVENESS_SECONDS = 0.25  # how often the process is looked at while nothing arrives
STOP_SECONDS = 10.0


class Stream:
    """The deltas of one submission's samples, in order of arrival. Iterate it once."""

    def __init__(self, engine: AsyncEngine, submission: Submission) -> None:
        self.submission = submission
        self._engine = engine
        self._deltas: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        self._open = {request.number for request in submission.requests}

    def deliver(self, item: OutputDelta | Exception) -> None:
        self._deltas.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        """Ends after every sample has. Leaving early cancels what still runs.

        Raises `Refused` or `RequestError` if the engine turned the submission away.
        """
        try:
            while self._open:
                item = await self._deltas.get()
                if isinstance(item, Exception):
                    self._open.clear()
                    raise item
                if item.finish_reason is not None:
                    self._open.discard(item.number)
                yield item
        finally:
            self._engine.release(self)

    @property
    def unfinished(self) -> tuple[int, ...]:
        return tuple(sorted(self._open))


class AsyncEngine:
    """Use as ``async with await AsyncEngine.start(config) as engine``."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.facts: EngineFacts
        self.tokenizer: Tokenizer
        self.intake: Intake
        self.death: str | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="drumline-"))
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._streams: dict[int, Stream] = {}
        self._pings: dict[int, asyncio.Future[Pong]] = {}
        self._ping_count = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        address = f"ipc://{self._folder / 'engine'}"
        self._socket.bind(address)
        spawn = multiprocessing.get_context("spawn")
        lifeline, self._lifeline = spawn.Pipe(duplex=False)
        self._process = spawn.Process(
            target=engine_process, args=(config, address, lifeline), name="drumline-engine"
        )
        self._process.start()
        lifeline.close()

    @classmethod
    async def start(cls, config: EngineConfig) -> Self:
        """Starts the process and waits until it has loaded, at most startup_timeout_seconds.

        Raises `UsageError` for what was asked wrongly, `EngineDead` or `DeadlineExceeded`.
        """
        engine = cls(config)
        try:
            await engine._wait_ready(config.runtime.startup_timeout_seconds)
        except BaseException:
            await engine.close()
            raise
        engine._tasks.append(asyncio.create_task(engine._read()))
        if config.runtime.watchdog != "off":
            engine._tasks.append(asyncio.create_task(engine._watch()))
        return engine

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _wait_ready(self, seconds: float) -> None:
        clock = asyncio.get_running_loop()
        deadline = clock.time() + seconds
        while clock.time() < deadline:
            message = await self._receive()
            if isinstance(message, Ready):
                self.facts = message.facts
                checkpoint = await asyncio.to_thread(open_checkpoint, self.facts.model_path)
                self.tokenizer = with_template(checkpoint.tokenizer(), self.config)
                self.intake = make_intake(self.facts, self.tokenizer)
                return
            if isinstance(message, Fatal):
                raise (UsageError if message.usage else EngineDead)(message.message)
            if message is None and not self._process.is_alive():
                raise EngineDead(f"the engine's process ended with {self._process.exitcode}")
        raise DeadlineExceeded("engine start-up", seconds)

    @property
    def default_params(self) -> SamplingParams:
        return self.facts.default_params

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
        """Raises `RequestError` at once for what intake refuses, `EngineDead` if there is no
        engine any more."""
        self._check_alive()
        submission = self.intake.admit(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            exact_max_tokens=exact_max_tokens,
        )
        stream = Stream(self, submission)
        for request in submission.requests:
            self._streams[request.number] = stream
        await self._send(Submit(requests=submission.requests))
        return stream

    def release(self, stream: Stream) -> None:
        """Forgets a stream; samples that still run are cancelled."""
        for request in stream.submission.requests:
            self._streams.pop(request.number, None)
        if stream.unfinished and self.death is None and not self._closing:
            cancel = encode(Cancel(numbers=stream.unfinished))
            self._background = asyncio.ensure_future(self._socket.send(cancel))

    # ---- health --------------------------------------------------------------------------

    async def check_health(self, seconds: float | None = None) -> Pong:
        """A round trip through the engine's loop: it answers between two steps.

        Raises `EngineDead`, or `DeadlineExceeded` if no step ended within ``seconds`` (default:
        the deadline of one step).
        """
        self._check_alive()
        seconds = self.facts.step_deadline_seconds if seconds is None else seconds
        self._ping_count += 1
        token = self._ping_count
        answer: asyncio.Future[Pong] = asyncio.get_running_loop().create_future()
        self._pings[token] = answer
        try:
            await self._send(Ping(token=token))
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise DeadlineExceeded("the engine's loop", seconds) from None
        finally:
            del self._pings[token]

    async def _watch(self) -> None:
        """While something is in flight, asks for a sign of progress. Under ``enforce`` an engine
        that gives none within a step's deadline is killed; under ``observe`` it is reported."""
        while self.death is None and not self._closing:
            await asyncio.sleep(WATCH_SECONDS)
            if not self._streams:
                continue
            try:
                await self.check_health()
            except DeadlineExceeded as late:
                LOG.error("watchdog: %s", late)
                if self.config.runtime.watchdog == "enforce":
                    self._process.kill()
                    self._die(f"watchdog: {late}")
            except (EngineDead, Refused):
                return

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDead(self.death)
        if self._closing:
            raise Refused("the engine is shutting down")

    # ---- the process ---------------------------------------------------------------------

    async def _send(self, message: ToEngine) -> None:
        await self._socket.send(encode(message))

    async def _receive(self) -> FromEngine | None:
        """The next message, or None after `LIVENESS_SECONDS` without one."""
        if await self._socket.poll(LIVENESS_SECONDS * 1000):
            return decode_from_engine(await self._socket.recv())
        return None

    async def _read(self) -> None:
        """Spreads messages until the process is gone."""
        while True:
            message = await self._receive()
            match message:
                case Deltas(deltas):
                    for delta in deltas:
                        stream = self._streams.get(delta.number)
                        if stream is not None:
                            stream.deliver(delta)
                case Refusal(numbers, text, full):
                    kind = Refused if full else RequestError
                    stream = self._streams.get(numbers[0])
                    if stream is not None:
                        stream.deliver(kind(text))
                case Pong(token):
                    answer = self._pings.get(token)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                case Fatal(text):
                    self._die(text)
                    return
                case None if not self._process.is_alive():
                    self._die(f"the engine's process ended with {self._process.exitcode}")
                    return

    def _die(self, text: str) -> None:
        """Everything in flight ends with ``error``; nothing more is taken."""
        self.death = text
        for number, stream in list(self._streams.items()):
            stream.deliver(OutputDelta(number=number, finish_reason=FinishReason.ERROR, error=text))
        for answer in self._pings.values():
            if not answer.done():
                answer.set_exception(EngineDead(text))

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Stops the process and leaves nothing behind. With ``drain_seconds`` what is in flight
        may end by itself for that long; after that, and at once by default, it is aborted."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(zmq.ZMQError):
            if drain_seconds > 0 and self._process.is_alive():
                await self._send(Stop(drain=True))
                await self._wait_end(drain_seconds)
            if self._process.is_alive():
                await self._send(Stop(drain=False))
                await self._wait_end(STOP_SECONDS)
        self._lifeline.close()
        if self._process.is_alive():
            self._process.kill()
        await asyncio.to_thread(self._process.join, STOP_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.death is None:
            self._die("the engine was closed")
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_end(self, seconds: float) -> None:
        clock = asyncio.get_running_loop()
        deadline = clock.time() + seconds
        while self._process.is_alive() and clock.time() < deadline:
            await asyncio.sleep(0.01)
