"""Errors in OpenAI's shape: one line that says what is wrong, and the parameter at fault.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from drumline.core.errors import (
    DrumlineError,
    EngineError,
    PromptTooLong,
    Refused,
    RequestError,
    UsageError,
)

RETRY_SECONDS = 1
MESSAGE_CHARACTERS_MAX = 500
INPUT_CHARACTERS_MAX = 80
_KINDS = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable"}


class ApiError(HTTPException):
    """An error with an HTTP status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "internal_error")
    message = " ".join(message.split())
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = message[: MESSAGE_CHARACTERS_MAX - 1] + "…"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def reply(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII: what a client sent may hold text that is not Unicode, and is quoted back."""
    return Response(
        json.dumps(body), status, headers=dict(headers or {}), media_type="application/json"
    )


def describe(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error; one that is not ours says nothing about itself."""
    retry = {"Retry-After": str(RETRY_SECONDS)}
    match error:
        case ApiError():
            headers = dict(error.headers or {})
            status = error.status_code
            return status, error_body(status, error.detail, error.param, error.code), headers
        case HTTPException():
            detail = str(error.detail)
            if error.status_code == 400 and error.__cause__ is not None:  # while reading a body
                detail = f"the body is not JSON: {error.__cause__}"
            body = error_body(error.status_code, detail)
            return error.status_code, body, dict(error.headers or {})
        case PromptTooLong():
            return 400, error_body(400, str(error), error.param, "context_length_exceeded"), {}
        case RequestError():
            return 400, error_body(400, str(error), error.param), {}
        case UsageError():
            return 400, error_body(400, str(error)), {}
        case Refused():
            return 503, error_body(503, str(error)), retry
        case EngineError():
            return 500, error_body(500, str(error)), {}
        case _:
            return 500, error_body(500, "an internal error; the server's log has it"), {}


def error_response(error: Exception) -> Response:
    status, body, headers = describe(error)
    return reply(status, body, headers)


def invalid_body(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """(message, param) for pydantic's first complaint about a body."""
    place = [str(part) for part in error["loc"] if part != "body"]
    param = ".".join(place) or None
    if error["type"] == "json_invalid":
        at = f" (character {place[0]})" if place else ""
        return f"the body is not JSON: {error.get('ctx', {}).get('error', error['msg'])}{at}", None
    if error["type"] == "unknown_parameter":
        param = ".".join([*place, str(error["ctx"]["name"])])
        return f"{param}: {error['msg']}", param
    if error["type"] == "missing":
        return f"{param or 'the body'}: is needed", param
    if param is None:
        return "the body must be a JSON object", None
    shown = repr(error.get("input"))
    if len(shown) > INPUT_CHARACTERS_MAX:
        shown = shown[: INPUT_CHARACTERS_MAX - 1] + "…"
    message = error["msg"][:1].lower() + error["msg"][1:]
    if error["type"] == "model_type":
        message = "must be an object"
    return f"{param}: {message}, got {shown}", param


def add_error_handlers(app: FastAPI) -> None:
    async def ours(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = invalid_body(error.errors()[0])
        return reply(400, error_body(400, message, param))

    app.add_exception_handler(DrumlineError, ours)
    app.add_exception_handler(HTTPException, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, ours)  # which the server logs with its traceback
