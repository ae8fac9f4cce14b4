"""What is asked wrongly gets OpenAI's error object: its status, one line, the parameter."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.conftest import LENGTH
from server.running import Server, wait_until

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "hi"}

# (path, body, status, param, words in the message)
WRONG: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (COMPLETION, {}, 400, "prompt", "is needed"),
    (COMPLETION, {"prompt": "a", "temprature": 1}, 400, "temprature", "'temperature'"),
    (COMPLETION, {"prompt": "a", "x" * 1000: 1}, 400, "x" * 64, "unknown parameter"),
    (COMPLETION, {"prompt": "a", "\ud800": 1}, 400, "\\ud800", "unknown parameter"),
    (COMPLETION, {"prompt": "a", "best_of": 4}, 400, "best_of", "not in this release"),
    (COMPLETION, {"prompt": "a", "suffix": "b"}, 400, "suffix", "not in this release"),
    (COMPLETION, {"prompt": "a", "model": "gpt-9"}, 404, "model", "'gpt-9' is not served"),
    (COMPLETION, {"prompt": "a", "model": "\ud800"}, 404, "model", "is not served"),
    (COMPLETION, {"prompt": "a", "temperature": -1}, 400, "temperature", "-1"),
    (COMPLETION, {"prompt": "a", "temperature": "hot"}, 400, "temperature", "'hot'"),
    (COMPLETION, {"prompt": "a", "temperature": float("nan")}, 400, "temperature", "nan"),
    (COMPLETION, {"prompt": "a", "temperature": 1e400}, 400, "temperature", "inf"),
    (COMPLETION, {"prompt": "a", "top_p": 0}, 400, "top_p", "out of range"),
    (COMPLETION, {"prompt": "a", "n": 0}, 400, "n", "1 to"),
    (COMPLETION, {"prompt": "a", "n": 10**6}, 400, "n", "out of range"),
    (COMPLETION, {"prompt": "a", "n": True}, 400, "n", "integer"),
    (COMPLETION, {"prompt": "a", "seed": 2**70}, 400, "seed", "64-bit"),
    (COMPLETION, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "allowed: 1 to"),
    (COMPLETION, {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens", "1.5"),
    (COMPLETION, {"prompt": "a", "max_tokens": LENGTH}, 400, "max_tokens", "max_model_len"),
    (COMPLETION, {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "9"),
    (COMPLETION, {"prompt": "a", "logprobs": 21}, 400, "logprobs", "max_logprobs=20"),
    (COMPLETION, {"prompt": "a", "logprobs": True}, 400, "logprobs", "integer"),
    (
        COMPLETION,
        {"prompt": "a", "prompt_logprobs": 99, "stream": False},
        400,
        "prompt_logprobs",
        "max_logprobs",
    ),
    (
        COMPLETION,
        {"prompt": "a", "prompt_logprobs": 1, "stream": True},
        400,
        "prompt_logprobs",
        "streamed",
    ),
    (COMPLETION, {"prompt": "a", "stop": 5}, 400, "stop", "list of strings"),
    (COMPLETION, {"prompt": "a", "stop": [""]}, 400, "stop", "empty"),
    (COMPLETION, {"prompt": "a", "stop": "\udfff"}, 400, "stop", "surrogate"),
    (COMPLETION, {"prompt": "a", "stop": ["b"] * 65}, 400, "stop", "at most 64"),
    (COMPLETION, {"prompt": "a", "bad_words": ["\udfff"]}, 400, "bad_words", "surrogate"),
    (COMPLETION, {"prompt": "a", "stop_token_ids": [300]}, 400, "stop_token_ids", "300"),
    (COMPLETION, {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids", "empty"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias", "-100 to 100"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "token id"),
    (COMPLETION, {"prompt": "a", "logit_bias": 3}, 400, "logit_bias", "map"),
    (COMPLETION, {"prompt": "a", "stream": "yes"}, 400, "stream", "boolean"),
    (COMPLETION, {"prompt": "a", "priority": 2**70}, 400, "priority", "64-bit"),
    (
        COMPLETION,
        {"prompt": "a", "stream": False, "stream_options": {}},
        400,
        "stream_options",
        "true",
    ),
    (
        COMPLETION,
        {"prompt": "a", "stream": True, "stream_options": {"usage": True}},
        400,
        "stream_options.usage",
        "unknown parameter",
    ),
    (COMPLETION, {"prompt": None}, 400, "prompt", "must be a text"),
    (COMPLETION, {"prompt": []}, 400, "prompt", "nothing to complete"),
    (COMPLETION, {"prompt": [1, "a"]}, 400, "prompt", "not a token id"),
    (COMPLETION, {"prompt": ["a", 1]}, 400, "prompt", "all prompts"),
    (COMPLETION, {"prompt": ["a", [1]]}, 400, "prompt", "all prompts"),
    (COMPLETION, {"prompt": [[]]}, 400, "prompt", "no tokens"),
    (COMPLETION, {"prompt": [True]}, 400, "prompt", "not a token id"),
    (COMPLETION, {"prompt": [300]}, 400, "prompt", "vocabulary of 300"),
    (COMPLETION, {"prompt": [-1]}, 400, "prompt", "vocabulary of 300"),
    (COMPLETION, {"prompt": [10**30]}, 400, "prompt", "vocabulary of 300"),
    (COMPLETION, {"prompt": ["a"] * 257}, 400, "prompt", "at most 256"),
    (COMPLETION, {"prompt": ["a"] * 200, "n": 128}, 400, "n", "more samples"),
    (COMPLETION, {"prompt": "\ud800"}, 400, "prompt", "surrogate"),
    (COMPLETION, {"prompt": [5] * LENGTH}, 400, "prompt", "max_model_len"),
    (COMPLETION, {"prompt": "a " * LENGTH}, 400, "prompt", "max_model_len"),
    (COMPLETION, {"prompt": "a" * (256 * LENGTH + 1)}, 400, "prompt", "max_model_len"),
    (CHAT, {}, 400, "messages", "is needed"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    (CHAT, {"messages": "hi"}, 400, "messages", "list"),
    (CHAT, {"messages": ["hi"]}, 400, "messages.0", "object"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages.0.role", "is needed"),
    (CHAT, {"messages": [{"role": "boss", "content": "hi"}]}, 400, "messages.0.role", "'boss'"),
    (CHAT, {"messages": [{"role": "tool", "content": "hi"}]}, 400, "messages.0.role", "'tool'"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "needs content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", "string"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content",
        "text",
    ),
    (CHAT, {"messages": [{**USER, "weight": 1}]}, 400, "messages.0.weight", "unknown"),
    (CHAT, {"messages": [USER] * 5000}, 400, "messages", "4096"),
    (CHAT, {"messages": [{**USER, "content": "\ud800"}]}, 400, "messages", "surrogate"),
    (CHAT, {"messages": [{**USER, "content": "a " * LENGTH}]}, 400, "messages", "max_model_len"),
    (CHAT, {"messages": [USER], "tools": [{}]}, 400, "tools", "not in this release"),
    (CHAT, {"messages": [USER], "top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    (
        CHAT,
        {"messages": [USER], "logprobs": True, "top_logprobs": 21},
        400,
        "logprobs",
        "max_logprobs",
    ),
    (
        CHAT,
        {"messages": [USER], "max_tokens": 1, "max_completion_tokens": 1},
        400,
        "max_completion_tokens",
        "another name",
    ),
    (
        CHAT,
        {"messages": [USER], "response_format": {"type": "json_object"}},
        400,
        "response_format.type",
        "json_object",
    ),
    (CHAT, {"messages": [USER], "echo": True}, 400, "echo", "unknown parameter"),
]


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json", response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) <= 500
    return error


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), WRONG)
def test_wrong_bodies_are_refused_by_name(
    server: Server, path: str, body: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    content = json.dumps(body).replace("Infinity", "1e400")
    headers = {"Content-Type": "application/json"}
    for stream in ("", ', "stream": true') if "stream" not in body and body else ("",):
        sent = content[:-1] + stream + "}"
        response = server.client.post(path, content=sent, headers=headers)
        error = error_of(response)
        assert (response.status_code, error["param"]) == (status, param), error
        assert words in error["message"]


MALFORMED = {
    "empty": (b"", "is needed"),
    "cut short": (b'{"prompt": "a', "not JSON"),
    "not an object": (b"[1, 2]", "object"),
    "a word": (b"hello", "not JSON"),
    "not UTF-8": (b'{"prompt": "\xff\xfe\xfa"}', "not JSON"),
    "deep": (b"[" * 200_000, "not JSON"),
    "deep in a field": (b'{"prompt": ' + b"[" * 90 + b"]" * 90 + b"}", "prompt"),
    "a huge number": (b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}", "not JSON"),
    "nul": (b"\0\0\0", "not JSON"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bodies_are_refused(server: Server, name: str) -> None:
    content, words = MALFORMED[name]
    headers = {"Content-Type": "application/json"}
    response = server.client.post(COMPLETION, content=content, headers=headers)
    assert response.status_code == 400, response.text
    assert words in error_of(response)["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", **{f"x{index}": 1 for index in range(300_000)}},
        {"prompt": ["a"] * 500_000 + [1]},
        {"prompt": [1] * 500_000 + ["a"]},
        {"prompt": "a", "stop": [1] * 500_000},
        {"prompt": "a", "allowed_token_ids": ["a"] * 500_000},
        {"prompt": "a", "logit_bias": {f"x{index}": 1 for index in range(300_000)}},
    ],
    ids=["unknown fields", "texts", "ids", "stops", "allowed ids", "bias"],
)
def test_a_million_mistakes_cost_no_more_than_one(server: Server, body: dict[str, Any]) -> None:
    content = json.dumps(body)
    began = time.monotonic()
    headers = {"Content-Type": "application/json"}
    response = server.client.post(COMPLETION, content=content, headers=headers)
    assert time.monotonic() - began < 5.0
    assert response.status_code == 400
    error_of(response)


def test_other_paths_methods_and_kinds_of_content(server: Server) -> None:
    assert error_of(server.client.get("/v1/nothing"))["type"] == "not_found_error"
    assert error_of(server.client.get("/v1/models/nothing"))["code"] == "model_not_found"
    assert server.client.get(COMPLETION).status_code == 405
    form = server.client.post(COMPLETION, data={"prompt": "a"})
    assert form.status_code == 415
    assert "Content-Type: application/json" in error_of(form)["message"]
    assert server.client.post(COMPLETION, content=b'{"prompt": "a"}').status_code == 415


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a " * LENGTH}],
            stream=True,
        )
    assert long.value.code == "context_length_exceeded"


def test_nothing_of_it_left_a_trace(server: Server) -> None:
    server.wait_idle()
    assert "Traceback" not in server.log


# ---- limits: a server that is small, and guarded by keys


@pytest.fixture(scope="module")
def guarded(long_tiny: Path) -> Iterator[Server]:
    arguments = ("--max-num-seqs", "2", "--max-num-queued-reqs", "1", "--max-body-bytes", "64K")
    origins = ("--allowed-origins", "https://app.example")
    keys = {"DRUMLINE_API_KEY": "first,second"}
    with Server(str(long_tiny), *arguments, *origins, **keys) as running:
        running.client.headers["Authorization"] = "Bearer second"
        yield running


def test_a_key_is_needed(guarded: Server) -> None:
    for given in ("", "Bearer", "Bearer wrong", "second", "Basic second", "Bearer secon"):
        headers = {"Authorization": given}
        response = guarded.client.post(COMPLETION, json={"prompt": "a"}, headers=headers)
        assert response.status_code == 401, given
        assert error_of(response)["code"] == "invalid_api_key"
        assert guarded.client.get("/v1/models", headers=headers).status_code == 401
        assert guarded.client.get("/health", headers=headers).status_code == 200
    for given in ("Bearer first", "bearer  second"):
        headers = {"Authorization": given}
        assert guarded.client.get("/v1/models", headers=headers).status_code == 200
    assert "first" not in guarded.log


def test_browsers_of_named_origins_may_read(guarded: Server) -> None:
    for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        preflight = guarded.client.options(COMPLETION, headers=asked)
        assert ("access-control-allow-origin" in preflight.headers) is allowed
        answer = guarded.client.get("/v1/models", headers={"Origin": origin})
        assert ("access-control-allow-origin" in answer.headers) is allowed


def test_a_body_over_the_limit_is_413(guarded: Server) -> None:
    body = json.dumps({"prompt": "a" * 70_000}).encode()
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
    headers = {"Content-Type": "application/json"}
    for content in (body, iter(pieces)):
        response = guarded.client.post(COMPLETION, content=content, headers=headers)
        assert response.status_code == 413
        assert "max_body_bytes=65536" in error_of(response)["message"]
    assert guarded.client.post(COMPLETION, json={"prompt": "a"}).status_code == 200


def test_a_full_queue_is_503_at_once(guarded: Server) -> None:
    """Two run, one waits; the fourth is told so, and when to come again."""
    url = f"{guarded.url}{COMPLETION}"
    long = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    headers = dict(guarded.client.headers)
    with httpx.Client(headers=headers, timeout=60.0) as other:
        streams = [other.stream("POST", url, json=long) for _ in range(2)]
        for stream in streams:
            stream.__enter__()
        with socket.create_connection(("127.0.0.1", int(guarded.url.rpartition(":")[2]))) as raw:
            body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )

            def waits() -> bool:
                return bool(guarded.health()["waiting"] == 1)

            wait_until(waits)
            began = time.monotonic()
            refused = guarded.client.post(COMPLETION, json={"prompt": "a"})
            assert time.monotonic() - began < 2.0
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert "max_num_queued_reqs=1" in error_of(refused)["message"]
            never = guarded.client.post(COMPLETION, json={"prompt": "a", "n": 4})
            assert never.status_code == 400, "more than there is room for at any time"
        for stream in streams:
            stream.__exit__(None, None, None)
    guarded.wait_idle()
    assert guarded.client.post(COMPLETION, json={"prompt": "a"}).status_code == 200
