"""Two machines: node 0 with the front end, node 1 headless; on one host, and in two namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from drumline.config import EngineConfig
from drumline.core.errors import ConfigError
from drumline.engine.core import EngineCore
from drumline.engine.ranks import free_port
from drumline.fleet.nodes import Nodes, nodes_of
from drumline.models import tiny_drafts
from parallel_engine.fleet import Job, alive, config, descendants, run, until

TinyPath = Callable[..., Path]
SECONDS = 120
JOBS = [Job((3 + index, 5, 2), 5 + index) for index in range(6)]
FLAGS = ["-dp", "2", "-ep", "--ops-backend", "reference", "--threads", "1", "--nnodes", "2"]
FLAGS += ["--max-model-len", "64", "-sc", '{"method": "mtp", "num_speculative_tokens": 3}']


@pytest.fixture(scope="module")
def moe(tiny_path: TinyPath) -> Path:
    path = tiny_path("qwen3_moe", 30)
    tiny_drafts.add_mtp(path, 0)
    return path


@pytest.fixture(scope="module")
def truth(moe: Path) -> list[tuple[int, ...]]:
    return [out.token_ids for out in run(EngineCore.load(config(moe)), JOBS)]


def start(prefix: Sequence[str], *arguments: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "drumline.cli.main", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def generate(
    moe: Path, folder: Path, address: str, prefixes: Sequence[Sequence[str]] = ((), ())
) -> list[dict[str, Any]]:
    """Both nodes, from their start to their end; the lines that node 0 printed."""
    fields = {"temperature": 0, "ignore_eos": True}
    prompts = folder / "prompts.jsonl"
    lines = [
        {"prompt_token_ids": job.prompt, "max_tokens": job.max_tokens, **fields} for job in JOBS
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    meet = ["--master-addr", address, "--master-port", str(free_port())]
    own = ["--model", str(moe), *FLAGS, *meet]
    other = start(prefixes[1], "serve", *own, "--headless", "--node-rank", "1")
    first = start(prefixes[0], "generate", *own, "--prompts", str(prompts), "--json")
    try:
        output, errors = first.communicate(timeout=SECONDS)
        assert first.returncode == 0, errors
        _, said = other.communicate(timeout=30)
        assert other.returncode == 0, said
    finally:
        for process in (first, other):
            process.kill()
    return [json.loads(line) for line in output.splitlines()]


def check(lines: list[dict[str, Any]], truth: list[tuple[int, ...]]) -> None:
    *samples, last = lines
    assert [tuple(sample["token_ids"]) for sample in samples] == truth
    assert {sample["replica"] for sample in samples} == {0, 1}
    assert "3" in last["summary"]["draft_length_histogram"]


def test_two_nodes_of_one_host_give_the_tokens_of_one_rank(
    moe: Path, truth: list[tuple[int, ...]], tmp_path: Path
) -> None:
    check(generate(moe, tmp_path, "127.0.0.1"), truth)


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a pair of interfaces."""
    names = tuple(f"drumline-{os.getpid()}-{end}" for end in "ab")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)

    try:
        for name in names:
            ip("netns", "add", name)
        peer = ("peer", "name", "dl1", "netns", names[1])
        ip("link", "add", "dl0", "netns", names[0], "type", "veth", *peer)
        for index, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.31.{index + 1}/24", "dev", f"dl{index}")
            ip("-n", name, "link", "set", f"dl{index}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=10)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2")
def test_two_network_namespaces_give_the_tokens_of_one_rank(
    moe: Path, truth: list[tuple[int, ...]], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(namespaces())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr!r:.100}")
        prefixes = [["ip", "netns", "exec", name] for name in names]
        check(generate(moe, tmp_path, "10.77.31.1", prefixes), truth)


def test_a_lost_machine_is_named_and_the_other_leaves(moe: Path) -> None:
    meet = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    own = ["--model", str(moe), *FLAGS, *meet, "--step-timeout-seconds", "2"]
    other = start((), "serve", *own, "--headless", "--node-rank", "1")
    prompts = ["--prompt", "a", "b", "--max-tokens", "50000", "--ignore-eos", "--json"]
    first = start((), "generate", *own, "--max-num-seqs", "2", *prompts)
    try:
        until(lambda: len(descendants(other.pid)) == 2, "no ranks on node 1", SECONDS)
        below = descendants(other.pid) | descendants(first.pid)
        os.killpg(other.pid, signal.SIGKILL)
        _, errors = first.communicate(timeout=SECONDS)
    finally:
        for process in (first, other):
            process.kill()
            process.wait(10)
    assert first.returncode == 1
    assert "rank 1 lost" in errors
    assert "node 1, where it was, is gone" in errors
    for process_id in below:
        until(lambda one=process_id: not alive(one), f"process {process_id} is left")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"nnodes": 2}, "data_parallel_size_local|nnodes=2: 2 machines cannot hold 1 replicas"),
        ({"nnodes": 2, "data_parallel_size": 2}, "master_addr=None: several machines need"),
        ({"headless": True}, "headless=True: node 0 has the front end"),
        ({"node_rank": 1}, "node_rank=1: the last of 1 machines is 0"),
        (
            {"nnodes": 2, "data_parallel_size": 2, "node_rank": 1, "master_addr": "h"},
            "headless=False: node 0 has",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 3},
            "data_parallel_size_local=3: 1 machines cannot hold 4",
        ),
        (
            {
                "nnodes": 2,
                "data_parallel_size": 2,
                "master_addr": "h",
                "data_parallel_address": "i",
            },
            "data_parallel_address='i': master_addr is h",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        nodes_of(EngineConfig.from_kwargs(**fields))


def test_machines_follow_from_local_replicas() -> None:
    asked = EngineConfig.from_kwargs(
        data_parallel_size=4,
        tensor_parallel_size=2,
        data_parallel_size_local=2,
        data_parallel_address="h",
        node_rank=1,
        headless=True,
    )
    found = nodes_of(asked)
    assert found == Nodes(2, 1, 2, 2, "h", 29501, 29502)
    assert (found.ranks(1), found.node_of(3), found.node_of(4)) == (range(4, 8), 0, 1)
