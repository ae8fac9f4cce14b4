"""What every request passes before a route sees it: the API keys, and limits on its body.

Plain ASGI, so that a body that is too large or too slow is refused while it comes. It refuses to
know what a body means.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drumline.config import ServerConfig
from drumline.server.errors import ApiError, error_response

BODY_SECONDS = 60.0  # for the whole body to come
DISCARD_SECONDS = 5.0  # a refused body is read to its end for so long, or the refusal is lost
GUARDED = "/v1/"


class Guard:
    """ASGI middleware."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, body_seconds: float = BODY_SECONDS
    ) -> None:
        self.app = app
        self.limit = config.max_body_bytes
        self.keys = [key.encode() for key in config.api_key]
        self.body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            self._check_key(scope, headers)
            self._check_body(scope, headers)
        except ApiError as error:
            if b"expect" not in headers:  # else the client waits for our word before it sends
                await _discard(receive)
            await error_response(error)(scope, receive, send)
            return
        # Only the end of the server cancels: of clients that did not read their answers in time.
        with contextlib.suppress(asyncio.CancelledError):
            await self.app(scope, self._limited(receive), send)

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if not self.keys or not scope["path"].startswith(GUARDED) or scope["method"] == "OPTIONS":
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        known = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        if scheme.lower() != b"bearer" or not any(known):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_body(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """JSON must say so: browsers ask before they send that from a foreign page."""
        if scope["method"] != "POST":
            return
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError(415, "a JSON body is needed: Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limit:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than max_body_bytes={self.limit}")

    def _limited(self, receive: Receive) -> Receive:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.body_seconds
        seen = 0
        whole = False

        async def limited() -> Message:
            nonlocal seen, whole
            if whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - clock())
            except TimeoutError:
                raise ApiError(408, f"no whole body within {self.body_seconds:g} s") from None
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > self.limit:
                if not whole:
                    await _discard(receive)
                raise self._too_large()
            return message

        return limited


async def _discard(receive: Receive) -> None:
    """Reads what still comes and forgets it, so that the client reads our answer."""

    async def rest() -> None:
        while (await receive()).get("more_body", False):
            pass

    try:
        await asyncio.wait_for(rest(), DISCARD_SECONDS)
    except TimeoutError:
        return
