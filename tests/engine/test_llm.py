"""`LLM` as scripts use it: forms of prompts, refusals before anything runs, interrupts."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline import LLM, ConfigError, EngineConfig, PromptTooLong, RequestError, SamplingParams
from drumline.core.errors import Refused
from drumline.core.request import FinishReason
from drumline.engine.intake import Prompt
from drumline.engine.llm import Interrupt

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
TEXT = "the rain"
USER = {"role": "user", "content": TEXT}


@pytest.fixture(scope="module")
def llm(tiny_path: Callable[..., Path]) -> LLM:
    return LLM(str(tiny_path()), threads=1, max_num_seqs=4)


@pytest.fixture(autouse=True)
def _nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.core.has_work
    assert llm.core.pool.used_count == 0


def first_ids(llm: LLM, prompt: Any) -> tuple[int, ...]:
    return llm.generate(prompt, GREEDY)[0].outputs[0].token_ids


def test_every_form_of_a_prompt(llm: LLM) -> None:
    want = first_ids(llm, TEXT)
    ids = llm.tokenizer.encode(TEXT)
    forms: list[Any] = [
        [TEXT],
        ids,
        tuple(ids),
        [ids],
        [tuple(ids)],
        [np.array(ids)],
        {"prompt": TEXT},
        [{"prompt_token_ids": ids}],
        Prompt(text=TEXT),
        [Prompt(token_ids=tuple(ids))],
    ]
    for form in forms:
        assert first_ids(llm, form) == want, form
    chat = llm.chat([USER], GREEDY)[0].outputs[0].token_ids
    assert first_ids(llm, {"messages": [USER]}) == chat
    assert [output.outputs[0].token_ids for output in llm.chat([[USER], [USER]], GREEDY)] == [
        chat,
        chat,
    ]
    assert llm.generate([], GREEDY) == []


def test_outputs_come_in_input_order_with_params_of_their_own(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True, n=2) for count in (9, 1, 5)]
    outputs = llm.generate(["a", "b", "c"], params, priority=[2, 1, 0])
    assert [output.prompt for output in outputs] == ["a", "b", "c"]
    assert [[len(c.token_ids) for c in output.outputs] for output in outputs] == [
        [9, 9],
        [1, 1],
        [5, 5],
    ]
    assert all(output.finished for output in outputs)


WRONG: list[tuple[Any, Any, str]] = [
    (None, None, "no list of prompts"),
    (5, None, "no list of prompts"),
    ([None], None, "neither a text"),
    ([5.5], None, "neither a text"),
    ([["a"]], None, "neither a text"),
    ([{"text": "a"}], None, "text: unknown field"),
    ([{"prompt": "a", "messages": [USER]}], None, "exactly one"),
    ([{}], None, "exactly one"),
    ([[True]], None, "not a token id"),
    ([[128]], None, "vocabulary of 128"),
    ([[]], None, "no tokens"),
    (["\ud800"], None, "surrogate"),
    (["a", "b"], [GREEDY], "do not belong together"),
    (["a"], [{"max_tokens": 1}], "no SamplingParams"),
    (["a"], SamplingParams(logprobs=21), "max_logprobs=20"),
    (["a"], SamplingParams(logprobs=-1), "max_logprobs=20"),
    (["a"], SamplingParams(stop_token_ids=(128,)), "vocabulary of 128"),
    ([{"messages": [{"role": "user"}]}], None, "chat template"),
    ([{"messages": ["hi"]}], None, "messages"),
]


@pytest.mark.parametrize(("prompts", "params", "words"), WRONG)
def test_wrong_use_raises_before_anything_runs(
    llm: LLM, prompts: Any, params: Any, words: str
) -> None:
    steps = llm.core.counters.steps
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params)
    mixed = [*prompts, "fine"] if isinstance(prompts, list) else prompts
    with pytest.raises(RequestError):
        llm.generate(mixed, params)
    assert llm.core.counters.steps == steps


def test_prompts_too_long_are_of_their_own_kind(llm: LLM) -> None:
    for prompt in ([5] * 512, "a" * 200_000):
        with pytest.raises(PromptTooLong):
            llm.generate([prompt], GREEDY)


def test_empty_chats_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="messages"):
        llm.chat([], GREEDY)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 1}, "port=1: is the server's"),
        ({"max_num_queued_reqs": 5}, "is the server's"),
        ({"max_num_seq": 5}, "did you mean max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size=5: .* allowed: 1, 2"),
        ({"block_size": 3}, "power of two"),
        ({"gpu_memory_utilization": 0.9}, "kv_cache_memory_bytes"),
    ],
)
def test_wrong_settings_are_refused(
    tiny_path: Callable[..., Path], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny_path()), **settings)


def test_the_checkpoints_suggestions_are_the_defaults(
    tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "suggests"
    shutil.copytree(tiny_path(), folder)
    suggested = {"temperature": 0.5, "top_k": 7, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(suggested))
    config = EngineConfig.from_kwargs(model=str(folder), threads=1)
    params = LLM.from_config(config).default_params()
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 7, 1.0)
    neutral = config.with_fields(generation_config="vllm")
    assert LLM.from_config(neutral).default_params() == SamplingParams()


def test_an_interrupt_aborts_and_leaves_the_engine_usable(llm: LLM) -> None:
    want = first_ids(llm, TEXT)
    submissions = llm.submissions(["a"] * 6, LONG)
    interrupt = Interrupt()
    ends = {}
    before = signal.getsignal(signal.SIGINT)
    with closing(llm.run(submissions, interrupt)) as deltas:
        for index, delta in deltas:
            if delta.token_ids and not interrupt.raised:
                signal.raise_signal(signal.SIGINT)
            if delta.finish_reason is not None:
                assert index not in ends
                ends[index] = delta.finish_reason
    assert interrupt.raised
    assert ends == dict.fromkeys(range(6), FinishReason.ABORT)
    assert signal.getsignal(signal.SIGINT) is before
    assert first_ids(llm, TEXT) == want


def test_generate_raises_the_interrupt_when_everything_has_stopped(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.core.step

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(llm.core, "step", step)
        return step()

    monkeypatch.setattr(llm.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", LONG)


def test_a_second_interrupt_is_not_held_back(llm: LLM) -> None:
    interrupt = Interrupt()
    with interrupt.deferred():
        signal.raise_signal(signal.SIGINT)
        assert interrupt.raised
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_failing_consumer_leaves_no_request_behind(llm: LLM) -> None:
    failed = False
    try:
        with closing(llm.run(llm.submissions(["a"] * 6, LONG), Interrupt())) as deltas:
            next(deltas)
            raise ZeroDivisionError
    except ZeroDivisionError:  # while the traceback holds every frame
        failed = not llm.core.has_work
    assert failed
    assert not llm.core.has_work
    assert len(first_ids(llm, TEXT)) == 6


def test_one_call_at_a_time(llm: LLM) -> None:
    """From within, or from another thread: refused by name instead of mixed up."""
    with closing(llm.run(llm.submissions("a", LONG), Interrupt())) as deltas:
        next(deltas)
        with pytest.raises(Refused, match="busy"):
            llm.generate("b", GREEDY)
        seen: list[BaseException] = []

        def other() -> None:
            try:
                llm.generate("b", GREEDY)
            except Refused as error:
                seen.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
        assert len(seen) == 1
    assert len(first_ids(llm, TEXT)) == 6


def test_a_thread_may_generate(llm: LLM) -> None:
    outputs: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: outputs.append(first_ids(llm, TEXT)))
    thread.start()
    thread.join(60)
    assert outputs == [first_ids(llm, TEXT)]
