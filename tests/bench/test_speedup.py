"""Speculation on prompts, by turns: sums and ratios of known candidates, this engine, and a server
that answers as llama.cpp's does."""

from __future__ import annotations

import json
import stat
import textwrap
from pathlib import Path

import pytest

from drumline.bench.acceptance import Question
from drumline.bench.speedup import (
    PLAIN,
    Decoded,
    LlamaServer,
    OwnEngine,
    best,
    measure_speedup,
)
from drumline.cli.bench_speedup import print_speedup
from drumline.cli.main import main
from drumline.core.errors import RequestError, UsageError
from drumline.engine.llm import LLM

QUESTIONS = [Question("long", "a"), Question("short", "b"), Question("long", "c")]


class Known:
    """Takes a second per token of `seconds`' prompts; half of it in its second round."""

    def __init__(self, name: str, tokens: dict[str, int], seconds: float) -> None:
        self.name = name
        self.tokens = tokens
        self.seconds = seconds
        self.asked: list[str] = []

    def answer(self, question: Question, output_len: int) -> Decoded:
        self.asked.append(question.text)
        late = len(self.asked) > 1 + len(QUESTIONS)  # one warms up
        return Decoded(self.tokens[question.text], self.seconds / (2 if late else 1))

    def close(self) -> None:
        raise AssertionError("whoever opened it closes it")


def test_tokens_and_seconds_are_added_up_by_category_and_round() -> None:
    plain = Known(PLAIN, {"a": 10, "b": 4, "c": 20}, 2.0)
    quick = Known("quick", {"a": 10, "b": 1, "c": 50}, 1.0)
    told: list[str] = []
    long, short, whole = measure_speedup([plain, quick], QUESTIONS, 8, 2, told.append)
    assert plain.asked == quick.asked == ["a", *("a", "b", "c") * 2]
    assert [one.category for one in (long, short, whole)] == ["long", "short", "all"]
    assert long.by_candidate == {PLAIN: (30 / 4, 30 / 2), "quick": (60 / 2, 60 / 1)}
    assert short.by_candidate == {PLAIN: (4 / 2, 4 / 1), "quick": (1 / 1, 1 / 0.5)}
    assert whole.by_candidate[PLAIN] == (34 / 6, 34 / 3)
    assert long.ratio("quick", PLAIN).median == 4.0
    assert best(short, [PLAIN, "quick"]) == PLAIN
    assert best(long, [PLAIN, "quick"]) == "quick"
    assert [text.split(",")[0] for text in told] == ["round 1 of 2", "round 2 of 2"]


def test_the_table_names_the_best_way_of_the_other_and_the_least_category(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [PLAIN, "ngram", "llama.cpp", "llama.cpp a", "llama.cpp b"]
    tokens = [dict.fromkeys("abc", count) for count in (10, 12, 5, 4, 6)]
    tokens[1]["b"] = 9
    known = [Known(name, count, 1.0) for name, count in zip(names, tokens, strict=True)]
    print_speedup(measure_speedup(known, QUESTIONS, 8, 1), names)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| long | 10.0 | 1.20 | 0.50 | 0.40 | 0.60 |"
    assert lines[4] == "| all | 10.0 | 1.10 | 0.50 | 0.40 | 0.60 |"
    assert lines[6:] == [
        "ngram to llama.cpp: 2.2 (2.2–2.2)",
        "ngram to its best way to speculate (llama.cpp b): 1.833 (1.833–1.833)",
        "least to plain: 0.9 (0.9–0.9) (short)",
    ]


def test_this_engine_counts_from_the_first_token_on(smollm2_path: Path) -> None:
    llm = LLM(
        model=str(smollm2_path),
        max_model_len=128,
        max_num_seqs=1,
        threads=1,
        enable_prefix_caching=False,
    )
    with llm:
        got = OwnEngine("own", llm).answer(Question("all", "Count to five."), 6)
    assert got.tokens == 5
    assert got.seconds > 0


SERVER = """
    import json, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    args = sys.argv[1:]
    if "--spec-type" in args and args[args.index("--spec-type") + 1] == "unheard-of":
        sys.exit("no such type")

    class Answer(BaseHTTPRequestHandler):
        def log_message(self, *_): pass
        def reply(self, status, value):
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def do_GET(self):
            self.reply(200, {"status": "ok"})
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked["messages"][0]["content"] == "refuse":
                return self.reply(400, {"error": "too long"})
            open(sys.argv[0] + ".asked", "w").write(json.dumps([args, asked]))
            self.reply(200, {"timings": {"predicted_n": 12, "predicted_ms": 300.0}})

    HTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), Answer).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text("#!/usr/bin/env python3\n" + textwrap.dedent(SERVER))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_other_server_is_asked_for_equal_work(server: Path, tmp_path: Path) -> None:
    peer = LlamaServer(server, tmp_path / "m.gguf", 2, "ngram-simple")
    try:
        assert peer.name == "llama.cpp ngram-simple"
        assert peer.answer(Question("all", "Hello."), 40) == Decoded(12, 0.3)
        with pytest.raises(RequestError, match="too long"):
            peer.answer(Question("all", "refuse"), 40)
    finally:
        peer.close()
    args, asked = json.loads((tmp_path / "llama-server.asked").read_text())
    given = dict(zip(args[::2], args[1::2], strict=True))
    assert (given["-t"], given["-np"], given["--spec-type"]) == ("2", "1", "ngram-simple")
    assert asked == {
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 40,
        "temperature": 0.0,
        "cache_prompt": False,
    }


def test_a_server_that_does_not_start_is_named(server: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"llama.cpp unheard-of ended .*no such type"):
        LlamaServer(server, tmp_path / "m.gguf", 1, "unheard-of")
    with pytest.raises(UsageError, match="reads GGUF files"):
        LlamaServer(server, tmp_path / "m.safetensors", 1, None)
    with pytest.raises(UsageError, match="no such program"):
        LlamaServer(tmp_path / "missing", tmp_path / "m.gguf", 1, None)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--speculative-config", '{"method": "ngram"}'], "needs --data"),
        (["--data", "x"], "needs --speculative-config"),
        (
            ["--data", "x", "--spec-method", "ngram", "--llama-spec-type", "ngram-mod"],
            "--llama-spec-type needs --llama-server",
        ),
    ],
)
def test_what_is_missing_is_named(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "speedup", "--model", "smollm2", *arguments]) != 0
    assert problem in capsys.readouterr().err
