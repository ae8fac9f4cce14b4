"""Routes that say how the server is: health, readiness, version, models."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response

from drumline import __version__
from drumline.core.errors import DrumlineError
from drumline.server.errors import ApiError, reply
from drumline.server.state import ServerState


def add_status_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine's loop moves; 503 and the reason if not, or while it loads."""
        if state.engine is None:
            return reply(503, {"status": "loading"})
        try:
            pong = await state.engine.check_health()
        except DrumlineError as error:
            return reply(503, {"status": "bad", "reason": str(error)})
        return reply(200, {"status": "ok", **msgspec.structs.asdict(pong)})

    @app.get("/ready")
    async def ready() -> Response:
        """200 once requests are taken; 503 while loading, shutting down or broken."""
        try:
            state.ready_engine()
        except DrumlineError as error:
            return reply(503, {"ready": False, "reason": str(error)})
        return reply(200, {"ready": True})

    @app.get("/version")
    async def version() -> Response:
        return reply(200, {"version": __version__})

    @app.get("/v1/models")
    async def models() -> Response:
        cards = [model_card(state, name) for name in state.model_names]
        return reply(200, {"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in state.model_names:
            problem = f"the model {name!r:.120} is not served"
            raise ApiError(404, problem, param="model", code="model_not_found")
        return reply(200, model_card(state, name))


def model_card(state: ServerState, name: str) -> dict[str, Any]:
    facts = state.engine.facts if state.engine is not None else None
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "drumline",
        "root": facts.model if facts else None,
        "parent": None,
        "max_model_len": facts.limits.max_model_len if facts else None,
    }
