"""Failures that users of other engines met, as far as one rank can meet them: the numbers are the
cases' own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting.methods import METHODS
from drafting.world import VOCAB, Watch, engine, signature, tell
from drumline.core.errors import RequestError
from drumline.core.params import SamplingParams
from drumline.core.request import FinishReason
from drumline.engine.llm import LLM, Interrupt
from drumline.engine.outputs import RequestOutput

TinyPath = Callable[..., Path]
PROMPT = (17, 40, 23, 8)


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=3, vocab=VOCAB)


@pytest.fixture(scope="module")
def plain(target: Path) -> LLM:
    return engine(target)


def speculating(target: Path, name: str, k: int, **settings: Any) -> LLM:
    more = settings.pop("more", {})
    return engine(target, METHODS[name].speculative(target, k, **more), **settings)


def teach(plain: LLM, prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
    """The output without drafts, which the testing drafters know from now on."""
    (output,) = plain.generate([prompt], params)
    tell(prompt, params, output.outputs[0].token_ids)
    return output


# ---- 06: a proposal longer than the room ------------------------------------------------------


@pytest.mark.parametrize("prompt_count", [6, 15, 24, 30])
def test_06_suffix_never_proposes_past_the_limit(target: Path, prompt_count: int) -> None:
    prompt = tuple([9, 50, 77][index % 3] for index in range(prompt_count))
    params = SamplingParams(temperature=0.0, max_tokens=None, logit_bias={9: 30, 50: 30, 77: 30})
    (expected,) = engine(target, max_model_len=32).generate([prompt], params)
    llm = speculating(target, "suffix", 16, max_model_len=32)
    watch = Watch(llm)
    (output,) = llm.generate([prompt], params)
    assert signature(output) == signature(expected)
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    proposed = [
        (row.start + len(row.tokens) + len(outcome.tokens), len(outcome.drafts))
        for plan, result in watch.steps
        for row, outcome in zip(plan.rows, result.rows, strict=True)
    ]
    assert any(drafts for _, drafts in proposed) or prompt_count == 30
    assert all(drafts <= max(0, 32 - length - 1) for length, drafts in proposed)


def test_06_a_full_draft_context_means_plain_decoding(target: Path, plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=28, seed=1, ignore_eos=True)
    expected = teach(plain, PROMPT, params)
    llm = speculating(target, "oracle", 3, max_model_len=32, more={"max_model_len": 16})
    watch = Watch(llm)
    (output,) = llm.generate([PROMPT], params)
    assert signature(output) == signature(expected)
    rows = [row for plan, _ in watch.steps for row in plan.rows]
    assert any(row.drafts for row in rows)
    assert all(row.width == 1 for row in rows if row.start >= 15)


# ---- 36: a draft that outlives its step ---------------------------------------------------------


def test_36_every_id_is_a_token_and_drafts_live_one_step(target: Path) -> None:
    """Four tokens per step for three requests: one always waits, 200 random orders."""
    llm = speculating(target, "random", 3, max_num_batched_tokens=4, max_num_seqs=3)
    watch = Watch(llm)
    fed: list[int] = []
    forward = llm.core.worker.model.forward

    def noting(ids: torch.Tensor, *more: Any) -> Any:
        fed.extend(ids.tolist())
        return forward(ids, *more)

    llm.core.worker.model.forward = noting  # type: ignore[method-assign]
    for seed in range(200):
        draw = random.Random(seed)
        prompts = [
            tuple(draw.randrange(5, VOCAB) for _ in range(draw.randint(1, 5))) for _ in range(3)
        ]
        counts = [draw.randint(1, 4) for _ in range(3)]
        llm.generate(
            prompts,
            [SamplingParams(temperature=0.0, max_tokens=n, seed=seed) for n in counts],
        )
    assert min(fed) >= 0
    assert max(fed) < VOCAB
    proposed: dict[int, tuple[int, ...]] = {}
    missed = 0
    for plan, result in watch.steps:
        for row in plan.rows:
            if row.drafts:  # a prefix of what the step before proposed, and of no other
                assert row.drafts == proposed[row.number][: len(row.drafts)]
        missed += sum(number not in {row.number for row in plan.rows} for number in proposed)
        proposed = {outcome.number: outcome.drafts for outcome in result.rows}
    assert missed > 100


# ---- 38: seeds --------------------------------------------------------------------------------


def test_38_without_a_seed_runs_differ_and_with_one_nothing_does(target: Path) -> None:
    llm = speculating(target, "mtp", 3)
    free = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    outputs = [llm.generate([PROMPT], free)[0].outputs[0] for _ in range(20)]
    assert len({output.token_ids for output in outputs}) > 15
    assert len({output.seed for output in outputs}) == 20
    seeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7)
    alone = llm.generate([PROMPT], seeded)[0].outputs[0].token_ids
    batch = llm.generate([(5, 6), PROMPT, (7,), (8, 9, 10)], [free, seeded, free, free])
    assert batch[1].outputs[0].token_ids == alone
    for k in (1, 2, 5, 8):
        other = speculating(target, "mtp", k)
        assert other.generate([PROMPT], seeded)[0].outputs[0].token_ids == alone
    again = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=outputs[3].seed)
    assert llm.generate([PROMPT], again)[0].outputs[0].token_ids == outputs[3].token_ids


def test_38_samples_of_one_request_differ(target: Path, plain: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=7, n=4)
    llm = speculating(target, "scripted", 3)
    expected, found = (it.generate([PROMPT], params)[0] for it in (plain, llm))
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in expected.outputs]
    assert len({one.token_ids for one in found.outputs}) == 4


# ---- 40: log-probabilities ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_40_every_token_has_its_own_logprobs(target: Path, mode: str, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, logprobs=3, max_tokens=12, seed=5, frequency_penalty=0.7
    )
    expected = teach(engine(target, logprobs_mode=mode), PROMPT, params)
    for name in ("oracle", "scripted", "liar"):
        llm = speculating(target, name, 3, logprobs_mode=mode)
        (output,) = llm.generate([PROMPT], params)
        assert signature(output) == signature(expected)
        one = output.outputs[0]
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids)
        assert all(entry.token.logprob < 0 for entry in one.logprobs) or mode != "raw_logprobs"
        assert one.speculation is not None
        assert (one.speculation.accepted > 0) == (name != "liar")


# ---- 41: sampling parameters -------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"frequency_penalty": 1.0},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"min_tokens": 12},
    {"logit_bias": {41: -100.0, 42: 5.0}},
    {"allowed_token_ids": tuple(range(30, 90))},
    {"min_p": 0.05, "top_k": 30},
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("given", [*OPTIONS, {k: v for part in OPTIONS for k, v in part.items()}])
def test_41_options_act_on_the_history_each_position_has(
    target: Path, plain: LLM, given: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=9, **given)
    expected = teach(plain, PROMPT, params)
    for name in ("oracle", "scripted"):
        (output,) = speculating(target, name, 3).generate([PROMPT], params)
        assert signature(output) == signature(expected)
        assert output.outputs[0].speculation is not None
        assert output.outputs[0].speculation.accepted > 0


# ---- 43: stops inside an accepted run -----------------------------------------------------------


def stream(llm: LLM, params: SamplingParams) -> tuple[list[int], str, int, RequestOutput]:
    """(ids, text, log-probabilities) as the deltas say it, and the whole output."""
    ids: list[int] = []
    text, count = "", 0
    for _, delta in llm.run(llm.submissions([PROMPT], params), Interrupt()):
        ids += delta.token_ids
        text += delta.text
        count += len(delta.logprobs)
    return ids, text, count, llm.generate([PROMPT], params)[0]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(
    ("stop_at", "max_tokens", "kept", "reason"),
    [
        (2, 5, 3, FinishReason.STOP),
        (2, 3, 3, FinishReason.STOP),
        (2, 2, 2, FinishReason.LENGTH),
        (0, 5, 1, FinishReason.STOP),
        (5, 5, 5, FinishReason.LENGTH),
        (5, 6, 6, FinishReason.STOP),
        (9, 12, 10, FinishReason.STOP),
    ],
)
def test_43_a_stop_token_inside_the_run(
    target: Path,
    plain: LLM,
    stop_at: int,
    max_tokens: int,
    kept: int,
    reason: FinishReason,
    ignore_eos: bool,
) -> None:
    base = {"temperature": 0.0, "seed": 3, "ignore_eos": ignore_eos, "logprobs": 0}
    base |= {"repetition_penalty": 4.0, "logit_bias": {2: -100.0}}  # no token twice, no end
    free = teach(plain, PROMPT, SamplingParams(max_tokens=20, **base)).outputs[0].token_ids
    stop = free[stop_at]
    assert stop not in free[:stop_at], "the run must meet it there first"
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(stop,), **base)
    for name in ("oracle", "scripted"):
        llm = speculating(target, name, 5)
        ids, text, count, output = stream(llm, params)
        one = output.outputs[0]
        assert one.token_ids == tuple(ids) == free[:kept]
        assert one.finish_reason is reason
        assert one.stop_reason == (stop if reason is FinishReason.STOP else None)
        assert one.text == text
        assert one.logprobs is not None
        assert len(one.logprobs) == count == kept
        assert llm.core.counters.completion_tokens == 2 * kept
        assert llm.core.pool.used_count == 0


@pytest.mark.parametrize("ends_at", range(1, 8))
def test_43_a_stop_string_over_two_tokens(target: Path, plain: LLM, ends_at: int) -> None:
    base = {"temperature": 0.0, "seed": 3, "ignore_eos": True, "logprobs": 0}
    free = teach(plain, PROMPT, SamplingParams(max_tokens=20, **base)).outputs[0].token_ids
    pieces = [plain.tokenizer.decode([token]) for token in free]
    stop = pieces[ends_at - 1][-1:] + pieces[ends_at][:1]
    assert stop.strip()
    for include in (False, True):
        params = SamplingParams(
            max_tokens=20, stop=(stop,), include_stop_str_in_output=include, **base
        )
        expected = stream(plain, params)
        assert expected[3].outputs[0].finish_reason is FinishReason.STOP
        assert len(expected[0]) <= ends_at + 1
        for name in ("oracle", "scripted", "liar"):
            found = stream(speculating(target, name, 5), params)
            assert found[:3] == expected[:3]
            assert signature(found[3]) == signature(expected[3])


# ---- a request's own draft length ---------------------------------------------------------------


def test_a_request_may_draft_less_and_not_more(target: Path, plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=13, seed=1, ignore_eos=True)
    teach(plain, PROMPT, params)
    llm = speculating(target, "oracle", 3)
    watch = Watch(llm)
    for own, sizes in ((0, [1] * 13), (1, [1, *[2] * 6]), (3, [1, 4, 4, 4]), (None, [1, 4, 4, 4])):
        watch.steps.clear()
        asked = SamplingParams(
            temperature=0.0, max_tokens=13, seed=1, ignore_eos=True, num_speculative_tokens=own
        )
        llm.generate([PROMPT], asked)
        assert [tokens for _, tokens in watch.gains()] == sizes
    for engine_, problem in ((llm, "more than the configured 3"), (plain, "nothing drafts")):
        with pytest.raises(RequestError, match=f"num_speculative_tokens: .*{problem}"):
            engine_.generate([PROMPT], SamplingParams(num_speculative_tokens=4))
    plain.generate([PROMPT], SamplingParams(num_speculative_tokens=0, max_tokens=1))
