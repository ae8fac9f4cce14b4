"""Both old hangs, scaled down: under the old decision they hang and are named, else complete."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.bench.hang import Hang, Scenario, scenario, tiny_model
from drumline.cli.main import main
from parallel_engine.fleet import Fleets

SETTINGS = {"ops_backend": "reference", "threads": 1, "block_size": 4}
NEAR_LIMIT = Scenario("near-limit", 2, 1, 40, ((28, 28), (21, 21)), (12, 12))
Tokens = list[tuple[int, ...]]
Make = Callable[[Scenario, str], tuple[Hang, Tokens]]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with tiny_model(150) as path:
        yield path


@pytest.fixture(scope="module")
def make(model: Path, _nursery: Fleets) -> Make:
    """A scenario on the tiny model, and its tokens without speculation."""
    truths: dict[Scenario, Tokens] = {}

    def make(what: Scenario, drafter: str) -> tuple[Hang, Tokens]:
        hang = Hang(what, model, drafter, SETTINGS, _nursery.nursery)
        if what not in truths:
            truths[what] = hang.truth()
        return hang, truths[what]

    return make


def test_near_limit_hangs_under_the_old_gate_and_names_who_skipped(make: Make) -> None:
    hang, truth = make(NEAR_LIMIT, "mtp")
    hang.settings = {**SETTINGS, "step_timeout_seconds": 1.0}
    outcome = hang.run("local", truth)
    assert outcome.error == "Diverged"
    # Replica 0, whose prompts are longer, skipped; the other one is in its first draft pass.
    assert re.fullmatch(
        r"step \d+: collective \d+ over ep differs: rank 0 has nothing, in step \d+, "
        r"rank 1 has draft 0 #0: all_gather over ep of .*",
        outcome.hung or "",
    )
    assert outcome.seconds_to_name < 10
    assert not outcome.good


def test_near_limit_completes_where_the_step_is_agreed(make: Make) -> None:
    hang, truth = make(NEAR_LIMIT, "mtp")
    outcome = hang.run("agreed", truth)
    assert outcome.hung is None
    assert outcome.equal
    assert outcome.gate_steps > 0  # one gate failed while another replica drafted
    assert outcome.good


@pytest.mark.parametrize("drafter", ["mtp", "eagle3", "draft-model"])
def test_draft_length_hangs_where_each_chooses_its_own(make: Make, drafter: str) -> None:
    hang, truth = make(scenario("draft-length", "small"), drafter)
    hang.settings = {**SETTINGS, "step_timeout_seconds": 1.0}
    outcome = hang.run("local", truth)
    assert outcome.error == "Diverged"
    # Which pass the other replica stops before follows from how many of its requests have come.
    assert re.search(
        r"over ep differs: rank 0 has draft [12] #0: .* rank 1 has nothing", outcome.hung or ""
    )
    assert outcome.seconds_to_name < 10


@pytest.mark.parametrize("drafter", ["mtp", "eagle3", "draft-model"])
def test_draft_length_changes_where_it_is_agreed(make: Make, drafter: str) -> None:
    hang, truth = make(scenario("draft-length", "small"), drafter)
    outcome = hang.run("agreed", truth)
    assert outcome.equal
    assert outcome.good
    # The lesser wish counts: none while the other replica has five or six requests, then more.
    assert outcome.draft_lengths[0] > 3
    assert {2, 3} <= outcome.draft_lengths.keys()


def test_a_dense_drafter_completes_even_under_the_old_decision(make: Make) -> None:
    hang, truth = make(scenario("draft-length", "small"), "dense")
    outcome = hang.run("local", truth)
    assert outcome.good


def test_settings_and_a_module_of_ones_own_reach_the_engine(tmp_path: Path) -> None:
    hang = Hang(NEAR_LIMIT, tmp_path, settings={"max_num_seqs": 2}, module="a/folder")
    for speculates in (True, False):
        assert hang.config(speculates).scheduler.max_num_seqs == 2
    speculation = hang.config(True).speculation
    assert speculation is not None
    assert speculation.model == "a/folder"


def test_the_command_says_what_it_cannot_take(capsys: pytest.CaptureFixture[str]) -> None:
    hang = ["bench", "hang", "--scenario", "near-limit"]
    assert main([*hang, "--spec-model", "a/folder"]) == 2
    assert "spec_model='a/folder': needs the --model it is for" in capsys.readouterr().err
    assert main([*hang, "--max-model-len", "64"]) == 2
    assert "max_model_len=64: the scenario says it" in capsys.readouterr().err


@pytest.mark.slow
def test_near_limit_as_it_was_reported_but_short(make: Make) -> None:
    """dp=4 tp=2, L = 150: tokens are those of the same tp without data parallelism."""
    hang, truth = make(scenario("near-limit", "small"), "mtp")
    assert hang.run("agreed", truth).good
    assert hang.run("local", truth).error == "Diverged"
