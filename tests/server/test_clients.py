"""Clients that leave, stall or flood: their requests end, and nobody else's do."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from server.running import Server, wait_until

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "temperature": 0.0}
LONG_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8000,
    "ignore_eos": True,
}


def connect(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own, of which nothing has been read."""
    raw = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)
    content = json.dumps(body).encode()
    raw.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return raw


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_cancels_its_request(server: Server, path: str, stream: bool) -> None:
    body = {**(LONG_CHAT if "chat" in path else LONG), "stream": stream, "n": 2}
    raw = connect(server, path, body)
    server.wait_running(2)
    if stream:
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
    raw.close()
    server.wait_idle(5.0)


def test_a_client_that_leaves_before_its_turn_cancels_its_request(server: Server) -> None:
    """17 of 16 seats: the last waits, leaves, and never runs."""
    first = connect(server, "/v1/completions", {**LONG, "n": 16})
    server.wait_running(16)
    for stream in (False, True):
        last = connect(server, "/v1/completions", {**LONG, "stream": stream})

        def waits() -> bool:
            return bool(server.health()["waiting"] == 1)

        def gone() -> bool:
            return bool(server.health()["waiting"] == 0)

        wait_until(waits)
        last.close()
        wait_until(gone, 5.0)
        assert server.health()["running"] == 16
    first.close()
    server.wait_idle(5.0)


def test_the_official_client_may_break_off_a_stream(server: Server, client: openai.OpenAI) -> None:
    with client.completions.create(
        model="tiny", prompt="a", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    server.wait_idle(5.0)


def test_a_client_that_does_not_read_holds_nobody_up(server: Server) -> None:
    raw = connect(server, "/v1/completions", {**LONG, "stream": True, "n": 4, "logprobs": 5})
    server.wait_running(4)
    began = time.monotonic()
    answer = server.client.post("/v1/completions", json={"prompt": "b", "max_tokens": 32})
    assert answer.json()["usage"]["completion_tokens"] == 32
    assert time.monotonic() - began < 10.0
    raw.close()
    server.wait_idle(5.0)


def test_half_a_request_costs_nothing(server: Server) -> None:
    host = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    halves = [socket.create_connection(host) for _ in range(50)]
    for raw in halves:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
    assert server.client.post("/v1/completions", json={"prompt": "b"}).status_code == 200
    for raw in halves:
        raw.close()
    rubbish = socket.create_connection(host)
    rubbish.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
    assert rubbish.recv(100).startswith(b"HTTP/1.1 400")
    rubbish.close()


def test_health_is_asked_by_many_at_once(server: Server) -> None:
    with httpx.Client(base_url=server.url) as other:
        raw = connect(server, "/v1/completions", LONG)
        server.wait_running()
        for _ in range(20):
            assert other.get("/health").status_code == 200
        raw.close()
    server.wait_idle(5.0)
