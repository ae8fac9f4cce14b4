"""Ids from hub folders equal those of transformers; from GGUF, those of a tokenizer built here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from drumline.core.errors import CheckpointError, RequestError
from drumline.models.gguf_file import read_gguf
from drumline.models.gguf_tokenizer import gguf_tokenizer
from drumline.models.hub_tokenizer import hub_tokenizer
from drumline.models.tiny import write_tiny
from drumline.models.tokenizer import Tokenizer

ALPHABETS = [
    "abcdefghij ABC'sdmtlrve",
    "0123456789.,:-+ ٣४௧Ⅷ½²",
    " \t\n\r\u00a0\u2003\u3000\u200b",
    "éüßñçøåæłžΑβγДжяאבאل",
    "日本語テキスト中文한국어ไทย",
    "🙂🙃👩‍👩‍👧🏽🇫🇷✈️",
    "!?()[]{}<>|/\\\"'`~@#$%^&*_=;",
    "e\u0301a\u0308o\u0302ﬁ\u1e9b\u0323",
    "\x00\x01\x1f\x7f\u0085\ufeff\ufffd",
]
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<file_sep>"]


def strings(count: int = 1000, seed: int = 0) -> list[str]:
    """Words of one or several alphabets with special tokens strewn in; the first is empty."""
    rng = random.Random(seed)
    result = ["", " ", "\n\n\n", "12345678901234567890", "I'll we've IT'S", "<|im_start|>" * 3]
    while len(result) < count:
        alphabets = rng.sample(ALPHABETS, rng.choice([1, 1, 2, 3]))
        pieces = []
        for _ in range(rng.randint(1, 12)):
            letters = rng.choice(alphabets)
            pieces.append("".join(rng.choice(letters) for _ in range(rng.randint(1, 8))))
            if rng.random() < 0.08:
                pieces.append(rng.choice(SPECIALS))
            if rng.random() < 0.5:
                pieces.append(" " * rng.randint(1, 3))
        result.append("".join(pieces))
    return result


def conversations() -> list[list[dict[str, str]]]:
    user = {"role": "user", "content": "Hi there, 42 🙂"}
    system = {"role": "system", "content": "Be brief.\n"}
    reply = {"role": "assistant", "content": " Hello! "}
    again = {"role": "user", "content": "<|im_end|> and 2+2?"}
    return [[user], [system, user], [user, reply, again], [system, user, reply, again]]


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny(request.param, tmp_path, seed=1, vocab=600)


def test_hub_ids_equal_those_of_transformers(folder: Path) -> None:
    ours, theirs = hub_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in strings():
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                decoded = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == decoded
    for messages in conversations():
        for prompt in (True, False):
            text = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == text
            ids = theirs.apply_chat_template(
                messages, add_generation_prompt=prompt, return_dict=False
            )
            assert ours.encode_chat(messages, add_generation_prompt=prompt) == ids


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text())
    for key, change in changes.items():
        if change is None:
            value.pop(key, None)
        else:
            value[key] = change
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("template_has_bos", [False, True])
@pytest.mark.parametrize("tokenizer_adds_bos", [False, True])
def test_bos_is_there_exactly_once(
    template_has_bos: bool, tokenizer_adds_bos: bool, tmp_path: Path
) -> None:
    folder = write_tiny("llama" if tokenizer_adds_bos else "qwen2", tmp_path, seed=1)
    settings = folder / "tokenizer_config.json"
    template = json.loads(settings.read_text())["chat_template"].replace("{{ bos_token }}", "")
    edit(settings, chat_template=("{{ bos_token }}" if template_has_bos else "") + template)
    tokenizer = hub_tokenizer(folder)
    assert tokenizer.adds_bos is tokenizer_adds_bos
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    expected = int(template_has_bos or tokenizer_adds_bos)
    assert ids.count(1) == expected
    assert ids[:expected] == [1][:expected]
    assert tokenizer.encode("hi").count(1) == int(tokenizer_adds_bos)


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    folder = write_tiny("qwen2", tmp_path, seed=1)
    added = {"128": {"content": "<tool>", "special": False, "normalized": False}}
    extra = ["<|extra|>"]
    edit(
        folder / "tokenizer_config.json",
        added_tokens_decoder=added,
        additional_special_tokens=extra,
    )
    ours, theirs = hub_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("a<tool>b<|extra|>c", "<tool> <|extra|>"):
        assert ours.encode(text) == theirs.encode(text)
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_templates_from_every_place(tmp_path: Path) -> None:
    folder = write_tiny("qwen2", tmp_path, seed=1)
    user = [{"role": "user", "content": "x"}]
    named = [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": "tools {{ tools | tojson }}"},
    ]
    edit(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = hub_tokenizer(folder)
    assert tokenizer.apply_chat_template(user) == "plain x"
    assert tokenizer.apply_chat_template(user, tools=[{"a": "<é>"}]) == 'tools [{"a": "<é>"}]'
    (folder / "chat_template.jinja").write_text("file {{ eos_token }} {{ thinking }}")
    assert hub_tokenizer(folder).apply_chat_template(user, thinking=True) == "file <|im_end|> True"
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=None)
    tokenizer = hub_tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="messages: the checkpoint has no chat template"):
        tokenizer.apply_chat_template(user)


TEMPLATES = [
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m['content'] | trim }}\n"
    "  {% endif %}\n{% endfor %}",
    "{% generation %}{{ messages | tojson(indent=2) }}{% endgeneration %}!",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.n }}{{ strftime_now('') }}",
    "{{- messages[-1]['content'].split(' ')[0].upper() -}}  {{ tools }}{{ documents }}",
    "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(template: str, tmp_path: Path) -> None:
    folder = write_tiny("qwen2", tmp_path, seed=1)
    edit(folder / "tokenizer_config.json", chat_template=template)
    ours, theirs = hub_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for messages in conversations():
        assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system turn') }}", "the chat template says: no system turn"),
        ("{{ messages[0].content + 1 }}", "the chat template says: can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "the chat template says: access to attribute '__class__'"),
        ("{% set _ = messages.append(1) %}", "the chat template says: access to attribute"),
    ],
)
def test_what_a_template_does_wrong_is_one_line(
    template: str, message: str, tmp_path: Path
) -> None:
    folder = write_tiny("qwen2", tmp_path, seed=1)
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(RequestError) as caught:
        hub_tokenizer(folder).apply_chat_template([{"role": "user", "content": "x"}])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_tokenizers_are_checkpoint_errors(tmp_path: Path) -> None:
    folder = write_tiny("qwen2", tmp_path, seed=1)
    edit(folder / "tokenizer_config.json", chat_template="{% if %}")
    with pytest.raises(CheckpointError, match="chat template, line 1: "):
        hub_tokenizer(folder).apply_chat_template([])
    edit(folder / "tokenizer_config.json", chat_template=3)
    with pytest.raises(CheckpointError, match="chat_template: expected a string or a list"):
        hub_tokenizer(folder)
    for broken in ({"added_tokens_decoder": [1]}, {"bos_token": {"x": 1}}, {"chat_template": [{}]}):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        edit(folder / "tokenizer_config.json", **{"chat_template": "x", **broken})
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: malformed: "):
            hub_tokenizer(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer: "):
        hub_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        hub_tokenizer(folder)


def test_another_template_can_be_put_in_place(tmp_path: Path) -> None:
    tokenizer = hub_tokenizer(write_tiny("qwen2", tmp_path, seed=1))
    other = tokenizer.with_chat_template("{{ bos_token }}{{ messages[0].content }}")
    user = [{"role": "user", "content": "x"}]
    assert other.apply_chat_template(user) == "<s>x"
    assert tokenizer.apply_chat_template(user) != "<s>x"
    assert other.encode("abc") == tokenizer.encode("abc")


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    tokenizer = hub_tokenizer(write_tiny("qwen2", tmp_path, seed=1))
    with pytest.raises(RequestError, match="prompt: text is not valid Unicode: lone surrogate at"):
        tokenizer.encode("ok \ud83d")


# ---- GGUF


def independent(metadata: dict[str, Any], pre: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    for token, kind in zip(vocabulary, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind == 3:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.mark.model
def test_smollm2_ids_equal_those_of_a_tokenizer_built_from_its_file(smollm2_path: Path) -> None:
    file = read_gguf(smollm2_path)
    ours = gguf_tokenizer(smollm2_path, file.metadata)
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs = independent(file.metadata, pre_tokenizers.Sequence([digits, words]))
    for text in strings(seed=1):
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids, text
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)
    assert not ours.adds_bos
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (1, 2, 49152)
    system = "<|im_start|>system\n"
    for messages in conversations():
        text = ours.apply_chat_template(messages)
        assert text.startswith(system)  # the template brings one where the messages have none
        assert text.endswith("<|im_start|>assistant\n")
        assert ours.encode_chat(messages) == theirs.encode(text).ids
        assert ours.encode_chat(messages)[0] == 1
        assert ours.encode_chat(messages)[1] != 1


def gguf_metadata(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A GGUF tokenizer made of a miniature hub one."""
    folder = write_tiny("llama", tmp_path, seed=1, vocab=600)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 5 + [1] * (len(tokens) - 5),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    return {key: value for key, value in metadata.items() if value is not None}


LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "default", None])
def test_other_pre_tokenizers(pre: str | None, tmp_path: Path) -> None:
    metadata = gguf_metadata(tmp_path, pre=pre)
    ours = gguf_tokenizer(Path("x.gguf"), metadata)
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps: dict[str | None, list[Any]] = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), spell],
        "qwen2": [
            pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
            spell,
        ],
        "default": [
            pre_tokenizers.Split(Regex(r"[\p{P}\$\+<=>\^~\|]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ],
    }
    theirs = independent(metadata, pre_tokenizers.Sequence(steps[pre or "default"]))
    if pre == "qwen2":
        theirs.normalizer = tokenizers.normalizers.NFC()
    for text in strings(300, seed=2):
        if pre in ("default", None) and any(c.isnumeric() for c in text):
            continue  # digits are cut further, checked below
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text).ids, text
    assert ours.adds_bos is (pre == "llama-bpe")


def test_the_default_split_cuts_digits_in_threes(tmp_path: Path) -> None:
    metadata = gguf_metadata(tmp_path, pre="default")
    backend = gguf_tokenizer(Path("x.gguf"), metadata)._backend
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a 12345678, b")]
    assert pieces == ["a", "Ġ", "123", "456", "78", ",", "Ġb"]


def test_bos_and_eos_as_the_metadata_asks(tmp_path: Path) -> None:
    metadata = gguf_metadata(tmp_path, add_bos_token=True, add_eos_token=True)
    tokenizer = gguf_tokenizer(Path("x.gguf"), metadata)
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("a")[-1] == 2
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).count(1) == 1
    assert tokenizer.decode(tokenizer.encode("a é")) == "a é"
    theirs = processors.TemplateProcessing(
        "<s> $A <|im_end|>", None, [("<s>", 1), ("<|im_end|>", 2)]
    )
    backend = independent(metadata, pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.post_processor = theirs
    assert tokenizer.encode("one two") == backend.encode("one two").ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model 'llama': not supported; supported is gpt2"),
        ({"pre": "klingon"}, "tokenizer.ggml.pre 'klingon': not supported; supported are default"),
        ({"tokens": None}, "tokenizer.ggml.tokens: missing or not a list of strings"),
        ({"merges": None}, "tokenizer.ggml.merges: missing or not a list of strings"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges: 'ab' is not a pair"),
        ({"merges": ["zz qq"]}, "tokenizer.ggml.merges: "),
        ({"token_type": [1]}, "tokenizer.ggml.token_type: expected 600 entries"),
        ({"eos_token_id": 600}, "tokenizer.ggml.eos_token_id 600: outside the vocabulary of 600"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id: missing, and the tokenizer"),
        ({"add_space_prefix": True}, "tokenizer.ggml.add_space_prefix True: not supported"),
    ],
)
def test_what_a_gguf_tokenizer_refuses(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        gguf_tokenizer(Path("x.gguf"), gguf_metadata(tmp_path, **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_is_shared_without_being_changed(tmp_path: Path) -> None:
    tokenizer: Tokenizer = hub_tokenizer(write_tiny("qwen2", tmp_path, seed=1))
    first = [tokenizer.encode(text) for text in strings(50)]
    assert first == [tokenizer.encode(text) for text in strings(50)]
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**6) == b""
