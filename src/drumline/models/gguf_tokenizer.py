"""Tokenizers of GGUF files: byte-level BPE from the file's vocabulary and merges.

Which pre-tokenizer splits the text first is named by ``tokenizer.ggml.pre``. The expressions
below are those that llama.cpp documents for the names; an unknown name is refused, because a
wrong split gives wrong ids without any other sign.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from drumline.core.errors import CheckpointError
from drumline.models.config import Fields
from drumline.models.tokenizer import Tokenizer, frame

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_pre_tokenizer(*expressions: str) -> pre_tokenizers.PreTokenizer:
    """Cuts at each expression in turn, then spells the pieces as bytes."""
    steps = [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in expressions]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, spell])


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit on its own, then GPT-2's split."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": lambda: split_pre_tokenizer(
        r"[\p{P}\$\+<=>\^~\|]+",
        _GPT2,
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
    "gpt-2": lambda: split_pre_tokenizer(_GPT2),
    "smollm": _smollm,
    "llama-bpe": lambda: split_pre_tokenizer(_LLAMA3),
    "llama3": lambda: split_pre_tokenizer(_LLAMA3),
    "qwen2": lambda: split_pre_tokenizer(QWEN2_SPLIT),
}
_WHOLE_WORDS = ("llama-bpe", "llama3")  # a piece that is a token needs no merges; BOS by default

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def gguf_tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    """Builds the tokenizer from ``tokenizer.*`` metadata. CheckpointError names what is
    missing, contradicts itself or is not supported (sentencepiece models, unknown splits)."""
    fields = Fields(path, metadata)
    model = fields.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise fields.fail(
            "tokenizer.ggml.model", "not supported; supported is gpt2 (byte-level BPE)"
        )
    pre = fields.text("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise fields.fail("tokenizer.ggml.pre", f"not supported; supported are {known}")
    if fields.flag("tokenizer.ggml.add_space_prefix"):
        raise fields.fail("tokenizer.ggml.add_space_prefix", "not supported with byte-level BPE")
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(path, f"tokenizer.ggml.token_type: expected {len(tokens)} entries")
    backend = _backend(path, tokens, _merges(fields), pre)
    kinds = list(zip(tokens, types, strict=True))
    control = [token for token, kind in kinds if kind in (_UNKNOWN, _CONTROL)]
    plain = [token for token, kind in kinds if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])

    special: dict[str, str] = {}
    for name, key in _NAMED.items():
        token_id = fields.optional_integer(key)
        if token_id is not None:
            if token_id >= len(tokens):
                raise fields.fail(key, f"outside the vocabulary of {len(tokens)}")
            special[name] = tokens[token_id]
    add_bos = fields.flag("tokenizer.ggml.add_bos_token", pre in _WHOLE_WORDS)
    add_eos = fields.flag("tokenizer.ggml.add_eos_token")
    for asked, name in ((add_bos, "bos_token"), (add_eos, "eos_token")):
        if asked and name not in special:
            raise fields.fail(_NAMED[name], "missing, and the tokenizer is to add it")
    frame(
        backend,
        special["bos_token"] if add_bos else None,
        special["eos_token"] if add_eos else None,
    )
    prefix = "tokenizer.chat_template"
    templates = {
        "default" if key == prefix else key.removeprefix(prefix + "."): str(value)
        for key, value in metadata.items()
        if key == prefix or key.startswith(prefix + ".")
    }
    return Tokenizer(backend, path, special_tokens=special, chat_templates=templates)


def _backend(
    path: Path, tokens: list[str], merges: list[tuple[str, str]], pre: str
) -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if vocabulary[t] != i)
        raise CheckpointError(path, f"tokenizer.ggml.tokens: {twice!r} occurs twice")
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS)
    except Exception as error:  # the library raises plain Exception
        reason = " ".join(str(error).split())
        raise CheckpointError(path, f"tokenizer.ggml.merges: {reason}") from None
    backend = tokenizers.Tokenizer(model)
    if pre == "qwen2":  # as the models were trained; other pre-tokenizers take text as it is
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise CheckpointError(fields.path, f"{key}: missing or not a list of strings")
    return value


def _merges(fields: Fields) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in _strings(fields, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise CheckpointError(fields.path, f"tokenizer.ggml.merges: {merge!r} is not a pair")
        merges.append((left, right))
    return merges
