"""Routes that generate: completions and chat completions, whole or streamed.

What is wrong with a request is said by status before anything is sent. A client that goes away,
before its answer or within it, cancels what it asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from drumline.core.errors import EngineError, PromptTooLong, RequestError
from drumline.core.params import SamplingParams
from drumline.core.request import FinishReason
from drumline.engine.async_engine import AsyncEngine, Stream
from drumline.engine.intake import Prompt
from drumline.engine.outputs import OutputDelta, RequestOutput, RequestRecord
from drumline.server.errors import ApiError, describe, reply
from drumline.server.protocol import ChatBody, CompletionBody
from drumline.server.responses import ChatFormat, CompletionFormat
from drumline.server.state import ServerState

T = TypeVar("T")
Chunk = dict[str, Any]
CLIENT_GONE = 499
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def add_generation_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        model = state.check_model(body.model)
        engine = state.ready_engine()
        params = body.params(engine.default_params)
        prompts = [
            Prompt(text=prompt) if isinstance(prompt, str) else Prompt(token_ids=prompt)
            for prompt in body.prompts()
        ]
        form = CompletionFormat(model, engine.tokenizer, params.skip_special_tokens)
        work = Work(engine, request)
        async with work.submitted(prompts, params, body):
            if body.stream:
                return await work.stream(_completion_chunks(form, body, params, work))
            outputs = await work.outputs()
            shown = form.body(
                outputs,
                echo=body.echo,
                token_ids=body.return_token_ids,
                show_prompt_logprobs=body.prompt_logprobs is not None,
            )
            return reply(200, shown)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        model = state.check_model(body.model)
        engine = state.ready_engine()
        params = body.params(engine.default_params)
        prompt = Prompt(messages=tuple(message.rendered() for message in body.messages))
        form = ChatFormat(model, engine.tokenizer)
        work = Work(engine, request)
        async with work.submitted([prompt], params, body):
            if body.stream:
                return await work.stream(_chat_chunks(form, body, params, work))
            (output,) = await work.outputs()
            return reply(200, form.body(output, body.return_token_ids))


class Work:
    """What one HTTP request has running in the engine."""

    def __init__(self, engine: AsyncEngine, request: Request) -> None:
        self.engine = engine
        self.request = request
        self.streams: list[Stream] = []
        self.records: list[RequestRecord] = []
        self._streaming = False

    @contextlib.asynccontextmanager
    async def submitted(
        self, prompts: list[Prompt], params: SamplingParams, body: ChatBody | CompletionBody
    ) -> AsyncIterator[None]:
        """Everything is submitted or nothing; afterwards nothing runs that nobody reads."""
        limit = self.engine.facts.limits.samples_max
        if len(prompts) * params.n > limit:
            problem = f"{len(prompts)} prompts of n={params.n} are more samples than {limit}"
            raise RequestError(problem, param="n" if params.n > 1 else "prompt")
        exact = body.asked_max_tokens is not None
        try:
            for prompt in prompts:
                stream = await _submit(self.engine, prompt, params, body.priority, exact)
                self.streams.append(stream)
                self.records.append(RequestRecord.of(stream.submission))
            yield
        finally:
            if not self._streaming:
                self.close()

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    async def outputs(self) -> list[RequestOutput]:
        """All outputs; raises what went wrong with any of them."""
        await self._while_connected(self._gather())
        return [record.output() for record in self.records]

    async def _gather(self) -> None:
        async for _ in self.deltas():
            pass

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """(index of the prompt, delta) as they come, recorded already."""
        async for index, delta in _merged(self.streams):
            self.records[index].add(delta)
            if delta.finish_reason is FinishReason.ERROR:
                raise EngineError(delta.error or "the engine broke")
            yield index, delta

    async def stream(self, chunks: AsyncIterator[Chunk]) -> Response:
        """Server-sent events. What goes wrong before the first chunk still gets a status."""
        first = await self._while_connected(anext(chunks))
        self._streaming = True
        return StreamingResponse(
            self._events(first, chunks), media_type="text/event-stream", headers=HEADERS
        )

    async def _events(self, first: Chunk, chunks: AsyncIterator[Chunk]) -> AsyncIterator[bytes]:
        try:
            yield _event(first)
            async for chunk in chunks:
                yield _event(chunk)
        except Exception as error:
            _, body, _ = describe(error)
            yield _event(body)
        finally:
            self.close()
        yield b"data: [DONE]\n\n"

    async def _while_connected(self, work: Awaitable[T]) -> T:
        """The result, unless the client hangs up first; then the work is cancelled."""
        doing = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(self.request))
        try:
            await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise ApiError(CLIENT_GONE, "the client went away")
            return await doing
        finally:
            gone.cancel()
            doing.cancel()


async def _submit(
    engine: AsyncEngine, prompt: Prompt, params: SamplingParams, priority: int, exact: bool
) -> Stream:
    try:
        return await engine.submit(prompt, params, priority=priority, exact_max_tokens=exact)
    except RequestError as error:
        if error.param != "prompt_token_ids":
            raise
        kind = PromptTooLong if isinstance(error, PromptTooLong) else RequestError
        raise kind(error.problem, param="prompt") from None  # its name in this API


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: Chunk) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _merged(streams: list[Stream]) -> AsyncIterator[tuple[int, OutputDelta]]:
    """The deltas of several streams as they come, each with its stream's index."""
    queue: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: Stream) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((index, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
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


async def _chat_chunks(
    form: ChatFormat, body: ChatBody, params: SamplingParams, work: Work
) -> AsyncIterator[Chunk]:
    opened: set[int] = set()
    async for _, delta in work.deltas():
        sample = work.records[0].sample(delta.number)
        if sample.index not in opened:
            opened.add(sample.index)
            yield _with_usage(form.opening(sample.index), body)
        if _shows(delta):
            wants = params.logprobs is not None
            yield _with_usage(form.chunk(sample, delta, wants, body.return_token_ids), body)
    if body.wants_usage:
        yield form.closing([record.output() for record in work.records])


async def _completion_chunks(
    form: CompletionFormat, body: CompletionBody, params: SamplingParams, work: Work
) -> AsyncIterator[Chunk]:
    offsets: dict[int, int | None] = {}
    wants = params.logprobs is not None
    async for index, delta in work.deltas():
        if not _shows(delta):
            continue
        record = work.records[index]
        sample = record.sample(delta.number)
        choice = index * params.n + sample.index
        if choice not in offsets:
            offset = 0
            if body.echo:
                echoed, offset = form.echo(choice, record.output(), sample, wants)
                yield _with_usage(echoed, body)
            offsets[choice] = offset if wants else None
        chunk, offsets[choice] = form.chunk(
            choice, sample, delta, offsets[choice], body.return_token_ids
        )
        yield _with_usage(chunk, body)
    if body.wants_usage:
        yield form.closing([record.output() for record in work.records])


def _shows(delta: OutputDelta) -> bool:
    return bool(delta.text or delta.token_ids or delta.finish_reason is not None)


def _with_usage(chunk: Chunk, body: ChatBody | CompletionBody) -> Chunk:
    """Where usage comes at the end, every other chunk says that it is not there yet."""
    return {**chunk, "usage": None} if body.wants_usage else chunk
