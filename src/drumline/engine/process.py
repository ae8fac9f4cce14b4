"""The engine's own process: a loop between a socket and `EngineCore`.

The process sleeps without a deadline only when it has nothing to do, and then it watches the
pipe to its parent: end of file means the parent is gone, and so is this process. Interrupts are
the parent's affair; it says `Stop`. This module refuses to know HTTP and asyncio.
"""

from __future__ import annotations

import signal
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import zmq

from drumline.config import EngineConfig
from drumline.core.errors import Refused, RequestError, UsageError
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
    decode_to_engine,
    encode,
)

if TYPE_CHECKING:
    from drumline.engine.core import EngineCore

MESSAGES_PER_STEP_MAX = 256
SEND_TIMEOUT_MS = 10_000
LINGER_MS = 2_000
QUEUE_MESSAGES_MAX = 100_000


def open_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The engine's end. A front end that reads nothing for `SEND_TIMEOUT_MS` ends the process."""
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(address)
    return socket


def engine_process(config: EngineConfig, address: str, lifeline: Connection) -> None:
    """Entry point of the process. Loads, says `Ready`, serves until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = open_socket(context, address)
    try:
        from drumline.engine.core import EngineCore  # torch loads here, not in the front end

        core = EngineCore.load(config)
        socket.send(encode(Ready(facts=core.facts())))
        _Loop(core, socket, lifeline).run()
    except UsageError as error:
        socket.send(encode(Fatal(message=str(error), usage=True)))
    except Exception as error:
        traceback.print_exc()
        socket.send(encode(Fatal(message=f"{type(error).__name__}: {error}", usage=False)))
    finally:
        socket.close()
        context.term()


class _Loop:
    """Messages in, one step, deltas out; again."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes], lifeline: Connection) -> None:
        self.core = core
        self.socket = socket
        self.lifeline = lifeline
        self.stopping = False
        self.poller = zmq.Poller()
        self.poller.register(socket, zmq.POLLIN)
        self.poller.register(lifeline.fileno(), zmq.POLLIN)

    def run(self) -> None:
        while not (self.stopping and not self.core.has_work):
            ready = dict(self.poller.poll(0 if self.core.has_work else None))
            if self.lifeline.fileno() in ready:
                return  # the parent is gone
            if self.socket in ready:
                self._take_messages()
            if self.core.has_work:
                deltas = self.core.step()
                if deltas:
                    self._send(Deltas(deltas=tuple(deltas)))

    def _take_messages(self) -> None:
        for _ in range(MESSAGES_PER_STEP_MAX):
            try:
                message = decode_to_engine(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(requests):
                numbers = tuple(request.number for request in requests)
                try:
                    if self.stopping:
                        raise Refused("the engine is shutting down")
                    self.core.submit(requests)
                except (Refused, RequestError) as error:
                    full = isinstance(error, Refused)
                    self._send(Refusal(numbers=numbers, message=str(error), full=full))
            case Cancel(numbers):
                for number in numbers:
                    self.core.cancel(number)
            case Ping(token):
                self._send(self._pong(token))
            case Stop(drain):
                self.stopping = True
                if not drain:
                    self.core.cancel_all()

    def _pong(self, token: int) -> Pong:
        load = self.core.load_now()
        return Pong(
            token=token,
            step=load.step,
            running=load.running,
            waiting=load.waiting,
            kv_usage=load.kv_usage,
        )

    def _send(self, message: FromEngine) -> None:
        self.socket.send(encode(message))
