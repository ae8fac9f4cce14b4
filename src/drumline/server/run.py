"""From a configuration to a listening server, and back to nothing.

The socket is bound first, so that a port in use is a clear error before any weight is read. While
the model loads the server answers, and ``/ready`` says 503. SIGINT and SIGTERM stop it: what is
being answered may finish for ``shutdown_timeout`` seconds, a second signal does not wait. When the
engine's process dies every open request is told, and after `GOODBYE_SECONDS` of saying so on
``/health`` the server ends with an error, so that whoever supervises it can start it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn

from drumline.config import EngineConfig
from drumline.core.errors import ConfigError, EngineDead
from drumline.engine.async_engine import AsyncEngine
from drumline.server.app import create_app
from drumline.server.state import ServerState

LOG = logging.getLogger("drumline.server")
BACKLOG = 1024
KEEP_ALIVE_SECONDS = 30
FLUSH_SECONDS = 2  # for answers that have ended to reach their clients
GOODBYE_SECONDS = 1.0


def serve(config: EngineConfig) -> int:
    """Runs until a signal. Returns 0; raises `DrumlineError` if it could not start or broke."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    listener = bind(config.server.host, config.server.port)
    with listener:
        asyncio.run(_Service(config, listener).run())
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises `ConfigError` naming host or port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise ConfigError("host", host, f"cannot be resolved: {reason}") from None
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError("port", port, f"cannot listen on {host}: {error.strerror}") from None
    return bound


class _Http(uvicorn.Server):
    """uvicorn without signal handlers of its own: signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Service:
    """One server's life: listen, load, serve, stop."""

    def __init__(self, config: EngineConfig, listener: socket.socket) -> None:
        self.config = config
        self.listener = listener
        names = config.server.served_model_name or (config.model.model,)
        self.state = ServerState(config.server, names)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.http = _Http(
            uvicorn.Config(
                create_app(self.state),
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=FLUSH_SECONDS,
                lifespan="off",
            )
        )
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        LOG.info("listening on %s, loading %s", self.url, self.config.model.model)
        http = asyncio.create_task(self.http.serve(sockets=[self.listener]))
        try:
            engine = await self._first(AsyncEngine.start(self.config), self._stop)
            if engine is not None:
                async with engine:
                    await self._serve(engine)
        finally:
            self.state.closing = True
            self.http.should_exit = True
            await http

    def _signalled(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _serve(self, engine: AsyncEngine) -> None:
        self.state.engine = engine
        for name, value, reason in engine.facts.startup_rows:
            LOG.info("%s = %s (%s)", name, value, reason)
        LOG.info("ready on %s, engine in process %d", self.url, engine.process_id)
        await self._first(engine.dead.wait(), self._stop)
        if engine.death is not None:
            LOG.error("the engine is gone: %s", engine.death)
            await self._first(asyncio.sleep(GOODBYE_SECONDS), self._stop)
            raise EngineDead(engine.death)
        LOG.info("stopping")
        self.state.closing = True
        seconds = self.config.server.shutdown_timeout
        if seconds > 0:
            await self._first(engine.drain(seconds), self._hurry)

    async def _first(self, work: Coroutine[Any, Any, Any], stop: asyncio.Event) -> Any:
        """The work's result, or None if ``stop`` came first; then the work is cancelled."""
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            working.cancel()
            await asyncio.wait({working})
            return None
        finally:
            stopping.cancel()
