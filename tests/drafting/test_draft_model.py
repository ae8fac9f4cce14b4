"""A draft model that is the target itself: whatever happened, all its drafts are right, for as
long as its keys and values follow what was committed. Acceptance shows what text cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafting.steps import BLOCK, Bench, Running
from drumline.core.errors import CheckpointError, ConfigError

TinyPath = Callable[..., Path]
PROMPT = [7, 90, 15, 33, 64, 21, 8, 101, 56, 12, 77, 40, 31]
COUNT = 24
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=3)


def draft_model(path: Path, **keys: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": 8} | keys


def baseline(target: Path, prompt: list[int], count: int = COUNT, **params: Any) -> tuple[int, ...]:
    bench = Bench(target)
    sequence = bench.add(prompt, **params)
    bench.run([sequence], count, 0)
    return sequence.outputs[:count]


def assert_all_accepted(sequence: Running, k: int) -> None:
    """Every drafted step brought its drafts and one token more."""
    assert len(sequence.gains) >= 2
    assert set(sequence.gains) == {k + 1}, sequence.gains


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_target_as_its_own_draft_is_always_right(
    target: Path, k: int, params: dict[str, Any]
) -> None:
    bench = Bench(target, draft_model(target))
    sequence = bench.add(PROMPT, **params)
    bench.run([sequence], COUNT, k)
    assert sequence.outputs[:COUNT] == baseline(target, PROMPT, **params)
    assert_all_accepted(sequence, k)


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_chunked_prefill_and_company_change_nothing(target: Path, params: dict[str, Any]) -> None:
    bench = Bench(target, draft_model(target))
    many = [bench.add(PROMPT[at:] + PROMPT[:at], **params) for at in range(3)]
    bench.run(many, COUNT, 3, budget=5)
    for at, sequence in enumerate(many):
        expected = baseline(target, PROMPT[at:] + PROMPT[:at], **params)
        assert sequence.outputs[:COUNT] == expected
        assert_all_accepted(sequence, 3)


def test_a_phase_without_drafts_leaves_no_hole(target: Path) -> None:
    """CASE 10: prefilled and decoded at K = 0, then drafted for."""
    bench = Bench(target, draft_model(target))
    early, late = bench.add(PROMPT), bench.add(PROMPT[::-1])
    bench.run([early], 6, 3)
    for _ in range(5):
        bench.step([early, late], 0, budget=4)
    bench.run([early, late], COUNT, 3)
    for sequence in (early, late):
        assert sequence.outputs[:COUNT] == baseline(target, list(sequence.request.prompt_token_ids))
        assert_all_accepted(sequence, 3)


def test_a_preempted_request_comes_back_whole(target: Path) -> None:
    bench = Bench(target, draft_model(target))
    one, other = bench.add(PROMPT), bench.add(PROMPT[::-1])
    bench.run([one, other], 8, 3)
    bench.preempt(one)
    bench.run([other], 16, 3)  # takes over blocks that the first had
    bench.run([one, other], COUNT, 3, budget=5)
    assert one.outputs[:COUNT] == baseline(target, PROMPT)
    assert_all_accepted(one, 3)
    assert_all_accepted(other, 3)


def test_a_prefix_hit_finds_the_drafts_entries_too(target: Path) -> None:
    bench = Bench(target, draft_model(target))
    first = bench.add(PROMPT)
    bench.step([first], 3)
    second = bench.add([*PROMPT[:12], 5, 6])
    bench.adopt(second, first, 12 // BLOCK)
    bench.run([second], COUNT, 3)
    assert second.outputs[:COUNT] == baseline(target, [*PROMPT[:12], 5, 6])
    assert_all_accepted(second, 3)


def test_a_token_without_a_slot_is_caught_up(target: Path) -> None:
    """Blocks are short: a step keeps no slot for its new token, nor for drafts."""
    bench = Bench(target, draft_model(target))
    sequence = bench.add(PROMPT[:11])
    bench.step([sequence], 3, spare=0)
    bench.step([sequence], 3, spare=0)  # its new token is the first of a block it has not
    assert len(sequence.tokens) % BLOCK == 1
    assert len(sequence.blocks) * BLOCK == len(sequence.tokens) - 1
    assert sequence.drafts == ()
    bench.run([sequence], COUNT, 3)
    assert sequence.outputs[:COUNT] == baseline(target, PROMPT[:11])
    assert_all_accepted(sequence, 3)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_another_model_costs_drafts_and_no_token(
    target: Path, tiny_path: TinyPath, params: dict[str, Any], padded: bool
) -> None:
    """A stranger as draft: much is rejected, and both ways of bookkeeping draft the same."""
    stranger = tiny_path(arch="qwen2", seed=8, hidden=48, layers=1)
    keys = draft_model(stranger, disable_padded_drafter_batch=not padded)
    bench = Bench(target, keys)
    other = Bench(target, draft_model(stranger))
    sequence, twin = bench.add(PROMPT, **params), other.add(PROMPT, **params)
    bench.run([sequence], COUNT, 4, budget=5)
    other.run([twin], COUNT, 4, budget=5)
    assert sequence.outputs[:COUNT] == baseline(target, PROMPT, **params)
    assert sequence.gains == twin.gains
    assert min(sequence.gains) == 1


def test_experts_draft_too(tiny_path: TinyPath) -> None:
    target = tiny_path(arch="qwen3_moe", seed=5)
    bench = Bench(target, draft_model(target))
    many = [bench.add(PROMPT), bench.add(PROMPT[::-1], **SAMPLED)]
    bench.run(many, COUNT, 3, budget=5)
    assert many[0].outputs[:COUNT] == baseline(target, PROMPT)
    assert many[1].outputs[:COUNT] == baseline(target, PROMPT[::-1], **SAMPLED)
    for sequence in many:
        assert_all_accepted(sequence, 3)


# ---------------------------------------------------------------- the drafter's own range


def with_config(path: Path, output: Path, **values: Any) -> Path:
    shutil.copytree(path, output)
    file = output / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return output


def test_a_row_past_the_drafts_range_leaves_its_neighbour_alone(
    target: Path, tmp_path: Path
) -> None:
    """CASE 01: the draft model ends at position 32, where its rope table ends too."""
    short = with_config(target, tmp_path / "short", max_position_embeddings=32)
    bench = Bench(target, draft_model(short))
    assert bench.drafter is not None
    assert bench.drafter.traits.positions_max == 32
    x, y = bench.add([*PROMPT, 1, 2, 3, 4, 5, 6, 7]), bench.add(PROMPT[:2])
    while len(x.tokens) < 50:
        bench.step([x], 3)
    counted = x.drafted
    for _ in range(4):
        bench.step([x, y], 3)
    assert x.drafted == counted, "the drafted count moved beyond the range"
    assert x.drafts == ()
    assert x.outputs[:30] == baseline(target, list(x.request.prompt_token_ids), 30)
    assert y.outputs == baseline(target, PROMPT[:2], len(y.outputs))
    assert_all_accepted(y, 3)


def test_max_model_len_of_the_speculative_config_is_a_range(target: Path) -> None:
    bench = Bench(target, draft_model(target, max_model_len=20))
    sequence = bench.add(PROMPT)
    bench.run([sequence], COUNT, 3)
    assert sequence.outputs[:COUNT] == baseline(target, PROMPT)
    assert 0 < sequence.drafted <= 6


def test_a_row_that_asks_beyond_the_range_gets_what_is_inside(target: Path) -> None:
    bench = Bench(target, draft_model(target, max_model_len=20))
    bench.ranged = False
    sequence = bench.add(PROMPT)
    found = []
    while len(sequence.tokens) < 26:
        bench.step([sequence], 4)
        found.append((len(sequence.tokens), len(sequence.drafts)))
    assert found == [(14, 4), (19, 1), (21, 0), (22, 0), (23, 0), (24, 0), (25, 0), (26, 0)]


# ---------------------------------------------------------------- passes


@pytest.mark.parametrize("padded", [True, False])
def test_every_step_makes_the_passes_of_the_script(target: Path, padded: bool) -> None:
    bench = Bench(target, draft_model(target, disable_padded_drafter_batch=not padded))
    sequence = bench.add(PROMPT)
    ledgers = []
    for k, budget in ((3, 5), (3, 5), (0, 5), (3, 5), (2, 5), (0, 5)):
        bench.step([sequence], k, budget)
        ledgers.append([entry.size for entry in bench.ledger.passes])
    # Prefill in chunks of 5, 5 and 3; decode; with K = 0 one pass that catches up.
    assert ledgers == [[6, 0, 0], [6, 0, 0], [4], [2, 1, 1], [5, 1], [4]]
    bench.step([], 3)  # nobody runs: a dummy step
    assert [entry.size for entry in bench.ledger.passes] == [0, 0, 0]


# ---------------------------------------------------------------- what is refused


def test_another_vocabulary_is_refused_by_name(target: Path, tiny_path: TinyPath) -> None:
    other = tiny_path(arch="llama", seed=4, vocab=300)
    with pytest.raises(ConfigError, match=r"its tokens \(300\) are not the target's \(128\)"):
        Bench(target, draft_model(other))


def test_a_draft_without_a_tokenizer_is_taken_at_its_size(target: Path, tmp_path: Path) -> None:
    bare = with_config(target, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    sequence = (bench := Bench(target, draft_model(bare))).add(PROMPT)
    bench.run([sequence], COUNT, 3)
    assert_all_accepted(sequence, 3)


def test_a_bare_draft_of_another_size_is_refused(
    target: Path, tiny_path: TinyPath, tmp_path: Path
) -> None:
    bare = with_config(tiny_path(arch="llama", seed=4, vocab=300), tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="vocab_size 300 is not the target's 128"):
        Bench(target, draft_model(bare))


def test_heads_padded_differently_share_their_tokens(tmp_path: Path) -> None:
    """One tokenizer of 60 tokens under heads of 64 and 60 rows: the shared rows draft."""
    from drumline.models.tiny import write_tiny

    target, draft = tmp_path / "target", tmp_path / "draft"
    write_tiny("llama", target, 3, vocab=60)
    write_tiny("llama", draft, 4, vocab=64)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, draft / name)
    for one, other in ((target, draft), (draft, target)):
        bench = Bench(one, draft_model(other))
        sequence = bench.add([7, 15, 33], logit_bias={62: 9.0} if one is draft else {})
        bench.run([sequence], 8, 3)
        assert sequence.drafted > 0
        params = dict(sequence.request.params.logit_bias)
        assert sequence.outputs[:8] == baseline(one, [7, 15, 33], 8, logit_bias=params)
        assert (62 in sequence.outputs) == (one is draft)  # a token beyond the other's head


def test_a_missing_checkpoint_is_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError), match="nowhere"):
        Bench(target, draft_model(tmp_path / "nowhere"))
