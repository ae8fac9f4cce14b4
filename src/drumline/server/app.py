"""The application: routes, their guard and their errors, put together.

A thin layer: bodies are read by `protocol`, run by `AsyncEngine`, written by `responses`. It
refuses to know how tokens come about.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from drumline import __version__
from drumline.server.errors import add_error_handlers
from drumline.server.generation import add_generation_routes
from drumline.server.guard import Guard
from drumline.server.state import ServerState
from drumline.server.status import add_status_routes


def create_app(state: ServerState) -> FastAPI:
    """The application; `run` gives it an engine and a socket."""
    app = FastAPI(title="drumline", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, config=state.config)
    if state.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    add_error_handlers(app)
    add_status_routes(app, state)
    add_generation_routes(app, state)
    return app
