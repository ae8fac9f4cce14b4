"""The engine's own process: a loop between its parent and the engine's core.

Started by `link`, told what to load by its first message. It sleeps without a deadline only while
it has nothing to do; when its parent is gone it ends at once, whatever it is doing. Interrupts are
the parent's affair, who says `Stop`. This module refuses to know HTTP and asyncio.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

from drumline.core.errors import EngineDead, Refused, RequestError, UsageError
from drumline.engine.link import STOPPED_BY_PARENT, ParentLink
from drumline.engine.messages import (
    Cancel,
    Deltas,
    Fatal,
    Ping,
    Pong,
    Ready,
    Refusal,
    Start,
    Stop,
    Submit,
    ToEngine,
)

if TYPE_CHECKING:
    from drumline.core.request import Request
    from drumline.engine.loading import Core

EXIT_ORPHANED = 3


def main(descriptor: int) -> None:
    """Loads, says `Ready`, serves until told to stop; its last words on failure are `Fatal`."""
    for number in STOPPED_BY_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPED_BY_PARENT)
    link = ParentLink(descriptor)
    link.watch(lambda: os._exit(EXIT_ORPHANED))
    try:
        (start,) = link.receive(wait=True)
        assert isinstance(start, Start), "the first message says what to load"
        from drumline.engine.loading import load_core  # torch loads here, not in the front end

        core = load_core(start.config)
        try:
            link.send(Ready(facts=core.facts))
            _Loop(core, link).run()
        finally:
            core.close()
    except UsageError as error:
        link.send(Fatal(message=str(error), usage=True))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(EXIT_ORPHANED)
    except Exception as error:
        traceback.print_exc()
        link.send(Fatal(message=f"{type(error).__name__}: {error}", usage=False))
        sys.exit(1)
    finally:
        link.close()


class _Loop:
    """Messages in, one step, deltas out; again."""

    def __init__(self, core: Core, link: ParentLink) -> None:
        self.core = core
        self.link = link
        core.also = (link.fileno(),)
        self.stopping = False

    def run(self) -> None:
        while not (self.stopping and not self.core.has_work):
            for message in self.link.receive(wait=self._waits()):
                self._handle(message)
            if self.core.has_work or self.core.descriptors:
                deltas = self.core.step()
                if deltas:
                    self.link.send(Deltas(deltas=tuple(deltas)))

    def _waits(self) -> bool:
        """Whether only a message can bring something to do. Where other ranks work, they can."""
        return not self.core.has_work and not self.core.descriptors

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(requests):
                self._submit(requests)
            case Cancel(numbers):
                for number in numbers:
                    self.core.cancel(number)
            case Ping():
                load = self.core.load_now(wait=False)
                self.link.send(Pong(load.step, load.running, load.waiting, load.kv_usage))
            case Stop():
                self.stopping = True
                self.core.cancel_all()
            case Start():
                raise EngineDead("told to load twice")

    def _submit(self, requests: tuple[Request, ...]) -> None:
        try:
            if self.stopping:
                raise Refused("the engine is shutting down")
            self.core.submit(requests)
        except (Refused, RequestError) as error:
            numbers = tuple(request.number for request in requests)
            full = isinstance(error, Refused)
            self.link.send(Refusal(numbers=numbers, message=str(error), full=full))


if __name__ == "__main__":
    main(int(sys.argv[1]))
