"""From a configuration to a listening server, and back to nothing.

The socket is bound first, so that a port in use is a clear error before any weight is read. While
the model loads the server answers ``/ready`` with 503. SIGINT and SIGTERM stop it: what is being
answered may finish for ``shutdown_timeout`` seconds, a second signal does not wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

import uvicorn

from drumline.config import EngineConfig
from drumline.core.errors import ConfigError, DrumlineError
from drumline.engine.async_engine import AsyncEngine
from drumline.server.app import ServerState, create_app

LOG = logging.getLogger("drumline.server")
BACKLOG = 1024
KEEP_ALIVE_SECONDS = 30


def serve(config: EngineConfig) -> int:
    """Runs until a signal. Returns 0; raises `DrumlineError` if it could not start or broke."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return asyncio.run(_serve(config))


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises `ConfigError` naming host or port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError("host", host, f"cannot be resolved: {error.strerror}") from None
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError("port", port, f"cannot listen on {host}: {error.strerror}") from None
    bound.set_inheritable(False)
    return bound


async def _serve(config: EngineConfig) -> int:
    server_config = config.server
    listener = bind(server_config.host, server_config.port)
    names = server_config.served_model_name or (config.model.model,)
    state = ServerState(server_config, names)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(state),
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            lifespan="off",
        )
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    LOG.info("listening on http://%s:%d, loading %s", shown, port, config.model.model)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    http = asyncio.create_task(_http(server, listener))
    engine: AsyncEngine | None = None
    try:
        engine = await _first(AsyncEngine.start(config), stop)
        if engine is None:
            return 0
        state.engine = engine
        for name, value, reason in engine.facts.startup_rows:
            LOG.info("%s = %s (%s)", name, value, reason)
        LOG.info("ready on http://%s:%d", shown, port)
        await stop.wait()
        LOG.info("stopping")
        state.closing = True
        return 0
    except DrumlineError:
        state.closing = True
        raise
    finally:
        if engine is not None:
            await engine.close(drain_seconds=config.server.shutdown_timeout)
        server.should_exit = True
        server.force_exit = True
        await http
        listener.close()


async def _http(server: uvicorn.Server, listener: socket.socket) -> None:
    """uvicorn without its own signal handlers: signals are ours."""
    await server._serve([listener])


async def _first(start: object, stop: asyncio.Event) -> AsyncEngine | None:
    """The started engine, or None if a signal came first; then the start is undone."""
    starting = asyncio.ensure_future(start)  # type: ignore[call-overload]
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return None
    engine: AsyncEngine = starting.result()
    return engine
