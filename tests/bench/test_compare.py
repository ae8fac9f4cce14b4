"""Two sides by turns: against a peer of known speed, llama.cpp's formats, and a real helper."""

from __future__ import annotations

import stat
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.bench import peers
from drumline.bench.compare import compare
from drumline.bench.peers import Helper, LlamaCpp, Workload, open_peer
from drumline.core.errors import UsageError
from drumline.engine.llm import LLM


class KnownPeer:
    name = "known"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def decode(self, work: Workload) -> float | None:
        self.asked.append(f"decode {work.streams}")
        return None if work.streams > 1 else 10.0

    def prefill(self, tokens: int) -> float | None:
        self.asked.append(f"prefill {tokens}")
        return 100.0

    def close(self) -> None:
        self.asked.append("close")


def test_each_round_asks_both_sides_once(tiny_path: Callable[..., Path]) -> None:
    path = tiny_path("llama", 3, vocab=96, hidden=32, layers=2)
    llm = LLM(model=str(path), max_model_len=64, threads=1, enable_prefix_caching=False)
    peer = KnownPeer()
    one, two, prefill = compare(llm, peer, [1, 2], 4, 6, 16, rounds=3)
    assert peer.asked == ["decode 1", "decode 2", "prefill 16"] * 3
    assert [len(side) for side in (one.ours, one.theirs, two.ours, two.theirs)] == [3, 3, 3, 0]
    assert one.ratio == sorted(value / 10.0 for value in one.ours)[1]
    assert two.ratio is None
    assert prefill.what == "prefill, 16 tokens"
    assert prefill.ratio == sorted(value / 100.0 for value in prefill.ours)[1]


def program(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text("#!/usr/bin/env python3\nimport sys\n" + textwrap.dedent(body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_llama_cpp_is_asked_with_the_same_threads_and_its_figures_are_read(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    bench = program(
        tmp_path,
        "llama-bench",
        """
        at = {name: value for name, value in zip(sys.argv[1::2], sys.argv[2::2])}
        assert at["-t"] == "2" and at["-r"] == "1", at
        print("warning: noise")
        print('[{"avg_ts": %s}]' % (float(at["-p"]) + float(at["-n"]) / 1000))
        """,
    )
    batched = program(
        tmp_path,
        "llama-batched-bench",
        """
        at = {name: value for name, value in zip(sys.argv[1::2], sys.argv[2::2])}
        assert at["-npl"] == "4" and int(at["-c"]) >= 4 * 12, at
        print('{"pl": 1, "speed_tg": 1.0}')
        print('{"pl": 4, "speed_tg": 33.5}')
        """,
    )
    peer = open_peer("llama.cpp", model, 2, 96, bench, batched)
    assert peer.decode(Workload(1, 4, 8)) == 0.008
    assert peer.decode(Workload(4, 4, 8)) == 33.5
    assert peer.prefill(512) == 512.0
    assert LlamaCpp(model, 2, bench, None).decode(Workload(4, 4, 8)) is None


def test_a_peer_that_cannot_be_had_is_refused_by_name(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    with pytest.raises(UsageError, match="--llama-bench"):
        open_peer("llama.cpp", model, 1, 96)
    with pytest.raises(UsageError, match="no such program"):
        open_peer("llama.cpp", model, 1, 96, tmp_path / "nothing")
    with pytest.raises(UsageError, match="GGUF"):
        open_peer("llama.cpp", tmp_path, 1, 96, tmp_path / "nothing")
    broken = program(tmp_path, "broken", "sys.stderr.write('no such model\\n'); sys.exit(3)")
    with pytest.raises(UsageError, match="ended with code 3: no such model"):
        open_peer("llama.cpp", model, 1, 96, broken).prefill(8)
    odd = program(tmp_path, "odd", "print('[]')")
    with pytest.raises(UsageError, match="not what was expected"):
        open_peer("llama.cpp", model, 1, 96, odd).prefill(8)
    with pytest.raises(UsageError, match="peer vllm: ModuleNotFoundError"):
        open_peer("vllm", model, 1, 96)


def test_a_peer_that_says_nothing_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "TIMEOUT_SECONDS", 0.3)
    silent = program(tmp_path, "python", "import time; time.sleep(60)")
    with pytest.raises(UsageError, match="without an answer"):
        Helper("vllm", tmp_path, 1, 96, silent)


def test_transformers_answers_from_a_process_of_its_own(tiny_path: Callable[..., Path]) -> None:
    path = tiny_path("llama", 3, vocab=96, hidden=32, layers=2)
    peer = Helper("transformers", path, 1, 96, None)
    try:
        rate = peer.decode(Workload(2, 4, 8))
        assert rate is not None
        assert rate > 0
    finally:
        peer.close()
