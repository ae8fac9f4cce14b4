"""A server as operators and bad luck meet it: stopped, killed, frozen, started wrongly.

However it ends, no process, port or temporary file of it is left.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.running import Server, alive, children, command, environment, wait_until
from server.test_clients import connect

COMPLETION = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "temperature": 0.0}


def free_port(url: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


def assert_nothing_left(server: Server, before: set[str]) -> None:
    assert not alive(server.engine_pid)
    assert free_port(server.url)
    assert {name for name in os.listdir(tempfile.gettempdir()) if "drumline" in name} <= before


def temporary() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if "drumline" in name}


def ask(server: Server, stream: bool) -> tuple[int, str]:
    """(status, everything that came) of a long request, read to its end."""
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        try:
            response = client.post(COMPLETION, json={**LONG, "stream": stream})
        except httpx.HTTPError as error:
            return 0, repr(error)
        return response.status_code, response.text


def test_a_signal_stops_it_and_ends_every_request(long_tiny: Path) -> None:
    before = temporary()
    with Server(str(long_tiny)) as server, ThreadPoolExecutor(4) as pool:
        # One more does not read: by now its answer fills every buffer on the way.
        stalled = connect(server, COMPLETION, {**LONG, "n": 8, "logprobs": 20, "stream": True})
        wait_until(lambda: server.health()["step"] > 250, 60.0)
        asked = [pool.submit(ask, server, stream) for stream in (False, True, True)]
        server.wait_running(11)
        # What a terminal and a service manager do: the whole group gets it.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait(10.0) == 0
        for answer in asked:
            status, text = answer.result(10.0)
            assert status == 200
            assert '"abort"' in text
        stalled.close()
        assert_nothing_left(server, before)
        assert "Traceback" not in server.log


def test_what_runs_may_finish_until_a_second_signal(long_tiny: Path) -> None:
    with (
        Server(str(long_tiny), "--shutdown-timeout", "60") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        short = pool.submit(
            httpx.post, f"{server.url}{COMPLETION}", json={**LONG, "max_tokens": 2000}, timeout=60
        )
        long = pool.submit(ask, server, True)
        server.wait_running(2)
        server.signal(signal.SIGTERM)

        def unready() -> bool:
            return server.client.get("/ready").status_code == 503

        wait_until(unready)
        late = server.client.post(COMPLETION, json={"prompt": "a"})
        assert late.status_code == 503
        assert "shutting down" in late.json()["error"]["message"]
        answer = short.result(60.0).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert server.process.poll() is None, "the long one still runs"
        server.signal(signal.SIGTERM)
        assert server.wait(10.0) == 0
        assert '"abort"' in long.result(10.0)[1]


def test_the_death_of_the_engine_is_told_to_everybody(long_tiny: Path) -> None:
    """Open requests get an error at once, health turns bad, and the server ends with 1."""
    before = temporary()
    with Server(str(long_tiny)) as server, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, stream) for stream in (False, True)]
        server.wait_running(2)
        began = time.monotonic()
        os.kill(server.engine_pid, signal.SIGKILL)
        (status, whole), (_, streamed) = (answer.result(10.0) for answer in asked)
        assert time.monotonic() - began < 5.0
        assert status == 500
        assert "SIGKILL" in whole
        last = [line for line in streamed.splitlines() if line][-2:]
        assert "SIGKILL" in last[0]
        assert last[1] == "data: [DONE]"
        for path in ("/health", "/ready"):
            try:
                assert server.client.get(path).status_code == 503
            except httpx.TransportError:
                continue  # it has ended already
        assert server.wait(10.0) == 1
        assert_nothing_left(server, before)
        assert "Traceback" not in server.log
        assert server.lines[-1].startswith("drumline serve: failed: the engine's process")


def test_a_frozen_engine_is_named_within_the_deadline_and_ended(long_tiny: Path) -> None:
    arguments = ("--step-timeout-seconds", "0.5", "--max-num-batched-tokens", "16")
    with Server(str(long_tiny), *arguments) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, False)
        server.wait_running()
        os.kill(server.engine_pid, signal.SIGSTOP)
        began = time.monotonic()
        status, text = asked.result(20.0)
        assert time.monotonic() - began < 5.0
        assert status == 500
        assert f"watchdog: a step of the engine's process {server.engine_pid}" in text
        assert server.wait(10.0) == 1
        assert not alive(server.engine_pid)


def test_a_watchdog_that_observes_reports_and_waits(long_tiny: Path) -> None:
    arguments = ("--step-timeout-seconds", "0.5", "--watchdog", "observe")
    with Server(str(long_tiny), *arguments) as server, ThreadPoolExecutor(1) as pool:
        body = {**LONG, "max_tokens": 5000}
        asked = pool.submit(httpx.post, f"{server.url}{COMPLETION}", json=body, timeout=60)
        server.wait_running()
        os.kill(server.engine_pid, signal.SIGSTOP)

        def bad() -> bool:
            return server.client.get("/health").status_code == 503

        def good() -> bool:
            return server.client.get("/health").status_code == 200

        wait_until(bad, 10.0)
        assert "nothing after" in server.health()["reason"]
        wait_until(lambda: "watchdog: a step" in server.log, 10.0)
        assert not asked.done()
        os.kill(server.engine_pid, signal.SIGCONT)
        wait_until(good, 10.0)
        assert asked.result(60.0).json()["usage"]["completion_tokens"] == 5000


def test_the_engine_does_not_outlive_its_server(long_tiny: Path) -> None:
    before = temporary()
    with Server(str(long_tiny)) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(ask, server, True)
        server.wait_running()
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not alive(server.engine_pid), 5.0)
        assert_nothing_left(server, before)


def test_an_idle_server_rests_and_raises_no_alarm(long_tiny: Path) -> None:
    """Neither in idle nor during a prefill of thousands of tokens with a tight deadline."""
    arguments = ("--step-timeout-seconds", "0.2", "--max-num-batched-tokens", "64")
    arguments += ("--shutdown-timeout", "600")
    with Server(str(long_tiny), *arguments) as server:
        prompt = [5 + index % 200 for index in range(4000)]
        answer = server.client.post(COMPLETION, json={"prompt": prompt, "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
        server.wait_idle()
        used = cpu_seconds(server.engine_pid)
        front = cpu_seconds(server.process.pid)
        began = time.monotonic()

        def a_second_later() -> bool:
            return time.monotonic() - began > 1.0

        wait_until(a_second_later)
        assert cpu_seconds(server.engine_pid) == used
        assert cpu_seconds(server.process.pid) - front < 0.1
        assert "watchdog:" not in server.log
        assert server.health()["status"] == "ok"
        # and with nothing to drain it does not wait for its timeout
        server.signal(signal.SIGTERM)
        assert server.wait(10.0) == 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- starts that go wrong


def test_a_broken_model_is_one_line_and_exit_code_2(long_tiny: Path, tmp_path: Path) -> None:
    """The engine's process finds it; the server passes it on."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in long_tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    server = Server(str(broken), wait_ready=False)
    assert server.wait(60.0) == 2
    assert server.lines[-1].startswith("drumline serve: error: ")
    assert "model.safetensors" in server.lines[-1]
    assert "Traceback" not in server.log
    assert free_port(server.url)


def test_a_port_in_use_is_said_before_anything_loads(long_tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        began = time.monotonic()
        run = subprocess.run(
            command("serve", str(long_tiny), "--port", port),
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(),
        )
        assert time.monotonic() - began < 10.0
    assert run.returncode == 2
    assert re.fullmatch(rf"drumline serve: error: port={port}: .*in use\n", run.stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_ends_it_at_once(long_tiny: Path, number: int) -> None:
    with Server(str(long_tiny), wait_ready=False) as server:
        assert server.client.get("/ready").status_code == 503
        health = server.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        early = server.client.post(COMPLETION, json={"prompt": "a"})
        assert early.status_code == 503
        assert "loading" in early.json()["error"]["message"]
        (engine,) = children(server.process.pid)
        server.signal(number)
        assert server.wait(10.0) == 0
        assert not alive(engine)
        assert "Traceback" not in server.log


def test_a_start_that_takes_too_long_is_given_up(long_tiny: Path) -> None:
    """The process is stopped while it loads, as a dead disk would stop it."""
    server = Server(str(long_tiny), "--startup-timeout-seconds", "2", wait_ready=False)
    (engine,) = children(server.process.pid)
    os.kill(engine, signal.SIGSTOP)
    assert server.wait(20.0) == 1
    assert "engine start-up: nothing after 2 s" in server.lines[-1]
    assert not alive(engine)
