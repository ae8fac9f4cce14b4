"""The cases of `test_cases.py` with what was reported switched on: each is caught.

A rank that parts from the others is named, with the others, or one of a case's own checks (accepted
drafts, sizes, steps) does not hold. How each is caught is asserted exactly; docs/cases.md is the
table. Every decision is a `Mutant`, switched on in one place for all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from drumline.core.errors import EngineError
from drumline.engine.core import EngineCore
from drumline.engine.messages import Trial
from drumline.engine.outputs import CompletionOutput
from drumline.lockstep.mutants import Mutant
from drumline.models.tiny import write_tiny
from drumline.models.tiny_drafts import add_mtp
from parallel_engine.cases import (
    BEYOND_RANGE,
    BUCKETS,
    DRAINING,
    FILLS_BLOCKS,
    NEAR_LIMIT,
    NOT_READY,
    ONE_AND_FOUR,
    ONE_AND_THREE,
    PREFILL_BESIDE,
    PRUNED,
    REPEATING,
    SKIPS_NEAR_LIMIT,
    STEP_SECONDS,
    THREE_AND_FOUR,
    UNEVEN,
    Lasting,
    Placed,
    break_down,
    bucket_misses,
    check_differs,
    check_lost,
    last_step,
    method,
    mtp,
    prompt,
    random_arrivals,
    same,
    settings_of,
    sizes_since,
    tokens,
    trial,
)
from parallel_engine.fleet import Fleets, Job, check_logs, config, logs, placed, run

Truth = Callable[[Placed], list[tuple[int, ...]]]
Breaks = Callable[..., EngineError]
TABLE: dict[str, Any] = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 4, 1]]}


@pytest.fixture
def breaks(fleets: Fleets, case_model: Path) -> Breaks:
    """Starts ranks, runs jobs that cannot end, and gives what broke."""

    def breaks(
        trial: Trial, *rounds: Placed, model: Path = case_model, **asked: Any
    ) -> EngineError:
        asked.setdefault("step_timeout_seconds", STEP_SECONDS)
        return break_down(fleets.start(model, trial, **settings_of(asked)), *rounds)

    return breaks


def drafted(outputs: list[CompletionOutput]) -> list[tuple[int, int]]:
    """(drafted, accepted) of each."""
    found = []
    for out in outputs:
        assert out.speculation is not None
        found.append((out.speculation.drafted, out.speculation.accepted))
    return found


# ---------------------------------------------------------------- near a limit


def test_case_01_one_gate_for_a_batch_costs_its_neighbours_their_drafts(
    lasting: Lasting, case_model: Path, truth: Truth
) -> None:
    """Tokens are right and logs are equal: acceptance alone tells."""
    core = lasting(trial(Mutant.GATE_WHOLE_BATCH), speculation=same(case_model, max_model_len=32))
    outputs = placed(core, BEYOND_RANGE)
    assert tokens(outputs) == truth(BEYOND_RANGE)
    check_logs(core)
    _, beside, elsewhere = drafted(outputs)
    assert beside[1] < beside[0]
    assert elsewhere[1] == elsewhere[0] > 0


@pytest.mark.parametrize("name", ["mtp", "dflash"])
def test_case_02_drafts_of_an_earlier_step_are_turned_down(
    breaks: Breaks, case_model: Path, name: str
) -> None:
    """Before anybody verifies them: a draft's place says that it is of another step."""
    jobs = [(0, Job((5, 6, 7, 8) * 14, 8)), SKIPS_NEAR_LIMIT[1]]
    error = breaks(trial(Mutant.KEEP_STALE_DRAFTS), jobs, speculation=method(name, case_model))
    step = check_lost(error, 0, "a draft stands at or past its row's limit")
    assert step > 1


def test_case_04_the_old_gate_hangs_near_the_limit(breaks: Breaks) -> None:
    error = breaks(trial(Mutant.SKIP_DRAFTER_LOCALLY), NEAR_LIMIT, speculation=mtp())
    step = check_differs(error, "ep", {0: "nothing, in step", 1: "draft 0 #0: all_gather"})
    assert step >= 9  # a token each after the prompt of 50, until 59 and 3 scheduled and 3 more


# ---------------------------------------------------------------- draft length


def test_case_07_a_table_that_drops_padding_leaves_the_buckets(
    lasting: Lasting, truth: Truth
) -> None:
    """Nobody hangs, and every size is another."""
    core = lasting(
        trial(Mutant.UNPADDED_UNDER_TABLE, buckets=BUCKETS),
        tensor_parallel_size=2,
        speculation=mtp(num_speculative_tokens_per_batch_size=[[1, 2, 3], [3, 4, 0]]),
    )
    assert tokens(placed(core, ONE_AND_THREE)) == truth(ONE_AND_THREE)
    check_logs(core)
    assert bucket_misses(core)


def test_case_09_lengths_of_their_own_hang(breaks: Breaks) -> None:
    error = breaks(trial(Mutant.CHOOSE_K_LOCALLY), ONE_AND_FOUR, speculation=mtp(**TABLE))
    check_differs(error, "ep", {0: "draft 1 #0: all_gather", 1: "nothing, in step"})


def test_case_09_sizes_after_pruning_are_not_one_size(breaks: Breaks) -> None:
    """1 + 1 tokens on one side, 1 + 3 on the other."""
    error = breaks(trial(Mutant.PAD_BEFORE_EXCHANGE), PRUNED, speculation=mtp())
    said = {0: "target #0: all_gather over ep of 5x", 1: "target #0: all_gather over ep of 6x"}
    check_differs(error, "ep", said)


def test_case_12_random_arrivals_hang_where_each_chooses(breaks: Breaks) -> None:
    draw = random.Random(12)
    rounds = [random_arrivals(draw) for _ in range(6)]
    error = breaks(trial(Mutant.CHOOSE_K_LOCALLY), *rounds, speculation=mtp(**TABLE))
    check_differs(error, "ep", {0: "", 1: ""})


# ---------------------------------------------------------------- idle beside busy


def test_case_13_a_step_of_zero_tokens_that_returns_at_once_hangs(breaks: Breaks) -> None:
    fault = trial(Mutant.RETURN_ON_ZERO_TOKENS, held=((1, 8),))
    error = breaks(fault, NOT_READY, speculation=mtp())
    check_differs(error, "ep", {0: "target #0: all_gather", 1: "nothing, in step"})


def test_case_16_idle_ranks_that_skip_the_drafter_hang(breaks: Breaks) -> None:
    jobs = [(2, Job(prompt(12), 5))]
    asked = {"data_parallel_size": 4, "speculation": mtp()}
    error = breaks(trial(Mutant.IDLE_TARGET_ONLY), jobs, **asked)
    nothing = "nothing, in step"
    said = {0: nothing, 1: nothing, 2: "draft 0 #0: all_gather", 3: nothing}
    check_differs(error, "ep", said)


@pytest.mark.parametrize("mutant", [Mutant.IDLE_TARGET_ONLY, Mutant.IDLE_DRAFTS_ONCE])
def test_case_18_idle_ranks_that_draft_less_hang(breaks: Breaks, mutant: Mutant) -> None:
    error = breaks(trial(mutant), [(0, Job(prompt(6), 30))], speculation=mtp())
    missing = 0 if mutant is Mutant.IDLE_TARGET_ONLY else 1
    check_differs(error, "ep", {0: f"draft {missing} #0: all_gather", 1: "nothing, in step"})


def test_case_17_trouble_that_is_not_told_is_named_all_the_same(breaks: Breaks) -> None:
    fault = trial(Mutant.LEAVE_UNTOLD, faults=((1, 3, "agree"),))
    jobs = [(rank, Job(prompt(5, rank), 40)) for rank in (0, 1)]
    error = breaks(fault, jobs, speculation=mtp())
    check_lost(error, 1, "has left, though nobody told it to")


def test_case_17_an_error_that_is_swallowed_hangs(breaks: Breaks) -> None:
    fault = trial(Mutant.SWALLOW_ERRORS, faults=((1, 3, "draft 1"),))
    jobs = [(rank, Job(prompt(5, rank), 40)) for rank in (0, 1)]
    error = breaks(fault, jobs, speculation=mtp())
    step = check_differs(error, "ep", {0: "draft 1 #0: all_gather", 1: "nothing, in step 4"})
    assert step == 3


# ---------------------------------------------------------------- sizes and modes


def test_case_19_the_targets_size_in_a_draft_pass_is_seen(lasting: Lasting, truth: Truth) -> None:
    core = lasting(trial(Mutant.REUSE_TARGET_SIZE), speculation=mtp())
    before = last_step(core)
    assert tokens(placed(core, THREE_AND_FOUR)) == truth(THREE_AND_FOUR)
    assert 16 in {places.get("draft 1") for places in sizes_since(core, before)}  # for 4 rows
    check_logs(core)


def test_case_21_a_mode_of_ones_own_hangs_the_drain(breaks: Breaks) -> None:
    """Rank 0 has finished and is live, rank 1 pads to the list."""
    fault = trial(Mutant.CHOOSE_MODE_LOCALLY, buckets=BUCKETS)
    error = breaks(fault, DRAINING, speculation=mtp())
    said = {0: "draft 0 #0: all_gather over ep of 5x", 1: "draft 0 #0: all_gather over ep of 8x"}
    check_differs(error, "ep", said)


def test_case_22_sizes_before_the_exchange_hang(breaks: Breaks) -> None:
    fault = trial(Mutant.PAD_BEFORE_EXCHANGE, buckets=BUCKETS)
    error = breaks(fault, [(1, Job(prompt(9), 9))], speculation=mtp())
    said = {0: "target #0: all_gather over ep of 4x", 1: "target #0: all_gather over ep of 16x"}
    check_differs(error, "ep", said)


def test_case_22_an_idle_vote_makes_everybody_slow(lasting: Lasting, truth: Truth) -> None:
    core = lasting(trial(Mutant.IDLE_VOTES_LIVE, buckets=BUCKETS), speculation=mtp())
    jobs = [(1, Job(prompt(9), 9))]
    assert tokens(placed(core, jobs)) == truth(jobs)
    check_logs(core)
    assert bucket_misses(core)


def test_case_23_a_drafter_that_is_fed_one_token_accepts_less(
    lasting: Lasting, case_model: Path, truth: Truth
) -> None:
    """Answers stay right: acceptance alone tells."""
    core = lasting(trial(Mutant.FEED_ONE_TOKEN), speculation=same(case_model, 2))
    outputs = placed(core, UNEVEN)
    assert tokens(outputs) == truth(UNEVEN)
    check_logs(core)
    assert all(accepted < drafts for drafts, accepted in drafted(outputs))


def test_case_31_a_vote_in_a_group_of_one_hangs(breaks: Breaks) -> None:
    fault = trial(Mutant.CHOOSE_MODE_LOCALLY, buckets=BUCKETS, mode_not_ready=(0,))
    error = breaks(fault, DRAINING, speculation=mtp())
    said = {0: "target #0: all_gather over ep of 5x", 1: "target #0: all_gather over ep of 8x"}
    check_differs(error, "ep", said)


# ---------------------------------------------------------------- ranks of one replica


TP: dict[str, Any] = {"data_parallel_size": 1, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every odd token has the logits of the even one before it, in target and drafter."""
    path = write_tiny("qwen3_moe", tmp_path_factory.mktemp("tied"), 22)
    add_mtp(path, 0)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][1::2] = weights["lm_head.weight"][::2]
    save_file(weights, file)
    return path


def ties(temperature: float = 0.0) -> Placed:
    return [(0, Job(prompt(6, i), 12, temperature)) for i in range(3)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["mtp", "draft_model"])
def test_case_25_one_rank_draws_however_the_other_computes(
    lasting: Lasting, tied: Path, name: str, temperature: float
) -> None:
    """Rank 1 likes every odd token more, by very little or by much: nobody asks it. Tokens are
    those of tp=1, and what the target itself drafts is accepted."""
    speculation = mtp() if name == "mtp" else same(tied, draft_tensor_parallel_size=2)
    amount = 1e-4 if temperature == 0 else 3.0
    nudged = Trial(gloo=True, nudged=((1, amount),))
    core = lasting(nudged, tied, speculation=speculation, **TP)
    jobs = ties(temperature)
    outputs = placed(core, jobs)
    alone = run(EngineCore.load(config(tied)), [job for _, job in jobs])
    assert tokens(outputs) == tokens(alone)
    if temperature == 0:
        assert {token % 2 for ids in tokens(outputs) for token in ids} == {0}
    if name == "draft_model":
        assert all(accepted == drafts > 0 for drafts, accepted in drafted(outputs))
    core.pause()
    assert [entry for entry in logs(core, "tp", (0,))[0] if entry[3] == "broadcast"]
    core.resume()
    check_logs(core)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_case_25_a_rank_that_draws_for_itself_is_named(
    breaks: Breaks, tied: Path, temperature: float
) -> None:
    amount = 1e-4 if temperature == 0 else 3.0
    fault = trial(Mutant.SAMPLE_ALONE, nudged=((1, amount),))
    error = breaks(fault, ties(temperature), model=tied, speculation=mtp(), **TP)
    check_lost(error, 1, "differs")


def test_case_25_a_rank_that_draws_its_drafts_for_itself_costs_acceptance(
    lasting: Lasting, tied: Path
) -> None:
    fault = trial(Mutant.DRAW_ALONE, nudged=((1, 1e-4),))
    core = lasting(fault, tied, speculation=same(tied, draft_tensor_parallel_size=2), **TP)
    outputs = placed(core, ties())
    alone = run(EngineCore.load(config(tied)), [job for _, job in ties()])
    assert tokens(outputs) == tokens(alone)
    check_logs(core)
    assert all(accepted < drafts for drafts, accepted in drafted(outputs))


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_case_26_one_rank_searches(
    lasting: Lasting, case_model: Path, truth: Truth, name: str
) -> None:
    """No rank but the first has a drafter; what it found is told with the plan."""
    core = lasting(speculation=method(name, case_model), **TP)
    outputs = placed(core, REPEATING)
    assert tokens(outputs) == truth(REPEATING)
    drafts, accepted = drafted(outputs)[0]
    assert drafts > 0
    assert accepted > 0 or name == "ngram"
    check_logs(core)


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_case_26_a_search_of_ones_own_that_finds_less_is_named(
    breaks: Breaks, case_model: Path, name: str
) -> None:
    fault = trial(Mutant.PROPOSE_FEWER_ALONE)
    error = breaks(fault, REPEATING, speculation=method(name, case_model), **TP)
    step = check_differs(error, "tp", {0: "target #0: all_reduce", 1: "target #0: all_reduce"})
    assert step >= 5


def test_case_26_a_search_of_ones_own_that_finds_other_drafts_is_seen(
    lasting: Lasting, case_model: Path, truth: Truth
) -> None:
    """Sizes are equal, so nobody hangs; where such a draft is accepted, the rest is another."""
    core = lasting(
        trial(Mutant.PROPOSE_OTHER_ALONE), speculation=method("suffix", case_model), **TP
    )
    assert tokens(placed(core, REPEATING)) != truth(REPEATING)
    check_logs(core)


# ---------------------------------------------------------------- capacity and prefill


def test_case_33_blocks_that_the_other_rank_does_not_have_are_named(breaks: Breaks) -> None:
    fault = trial(Mutant.OWN_CAPACITY, kv_blocks=(24, 23))
    error = breaks(fault, FILLS_BLOCKS, max_num_batched_tokens=16, **TP)
    check_lost(error, 1, "IndexError: index")


@pytest.mark.parametrize("name", ["ngram", "mtp"])
def test_case_37_a_width_by_the_own_phase_hangs(
    breaks: Breaks, case_model: Path, name: str
) -> None:
    """Who decodes takes 1 + 3 tokens of its row for the step; the other one has 8 of a prompt."""
    error = breaks(
        trial(Mutant.WIDEN_WHILE_DECODING),
        PREFILL_BESIDE,
        speculation=method(name, case_model),
        max_num_batched_tokens=8,
    )
    said = {0: "target #0: all_gather over ep of 8x", 1: "target #0: all_gather over ep of 4x"}
    check_differs(error, "ep", said)


def test_case_37_a_row_that_waits_for_the_prefill_is_seen(
    lasting: Lasting, case_model: Path, truth: Truth
) -> None:
    core = lasting(
        Trial(gloo=True, held=((1, 6),)),
        speculation=method("ngram", case_model),
        max_num_batched_tokens=8,
    )
    before = core.counters.steps
    assert tokens(placed(core, PREFILL_BESIDE)) == truth(PREFILL_BESIDE)
    assert core.counters.steps - before > 1 + 16 + 1
    check_logs(core)
