"""The official client against a real server: streamed, whole, and what `LLM` gives, are equal."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from drumline import LLM, SamplingParams, __version__
from drumline.engine.outputs import CompletionOutput
from server.running import Server

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 24}
IDS = {"return_token_ids": True}
CHAT: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the rain in Spain"},
]


@pytest.fixture(scope="module")
def llm(long_tiny: Path) -> Iterator[LLM]:
    return LLM(str(long_tiny), threads=1, max_model_len=512)


def expected(llm: LLM, prompt: Any, given: dict[str, Any]) -> CompletionOutput:
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        (output,) = llm.chat(prompt, SamplingParams(**given))
    else:
        (output,) = llm.generate(prompt, SamplingParams(**given))
    return output.outputs[0]


@pytest.mark.parametrize("given", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", ["the rain", [7, 8, 9, 10]], ids=["text", "ids"])
def test_completions_are_what_llm_gives(
    llm: LLM, client: openai.OpenAI, given: dict[str, Any], prompt: Any
) -> None:
    want = expected(llm, prompt, given)
    whole = client.completions.create(model="tiny", prompt=prompt, extra_body=IDS, **given)
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason) == (want.text, str(want.finish_reason))
    assert tuple(choice.token_ids) == want.token_ids  # type: ignore[attr-defined]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(want.token_ids)

    text, ids, reasons = "", [], []
    for chunk in client.completions.create(
        model="tiny", prompt=prompt, stream=True, extra_body=IDS, **given
    ):
        text += chunk.choices[0].text
        ids += chunk.choices[0].token_ids  # type: ignore[attr-defined]
        reasons.append(chunk.choices[0].finish_reason)
    assert (text, tuple(ids)) == (want.text, want.token_ids)
    assert reasons[-1] == str(want.finish_reason)
    assert set(reasons[:-1]) <= {None}


@pytest.mark.parametrize("given", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_chats_are_what_llm_gives(llm: LLM, client: openai.OpenAI, given: dict[str, Any]) -> None:
    want = expected(llm, CHAT, given)
    whole = client.chat.completions.create(model="tiny", messages=CHAT, extra_body=IDS, **given)
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", want.text)
    assert tuple(choice.token_ids) == want.token_ids  # type: ignore[attr-defined]

    text, ids, roles = "", [], []
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, stream=True, extra_body=IDS, **given
    )
    for chunk in stream:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        roles.append(delta.role)
        ids += getattr(chunk.choices[0], "token_ids", None) or []
    assert (text, tuple(ids)) == (want.text, want.token_ids)
    assert roles[0] == "assistant"
    assert set(roles[1:]) <= {None}


def test_content_in_parts_and_null_fields_are_as_openai_has_them(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "the rain"}, {"type": "text", "text": "in Spain"}]
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_completion_tokens": 8}
    one = client.chat.completions.create(
        messages=[{"role": "user", "content": "the rain\nin Spain"}], **asked
    )
    two = client.chat.completions.create(
        messages=[{"role": "user", "content": parts}],  # type: ignore[list-item, misc]
        extra_body={"tools": None, "stop": None, "logit_bias": None, "response_format": None},
        **asked,
    )
    assert one.choices[0].message.content == two.choices[0].message.content
    assert one.usage is not None
    assert one.usage.completion_tokens == 8


def test_samples_of_a_seed_differ_and_come_again(llm: LLM, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "so", "n": 3, **SAMPLED}
    whole = client.completions.create(**asked)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in client.completions.create(stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    (output,) = llm.generate("so", SamplingParams(n=3, **SAMPLED))
    assert [completion.text for completion in output.outputs] == texts


def test_a_reported_seed_reproduces_an_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "so", "max_tokens": 16}
    first = client.completions.create(**asked).choices[0]
    again = client.completions.create(seed=first.seed, **asked).choices[0]  # type: ignore[attr-defined]
    assert again.text == first.text


def test_several_prompts_keep_their_order(client: openai.OpenAI) -> None:
    prompts = ["the", "rain", "in", "Spain"]
    alone = [
        client.completions.create(model="tiny", prompt=prompt, **GREEDY).choices[0].text
        for prompt in prompts
    ]
    together = client.completions.create(model="tiny", prompt=prompts, **GREEDY)
    assert [choice.text for choice in together.choices] == alone
    ids = client.completions.create(model="tiny", prompt=[[1, 9], [1, 10], [1, 11]], **GREEDY)
    assert [choice.index for choice in ids.choices] == [0, 1, 2]
    streamed = [""] * 4
    for chunk in client.completions.create(model="tiny", prompt=prompts, stream=True, **GREEDY):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone


def test_usage_comes_last_when_asked(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=CHAT, stream=True, stream_options=options, **GREEDY
        )
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    whole = client.chat.completions.create(model="tiny", messages=CHAT, **GREEDY)
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    other = list(client.completions.create(model="tiny", prompt="so", stream=True, **GREEDY))
    assert all(chunk.usage is None for chunk in other)


def test_stop_strings_across_tokens_cut_text_and_usage(llm: LLM, client: openai.OpenAI) -> None:
    text = expected(llm, "the rain", GREEDY).text
    stop = text[5:8]
    want = expected(llm, "the rain", {**GREEDY, "stop": stop})
    assert want.text == text[: text.index(stop)]
    whole = client.completions.create(model="tiny", prompt="the rain", stop=stop, **GREEDY)
    choice = whole.choices[0]
    assert (choice.text, choice.finish_reason) == (want.text, "stop")
    assert choice.stop_reason == stop  # type: ignore[attr-defined]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(want.token_ids)
    chunks = list(
        client.completions.create(
            model="tiny", prompt="the rain", stop=[stop], stream=True, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == want.text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_logprobs(llm: LLM, client: openai.OpenAI) -> None:
    want = expected(llm, CHAT, {**GREEDY, "logprobs": 2}).logprobs
    assert want is not None
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "logprobs": True, **GREEDY}
    whole = client.chat.completions.create(top_logprobs=2, **asked)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    assert [entry.logprob for entry in content] == [entry.token.logprob for entry in want]
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [
        [token.logprob for token in entry.top] for entry in want
    ]
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(top_logprobs=2, stream=True, **asked):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == content
    bare = client.chat.completions.create(**asked).choices[0].logprobs
    assert bare is not None
    assert [entry.top_logprobs for entry in bare.content or []] == [[]] * len(want)


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "the rain", **GREEDY, "logprobs": 1}
    plain = client.completions.create(**asked).choices[0]
    echoed = client.completions.create(echo=True, **asked).choices[0]
    assert echoed.text == "the rain" + plain.text
    assert plain.logprobs is not None
    assert echoed.logprobs is not None
    count = len(plain.logprobs.tokens or [])
    assert count == 24
    assert (echoed.logprobs.tokens or [])[-count:] == plain.logprobs.tokens
    assert (echoed.logprobs.token_logprobs or [])[-count:] == plain.logprobs.token_logprobs
    first: list[Any] = list(echoed.logprobs.token_logprobs or [])
    assert first[0] is None, "nothing precedes the first token"
    assert None not in first[1:]
    offsets = echoed.logprobs.text_offset or []
    shown = list(zip(echoed.logprobs.tokens or [], offsets, strict=True))[1:]  # without <s>
    whole = [*(token.isascii() for token, _ in shown), False].index(False)  # parts of characters
    assert whole >= 5
    for token, offset in shown[:whole]:
        assert echoed.text[offset : offset + len(token)] == token

    text, streamed = "", {"tokens": [], "token_logprobs": [], "text_offset": []}  # type: ignore[var-annotated]
    for chunk in client.completions.create(echo=True, stream=True, **asked):
        text += chunk.choices[0].text
        shown = chunk.choices[0].logprobs
        if shown is not None:
            for name in streamed:
                streamed[name] += getattr(shown, name)
    assert text == echoed.text
    assert streamed["tokens"] == echoed.logprobs.tokens
    assert streamed["token_logprobs"] == echoed.logprobs.token_logprobs
    assert streamed["text_offset"] == offsets


def test_an_echo_of_token_ids_is_their_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [1, 100, 101, 102], **GREEDY}
    plain = client.completions.create(**asked).choices[0].text
    echoed = client.completions.create(echo=True, **asked).choices[0].text
    assert echoed.endswith(plain)
    assert "<s>" not in echoed


def test_models_version_and_readiness(server: Server, client: openai.OpenAI) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == ["tiny", "mini"]
    assert cards[0].max_model_len == 8192  # type: ignore[attr-defined]
    assert client.models.retrieve("mini").id == "mini"
    assert client.completions.create(model="mini", prompt="a", max_tokens=1).model == "mini"
    assert server.client.get("/version").json() == {"version": __version__}
    assert server.client.get("/ready").json() == {"ready": True}
    assert server.health()["status"] == "ok"
    schema = server.client.get("/openapi.json").json()
    assert "/v1/chat/completions" in schema["paths"]
    assert "prompt" in schema["components"]["schemas"]["CompletionBody"]["properties"]


def test_a_hundred_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    def ask(index: int) -> str:
        asked: dict[str, Any] = {"model": "tiny", "prompt": [1, 5 + index], "max_tokens": 12}
        if index % 2:
            return client.completions.create(seed=index, **asked).choices[0].text
        stream = client.completions.create(seed=index, stream=True, **asked)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(100) as pool:
        together = list(pool.map(ask, range(100)))
    for index in range(0, 100, 9):
        assert ask(index) == together[index]
