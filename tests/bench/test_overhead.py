"""What a step costs beyond passes: which steps count, and that parts add up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.bench.overhead import StepCost, Stopwatch, decode_steps, measure_overhead
from drumline.cli.main import main
from drumline.core.errors import UsageError
from drumline.core.params import SamplingParams
from drumline.engine.llm import LLM

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "draft_length": "static"}


def open_llm(path: Path, **settings: object) -> LLM:
    return LLM(model=str(path), max_model_len=128, threads=1, max_num_seqs=2, **settings)


def test_steps_in_which_all_decode_are_counted_and_nothing_stays_attached(
    tiny_path: Callable[..., Path],
) -> None:
    llm = open_llm(tiny_path("llama", 3, vocab=96, hidden=32, layers=2), speculative_config=NGRAM)
    core = llm.core
    names = {(id(one), name) for one in (core.worker, core.worker.model) for name in vars(one)}
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    steps = decode_steps(llm, 2, params)
    # The first token of each comes with its prefill; the last step may leave one alone.
    assert 2 <= len(steps) <= 8
    for one in steps:
        assert 0 < one.passes < one.step
        assert one.verify > 0
        assert one.propose > 0
        assert one.verify + one.propose < one.outside
    after = {(id(one), name) for one in (core.worker, core.worker.model) for name in vars(one)}
    assert after == names


def test_what_the_clock_saw_is_told_apart() -> None:
    """Draft passes are passes; what else a drafter does is propose."""
    watch = Stopwatch(core=None)  # type: ignore[arg-type]
    watch._counts = True
    watch._spent |= {"passes": 5.0, "draft": 4.0, "draft passes": 3.0, "verify": 0.5}
    watch.step_ended(8.0)
    watch.step_ended(9.0)  # no step that counts
    assert watch.steps == [StepCost(step=8.0, passes=5.0, verify=0.5, propose=1.0)]
    assert watch.steps[0].outside == 3.0


def test_with_and_without_speculation_side_by_side(tiny_path: Callable[..., Path]) -> None:
    path = tiny_path("llama", 3, vocab=96, hidden=32, layers=2)
    plain, other = open_llm(path), open_llm(path, speculative_config=NGRAM)
    found = measure_overhead(plain, other, [1, 2], 6, 1)
    assert [(one.requests, one.draw) for one in found] == [
        *((1, "greedy"), (1, "sampled"), (2, "greedy"), (2, "sampled"))
    ]
    for one in found:
        assert one.speculation is not None
        assert one.together is not None
        assert 0 < one.engine < 1
        assert 0 < one.speculation < one.together < 1
    alone = measure_overhead(plain, None, [1], 6, 1)
    assert [one.together for one in alone] == [None, None]
    with pytest.raises(UsageError, match="no step in which all of them decode"):
        measure_overhead(plain, None, [1], 1, 1)


def test_the_command_prints_both_shares(
    tiny_path: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_path("llama", 3, vocab=96, hidden=32, layers=2)
    arguments = ["bench", "overhead", "--model", str(path), "--max-model-len", "128"]
    arguments += ["--batch-size", "1", "--output-len", "6", "--num-iters", "1", "--threads", "1"]
    assert main([*arguments, "--spec-method", "ngram", "--spec-tokens", "2"]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row.split("|")[2].strip() for row in table[2:]] == ["greedy", "sampled"]
    assert table[0].split("|")[-2].strip() == "together"
    assert all(row.count("%") == 3 for row in table[2:])
