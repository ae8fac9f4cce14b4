"""The routes: OpenAI's completions and chat completions, models, health, readiness.

A thin layer: bodies are read by `protocol`, run by `AsyncEngine`, written by `responses`. Errors
have OpenAI's shape, and say which parameter is wrong. It refuses to know how tokens come about.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drumline import __version__
from drumline.config import ServerConfig
from drumline.core.errors import (
    DeadlineExceeded,
    DrumlineError,
    EngineError,
    PromptTooLong,
    Refused,
    RequestError,
    UsageError,
    nearest_name,
)
from drumline.core.params import SamplingParams
from drumline.core.request import FinishReason
from drumline.engine.async_engine import AsyncEngine, Stream
from drumline.engine.intake import Prompt
from drumline.engine.outputs import OutputDelta, RequestOutput, RequestRecord
from drumline.server.protocol import ChatBody, CompletionBody
from drumline.server.responses import ChatFormat, CompletionFormat, echo_text

PROMPTS_MAX = 256
RETRY_SECONDS = 1


class ServerState:
    """What the routes share. ``engine`` is None until it has loaded."""

    def __init__(self, config: ServerConfig, model_names: tuple[str, ...]) -> None:
        self.config = config
        self.model_names = model_names
        self.engine: AsyncEngine | None = None
        self.closing = False
        self.created = int(time.time())

    def ready_engine(self) -> AsyncEngine:
        if self.engine is None:
            raise Refused("the model is still loading")
        if self.closing:
            raise Refused("the server is shutting down")
        return self.engine

    def check_model(self, name: str | None) -> str:
        """The name to answer under; an unknown one is OpenAI's 404."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise HTTPException(404, f"model {name!r} is not served; {', '.join(self.model_names)}")
        return name


def error_body(message: str, kind: str, param: str | None, code: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    """OpenAI's error object for an error of ours."""
    headers = {}
    match error:
        case PromptTooLong():
            body = error_body(
                str(error), "invalid_request_error", "prompt", "context_length_exceeded"
            )
            status = 400
        case RequestError():
            body = error_body(str(error), "invalid_request_error", error.param, None)
            status = 400
        case UsageError():
            body, status = error_body(str(error), "invalid_request_error", None, None), 400
        case Refused():
            body, status = error_body(str(error), "service_unavailable", None, None), 503
            headers = {"Retry-After": str(RETRY_SECONDS)}
        case _:
            body, status = error_body(str(error), "internal_error", None, None), 500
    return JSONResponse(body, status, headers=headers)


def validation_message(error: dict[str, Any], fields: tuple[str, ...]) -> tuple[str, str | None]:
    """One line for pydantic's first complaint, naming the field and, if unknown, the nearest."""
    place = [str(part) for part in error["loc"] if part != "body"]
    param = ".".join(place) or None
    if error["type"] == "extra_forbidden":
        return f"{param}: unknown parameter{nearest_name(place[-1], fields)}", param
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error.get('ctx', {}).get('error', error['msg'])}", None
    shown = repr(error.get("input"))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return f"{param}: {error['msg']}, got {shown}", param


class Guard:
    """ASGI middleware: the body limit, the API keys, and a request id on every answer."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self.limit = config.max_body_bytes
        self.keys = [key.encode() for key in config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise HTTPException(413, f"the body is larger than max_body_bytes={self.limit}")
            return message

        await self.app(scope, limited, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        if self.keys and scope["path"].startswith("/v1/") and scope["method"] != "OPTIONS":
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not any(hmac.compare_digest(given, key) for key in self.keys):
                body = error_body("a valid API key is needed", "invalid_request_error", None, None)
                return JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limit:
            message = f"the body is larger than max_body_bytes={self.limit}"
            return JSONResponse(error_body(message, "invalid_request_error", None, None), 413)
        return None


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
    _add_error_handlers(app)
    _add_status_routes(app, state)
    _add_generation_routes(app, state)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    async def ours(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return JSONResponse(
            error_body(str(error.detail), kind, None, None), error.status_code, error.headers
        )

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        body = ChatBody if "chat" in request.url.path else CompletionBody
        message, param = validation_message(error.errors()[0], tuple(body.model_fields))
        return JSONResponse(error_body(message, "invalid_request_error", param, None), 400)

    app.add_exception_handler(DrumlineError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)


def _add_status_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine's loop moves; 503 and the reason when it does not."""
        if state.engine is None:
            return JSONResponse({"status": "loading"}, 200)
        try:
            pong = await state.engine.check_health()
        except (EngineError, DeadlineExceeded, Refused) as error:
            return JSONResponse({"status": "bad", "reason": str(error)}, 503)
        return JSONResponse({"status": "ok", **msgspec.structs.asdict(pong)})

    @app.get("/ready")
    async def ready() -> Response:
        """200 once requests are taken; 503 while loading, shutting down or broken."""
        try:
            engine = state.ready_engine()
        except Refused as error:
            return JSONResponse({"ready": False, "reason": str(error)}, 503)
        if engine.death is not None:
            return JSONResponse({"ready": False, "reason": engine.death}, 503)
        return JSONResponse({"ready": True})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/v1/models")
    async def models() -> Response:
        facts = state.engine.facts if state.engine is not None else None
        cards = [
            {
                "id": name,
                "object": "model",
                "created": state.created,
                "owned_by": "drumline",
                "root": facts.model if facts else None,
                "parent": None,
                "max_model_len": facts.limits.max_model_len if facts else None,
            }
            for name in state.model_names
        ]
        return JSONResponse({"object": "list", "data": cards})


def _add_generation_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        model = state.check_model(body.model)
        engine = state.ready_engine()
        prompts = body.prompts()
        if len(prompts) > PROMPTS_MAX:
            raise RequestError(
                f"{len(prompts)} prompts are more than {PROMPTS_MAX}", param="prompt"
            )
        params = body.params(engine.default_params)
        streams = []
        try:
            for prompt in prompts:
                given = Prompt(text=prompt) if isinstance(prompt, str) else Prompt(token_ids=prompt)
                streams.append(await _submit(engine, given, params, body.priority, explicit(body)))
            form = CompletionFormat(model, engine.tokenizer)
            if body.stream:
                chunks = _completion_chunks(form, body, params, streams, engine)
                return await _event_stream(chunks, streams, engine)
            outputs = await _gather(request, streams)
            return JSONResponse(form.body(outputs, body.echo, body.return_token_ids))
        except BaseException:
            for stream in streams:
                engine.release(stream)
            raise

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        model = state.check_model(body.model)
        engine = state.ready_engine()
        params = body.params(engine.default_params)
        prompt = Prompt(messages=tuple(message.rendered() for message in body.messages))
        stream = await _submit(engine, prompt, params, body.priority, explicit(body))
        try:
            form = ChatFormat(model, engine.tokenizer)
            if body.stream:
                chunks = _chat_chunks(form, body, params, stream)
                return await _event_stream(chunks, [stream], engine)
            (output,) = await _gather(request, [stream])
            return JSONResponse(form.body(output, body.return_token_ids))
        except BaseException:
            engine.release(stream)
            raise


def explicit(body: ChatBody | CompletionBody) -> int | None:
    """max_tokens if the client chose it: then it must fit, as OpenAI and vLLM have it."""
    limit = body.max_tokens
    return getattr(body, "max_completion_tokens", None) or limit


async def _submit(
    engine: AsyncEngine, prompt: Prompt, params: SamplingParams, priority: int, asked: int | None
) -> Stream:
    return await engine.submit(
        prompt, params, priority=priority, exact_max_tokens=asked is not None
    )


def _record(stream: Stream) -> RequestRecord:
    return RequestRecord.of(stream.submission)


async def _collect(stream: Stream, each: Callable[[OutputDelta], None]) -> RequestOutput:
    record = _record(stream)
    async for delta in stream:
        record.add(delta)
        each(delta)
    for sample in record.samples:
        if sample.finish_reason is FinishReason.ERROR:
            raise EngineError(sample.error or "the engine broke")
    return record.output()


async def _gather(request: Request, streams: list[Stream]) -> list[RequestOutput]:
    """All outputs, or nothing and every sample cancelled if the client hangs up first."""
    work = asyncio.gather(*(_collect(stream, lambda _: None) for stream in streams))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise HTTPException(499, "the client went away")
        return await work
    finally:
        gone.cancel()
        work.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _event_stream(
    chunks: AsyncIterator[dict[str, Any]], streams: list[Stream], engine: AsyncEngine
) -> Response:
    """Server-sent events. What is refused before the first chunk still gets its own status."""
    first = await anext(chunks)

    async def events() -> AsyncIterator[bytes]:
        try:
            yield _event(first)
            async for chunk in chunks:
                yield _event(chunk)
        except DrumlineError as error:
            body = error_response(error).body
            yield b"data: " + bytes(body) + b"\n\n"
        finally:
            for stream in streams:
                engine.release(stream)
        yield b"data: [DONE]\n\n"

    return StreamingResponse(
        events(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def _chat_chunks(
    form: ChatFormat, body: ChatBody, params: SamplingParams, stream: Stream
) -> AsyncIterator[dict[str, Any]]:
    record = _record(stream)
    index = {request.number: request.sample_index for request in stream.submission.requests}
    opened: set[int] = set()
    async for delta in stream:
        record.add(delta)
        if delta.finish_reason is FinishReason.ERROR:
            raise EngineError(delta.error or "the engine broke")
        sample = index[delta.number]
        if sample not in opened:
            opened.add(sample)
            yield form.opening(sample)
        if delta.text or delta.token_ids or delta.finish_reason is not None:
            yield form.chunk(sample, delta, params.logprobs is not None, body.return_token_ids)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield form.closing(record.output())


async def _completion_chunks(
    form: CompletionFormat,
    body: CompletionBody,
    params: SamplingParams,
    streams: list[Stream],
    engine: AsyncEngine,
) -> AsyncIterator[dict[str, Any]]:
    records = [_record(stream) for stream in streams]
    place = {
        request.number: (position, position * params.n + request.sample_index)
        for position, stream in enumerate(streams)
        for request in stream.submission.requests
    }
    offsets: dict[int, int] = {}
    async for delta in _merged(streams):
        position, choice = place[delta.number]
        records[position].add(delta)
        if delta.finish_reason is FinishReason.ERROR:
            raise EngineError(delta.error or "the engine broke")
        if choice not in offsets:
            offsets[choice] = 0
            if body.echo:
                text = echo_text(records[position].output(), engine.tokenizer)
                offsets[choice] = len(text)
                yield form.echo(choice, text)
        if delta.text or delta.token_ids or delta.finish_reason is not None:
            wants = params.logprobs is not None
            yield form.chunk(choice, delta, wants, offsets[choice], body.return_token_ids)
            offsets[choice] += len(delta.text)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield form.closing([record.output() for record in records])


async def _merged(streams: list[Stream]) -> AsyncIterator[OutputDelta]:
    """The deltas of several streams as they come."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield delta
        return
    queue: asyncio.Queue[OutputDelta | Exception | None] = asyncio.Queue()

    async def pump(stream: Stream) -> None:
        try:
            async for delta in stream:
                queue.put_nowait(delta)
            queue.put_nowait(None)
        except DrumlineError as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
