"""`drumline serve -dp 2`: answers from both replicas, health that tells of a lost rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from drumline.engine.core import EngineCore
from drumline.models import tiny_drafts
from parallel_engine.fleet import Job, alive, config, descendants, run, until
from server.running import Server

TinyPath = Callable[..., Path]
JOBS = [Job((3 + index, 5, 2), 6) for index in range(6)]
FLAGS = ("-dp", "2", "-ep", "-sc", '{"method": "mtp", "num_speculative_tokens": 2}')


def ask(url: str, job: Job) -> str:
    fields = {"max_tokens": job.max_tokens, "temperature": 0, "ignore_eos": True}
    body = {"model": "tiny", "prompt": list(job.prompt), **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_server_of_two_replicas_answers_and_dies_with_a_name(tiny_path: TinyPath) -> None:
    path = tiny_path("qwen3_moe", 12)
    tiny_drafts.add_mtp(path, 0)
    truth = [out.text for out in run(EngineCore.load(config(path)), JOBS)]
    flags = ("--ops-backend", "reference", "--served-model-name", "tiny", *FLAGS)
    with Server(str(path), *flags) as server:
        below = descendants(server.process.pid)
        assert len(below) == 4  # the engine, its nursery, two ranks
        with ThreadPoolExecutor(len(JOBS)) as pool:
            assert list(pool.map(lambda job: ask(server.url, job), JOBS)) == truth
        assert httpx.get(f"{server.url}/health", timeout=20).json()["status"] == "ok"
        (nursery,) = {one for one in descendants(server.engine_pid) if descendants(one)}
        rank = max(descendants(nursery))
        os.kill(rank, signal.SIGKILL)
        until(
            lambda: any("ended by signal 9" in line for line in server.lines),
            f"nothing is said of it: {server.lines}",
        )
        assert any("rank 1 lost" in line for line in server.lines)
        for process in below:
            until(lambda process=process: not alive(process), f"process {process} is left")  # type: ignore[misc]
