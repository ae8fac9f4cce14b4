"""What the routes share: the engine once it has loaded, and the names it is served under."""

from __future__ import annotations

import time

from drumline.config import ServerConfig
from drumline.core.errors import EngineDead, Refused
from drumline.engine.async_engine import AsyncEngine
from drumline.server.errors import ApiError


class ServerState:
    """``engine`` is None until it has loaded; ``closing`` once the server takes nothing new."""

    def __init__(self, config: ServerConfig, model_names: tuple[str, ...]) -> None:
        self.config = config
        self.model_names = model_names
        self.engine: AsyncEngine | None = None
        self.closing = False
        self.created = int(time.time())

    def ready_engine(self) -> AsyncEngine:
        """The engine, if requests are taken. Raises `Refused` or `EngineDead` saying why not."""
        if self.engine is None:
            raise Refused("the model is still loading")
        if self.engine.death is not None:
            raise EngineDead(self.engine.death)
        if self.closing:
            raise Refused("the server is shutting down")
        return self.engine

    def check_model(self, name: str | None) -> str:
        """The name to answer under; an unknown one is OpenAI's 404."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            problem = f"the model {name!r:.120} is not served; {', '.join(self.model_names)} is"
            raise ApiError(404, problem, param="model", code="model_not_found")
        return name
