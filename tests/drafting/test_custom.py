"""Drafters of the user's own: the page's example as it stands, wrong classes, wrong returns."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from drafting.world import VOCAB, engine, jobs, signature, truth
from drumline.core.errors import ConfigError
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import DraftRow, Proposal
from drumline.engine.llm import LLM

TinyPath = Callable[..., Path]
PAGE = Path(__file__).parents[2] / "docs" / "custom-drafter.md"
MODULE = "a_drafter_of_ones_own"


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=3, vocab=VOCAB)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An empty module that classes can be put into and named by dotted path."""
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def speculating(target: Path, name: str, k: int = 3) -> LLM:
    return engine(target, {"method": f"{MODULE}.{name}", "num_speculative_tokens": k})


def serve(llm: LLM, sampled: bool) -> list[Any]:
    batch = jobs(sampled)
    outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    return [signature(output) for output in outputs]


# ---- the page ----------------------------------------------------------------------------------


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_pages_drafter_runs_as_it_stands(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, script = blocks()
    assert len([line for line in code.splitlines() if line.strip()]) <= 50
    (tmp_path / "bigram_drafter.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for sampled in (False, True):
        expected = truth(target, sampled)
        llm = engine(
            target, {"method": "bigram_drafter.BigramDrafter", "num_speculative_tokens": 3}
        )
        for _ in range(2):
            assert serve(llm, sampled) == expected
        speculator = llm.core.worker.speculator
        assert speculator is not None
        assert speculator.failure_count == 0
        # The second time it has heard everything before.
        assert llm.core.speculation.accepted > 40
        assert speculator.drafter.inner.known == {}  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "bigram_drafter")
    assert 'model="smollm2"' in script


def test_the_pages_script_runs_with_the_model_exchanged(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, script = blocks()
    (tmp_path / "bigram_drafter.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = script.replace('"smollm2"', f"{str(target)!r}, threads=1, max_model_len=200")
    exec(compile(script, "page", "exec"), {})
    monkeypatch.delitem(sys.modules, "bigram_drafter")
    assert "SpeculationStats(drafts=" in capsys.readouterr().out


# ---- classes that cannot be had ------------------------------------------------------------------


class Silent:
    """Drafts nothing, and leaves out all that may be left out."""

    traits = DrafterTraits(method="silent")

    def __init__(self, speculative: Any, context: Any) -> None:
        self.context = context

    def propose(self, rows: Sequence[DraftRow], output: Any, draft_k: int) -> Proposal:
        return Proposal(tuple(() for _ in rows))


def test_what_may_be_left_out(target: Path, home: ModuleType) -> None:
    home.Silent = Silent  # type: ignore[attr-defined]
    llm = speculating(target, "Silent")
    assert serve(llm, True) == truth(target, True)
    assert llm.core.speculation.drafts == 0
    llm.core.worker.close()


class NoTraits(Silent):
    traits = None  # type: ignore[assignment]


class Explodes(Silent):
    def __init__(self, speculative: Any, context: Any) -> None:
        raise RuntimeError("no luck")


class FarTaps(Silent):
    taps = (7,)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Missing", f"module {MODULE} has no Missing"),
        ("NoPropose", "has no method propose"),
        ("NoTraits", "has no attribute traits"),
        ("Explodes", "cannot be made: RuntimeError: no luck"),
        ("FarTaps", "reads tap 7; the target has taps 0..2"),
    ],
)
def test_a_class_that_cannot_be_had_is_refused_at_start(
    target: Path, home: ModuleType, name: str, words: str
) -> None:
    home.NoPropose = object  # type: ignore[attr-defined]
    for cls in (NoTraits, Explodes, FarTaps):
        setattr(home, cls.__name__, cls)
    with pytest.raises(ConfigError, match=words) as caught:
        speculating(target, name)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("speculative_config")


def test_a_module_that_is_not_there_is_refused_by_name(target: Path) -> None:
    with pytest.raises(ConfigError, match="module not_there_at_all cannot be imported"):
        engine(target, {"method": "not_there_at_all.Drafter", "num_speculative_tokens": 2})


# ---- failures while it runs ---------------------------------------------------------------------


class Misbehaving(Silent):
    """Returns what ``answer`` makes of the rows, on every second call that may draft."""

    answer: Callable[[Sequence[DraftRow]], Any]
    every = 2
    calls = 0

    def propose(self, rows: Sequence[DraftRow], output: Any, draft_k: int) -> Proposal:
        if any(row.k for row in rows):
            self.calls += 1
            if self.calls % self.every == 0:
                return type(self).answer(rows)  # type: ignore[no-any-return]
        return Proposal(tuple((5,) * row.k for row in rows))


def same(token: Any) -> Callable[[Sequence[DraftRow]], Proposal]:
    return lambda rows: Proposal(tuple((token,) * row.k for row in rows))


ANSWERS: dict[str, tuple[Callable[[Sequence[DraftRow]], Any], str]] = {
    "above": (same(VOCAB), r"token id 128 for request \d+, allowed are 0\.\.127"),
    "below": (same(-1), r"token id -1 for request \d+, allowed are 0\.\.127"),
    "float": (same(3.0), r"3\.0 for request \d+, a float, expected an int"),
    "bool": (same(True), r"True for request \d+, a bool, expected an int"),
    "too many": (
        lambda rows: Proposal(tuple((5,) * (row.k + 1) for row in rows)),
        r"\d drafts for request \d+, allowed are \d",
    ),
    "rows": (lambda rows: Proposal(()), r"drafts for 0 rows, expected \d"),
    "type": (lambda rows: [[5]], "a list, expected a Proposal"),
    "raises": (lambda rows: 1 / 0, "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_wrong_return_costs_drafts_and_no_token(
    target: Path, home: ModuleType, caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    made, words = ANSWERS[answer]
    home.Bad = type("Bad", (Misbehaving,), {"answer": staticmethod(made)})  # type: ignore[attr-defined]
    llm = speculating(target, "Bad")
    with caplog.at_level(logging.WARNING, "drumline.worker"):
        assert serve(llm, True) == truth(target, True)
    speculator = llm.core.worker.speculator
    assert speculator is not None
    assert speculator.failure_count > 3
    assert speculator.disabled is None
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == speculator.failure_count
    for record in errors:
        assert re.search(r"drafter silent failed in step \d+", record.getMessage())
        assert re.search(words, record.getMessage())
    assert llm.core.speculation.drafted > 0


def test_a_drafter_that_only_fails_is_disabled_and_the_log_says_so(
    target: Path, home: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    members = {"answer": staticmethod(lambda rows: 1 / 0), "every": 1}
    home.Bad = type("Bad", (Misbehaving,), members)  # type: ignore[attr-defined]
    llm = speculating(target, "Bad")
    with caplog.at_level(logging.WARNING, "drumline.worker"):
        assert serve(llm, False) == truth(target, False)
    speculator = llm.core.worker.speculator
    assert speculator is not None
    assert speculator.failure_count == 3
    assert speculator.disabled is not None
    assert "failed in 3 steps in a row" in speculator.disabled
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.getMessage().startswith("drafter silent is disabled: failed in 3 steps")
    calls = speculator.drafter.inner.calls  # type: ignore[attr-defined]
    serve(llm, False)
    assert speculator.drafter.inner.calls == calls  # type: ignore[attr-defined]
