"""`AsyncEngine`: every stream ends exactly once, whoever leaves, however the engine goes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drumline.config import EngineConfig
from drumline.core.errors import (
    EngineDead,
    PromptTooLong,
    Refused,
    RequestError,
    UsageError,
)
from drumline.core.params import SamplingParams
from drumline.core.request import FinishReason
from drumline.engine.async_engine import AsyncEngine, Stream
from drumline.engine.intake import Prompt
from drumline.engine.outputs import OutputDelta

LENGTH = 4096
LONG = SamplingParams(temperature=0.0, max_tokens=LENGTH - 100, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = Prompt(token_ids=(5, 6, 7))


@pytest.fixture(scope="module")
def path(tiny_path: Callable[..., Path]) -> Path:
    return tiny_path(vocab=300, max_position_embeddings=LENGTH)


@asynccontextmanager
async def engine_on(path: Path, **settings: Any) -> AsyncIterator[AsyncEngine]:
    kwargs = {"model": str(path), "threads": 1, "max_num_seqs": 4, **settings}
    async with await AsyncEngine.start(EngineConfig.from_kwargs(**kwargs)) as engine:
        yield engine


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


async def read(stream: Stream) -> list[OutputDelta]:
    return [delta async for delta in stream]


def ends(deltas: list[OutputDelta]) -> list[FinishReason]:
    return [delta.finish_reason for delta in deltas if delta.finish_reason is not None]


async def until(what: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not await what():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.01)


async def idle(engine: AsyncEngine) -> bool:
    pong = await engine.check_health()
    return (pong.running, pong.waiting, pong.kv_usage) == (0, 0, 0.0)


def test_streams_side_by_side_and_who_leaves_early(path: Path) -> None:
    async def scenario() -> None:
        async with engine_on(path) as engine:
            streams = [
                await engine.submit(Prompt(token_ids=(5 + index, 6)), SHORT) for index in range(20)
            ]
            for deltas in await asyncio.gather(*(read(stream) for stream in streams)):
                assert ends(deltas) == [FinishReason.LENGTH]
                assert sum(len(delta.token_ids) for delta in deltas) == 8

            # leaving the loop cancels
            several = SamplingParams(n=3, max_tokens=3000, ignore_eos=True)
            stream = await engine.submit(PROMPT, several)
            async for _ in stream:
                break
            await until(lambda: idle(engine))

            # so does closing, before or within, once or twice
            unread = await engine.submit(PROMPT, LONG)
            unread.close()
            unread.close()
            await until(lambda: idle(engine))
            assert await read(unread) == []

            # and being cancelled from outside
            task = asyncio.create_task(read(await engine.submit(PROMPT, LONG)))
            await until(lambda: _running(engine, 1))
            task.cancel()
            await until(lambda: idle(engine))

            # a stream that nobody reads holds nobody up, and keeps what came
            waiting = await engine.submit(PROMPT, SHORT)
            await read(await engine.submit(PROMPT, SHORT))
            assert ends(await read(waiting)) == [FinishReason.LENGTH]

    run(scenario())


async def _running(engine: AsyncEngine, count: int) -> bool:
    return (await engine.check_health()).running >= count


def test_what_is_refused_leaves_nothing_behind(path: Path) -> None:
    async def scenario() -> None:
        async with engine_on(path, max_num_queued_reqs=2) as engine:
            for prompt in (Prompt(token_ids=(300,)), Prompt(text="a" * 60_000)):
                with pytest.raises(RequestError):
                    await engine.submit(prompt, SHORT)
            with pytest.raises(PromptTooLong):
                await engine.submit(Prompt(token_ids=(5,) * LENGTH), SHORT)
            with pytest.raises(RequestError, match="more than the engine holds"):
                await engine.submit(PROMPT, SamplingParams(n=7))
            streams = [await engine.submit(PROMPT, LONG) for _ in range(6)]
            with pytest.raises(Refused, match="max_num_queued_reqs=2"):
                await engine.submit(PROMPT, SHORT)
            for stream in streams:
                stream.close()
            await until(lambda: idle(engine))
            assert ends(await read(await engine.submit(PROMPT, SHORT))) == [FinishReason.LENGTH]
            await until(lambda: idle(engine))

    run(scenario())


def test_closing_ends_each_stream_exactly_once(path: Path) -> None:
    async def scenario() -> None:
        async with engine_on(path) as engine:
            params = SamplingParams(n=2, max_tokens=3000, ignore_eos=True)
            tasks = [
                asyncio.create_task(read(await engine.submit(PROMPT, params))) for _ in range(4)
            ]
            await until(lambda: _running(engine, 4))
            pid = engine.process_id
            await asyncio.gather(engine.close(), engine.close())
            for deltas in await asyncio.gather(*tasks):
                assert ends(deltas) == [FinishReason.ABORT] * 2
            with pytest.raises(EngineDead):
                await engine.submit(PROMPT, SHORT)
            with pytest.raises(EngineDead):
                await engine.check_health()
            assert not Path(f"/proc/{pid}").exists(), "no zombie either"

    run(scenario())


def test_draining_lets_them_end(path: Path) -> None:
    async def scenario() -> None:
        async with engine_on(path) as engine:
            short = asyncio.create_task(
                read(await engine.submit(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True)))
            )
            await engine.drain(60.0)
            assert ends(await short) == [FinishReason.LENGTH]
            with pytest.raises(Refused, match="shutting down"):
                await engine.submit(PROMPT, SHORT)

    run(scenario())


def test_a_death_ends_each_stream_exactly_once_with_an_error(path: Path) -> None:
    """Also one of whose samples some have ended already."""

    async def scenario() -> None:
        async with engine_on(path) as engine:
            first = SamplingParams(n=2, max_tokens=2000, seed=3)  # some end by themselves
            streams = [await engine.submit(PROMPT, first), await engine.submit(PROMPT, LONG)]
            tasks = [asyncio.create_task(read(stream)) for stream in streams]
            await until(lambda: _running(engine, 1))
            os.kill(engine.process_id, signal.SIGKILL)
            began = time.monotonic()
            for stream, deltas in zip(streams, await asyncio.gather(*tasks), strict=True):
                assert len(ends(deltas)) == len(stream.submission.requests)
                broken = [d for d in deltas if d.finish_reason is FinishReason.ERROR]
                assert all("SIGKILL" in str(delta.error) for delta in broken)
            assert time.monotonic() - began < 3.0
            assert engine.dead.is_set()
            with pytest.raises(EngineDead, match="SIGKILL"):
                await engine.check_health()
            with pytest.raises(EngineDead, match="SIGKILL"):
                await engine.submit(PROMPT, SHORT)

    run(scenario())


def test_a_start_that_fails_says_why_and_leaves_no_process(path: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        missing = EngineConfig.from_kwargs(model=str(tmp_path / "nothing"))
        with pytest.raises(UsageError, match="nothing: no such file or folder"):
            await AsyncEngine.start(missing)
        template = EngineConfig.from_kwargs(
            model=str(path), threads=1, chat_template=str(tmp_path / "none.jinja")
        )
        with pytest.raises(UsageError, match=r"none\.jinja"):
            await AsyncEngine.start(template)

    before = _own_children()
    run(scenario())
    assert _own_children() == before


def _own_children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
