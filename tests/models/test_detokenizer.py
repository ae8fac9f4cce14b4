"""Incremental detokenizing equals whole decoding, never cuts a character, skips what is special."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from drumline.core.errors import CheckpointError
from drumline.models.tokenizer import BYTE_ALPHABET, IncrementalDetokenizer, Tokenizer

SPELLING = {byte: char for char, byte in BYTE_ALPHABET.items()}
PIECES = ["he", "ll", "Ġw", SPELLING[0xF0] + SPELLING[0x9F], SPELLING[0x99] + SPELLING[0x82]]


def byte_level() -> Tokenizer:
    """Ids 0..255 are bytes, then PIECES (two of them halves of 🙂), then two added tokens."""
    words = [SPELLING[byte] for byte in range(256)] + PIECES
    backend = Backend(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<｜tool▁call｜>", special=False)])
    return Tokenizer(backend, Path("byte-level"))


def sentencepiece(strip: bool = True) -> Tokenizer:
    """Ids 0..255 are byte fallbacks, then words with ▁, then a special token."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁Hello", "▁", "wor", "ld", "▁é"]
    backend = Backend(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, Path("sentencepiece"))


def in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(detokenizer.push(ids[at : at + cut]))
        at += cut
    return [*pieces, detokenizer.push(ids[at:]), detokenizer.flush()]


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
IDS = st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40)
CUTS = st.lists(st.integers(0, 5), max_size=12)


@settings(max_examples=400, deadline=None)
@given(ids=IDS, cuts=CUTS, skip=st.booleans())
def test_pieces_concatenate_to_the_whole(ids: list[int], cuts: list[int], skip: bool) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        pieces = in_pieces(tokenizer, ids, cuts, skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    theirs = BYTE_LEVEL._backend.decode(ids, skip_special_tokens=skip)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=skip) == theirs


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=20), cuts=CUTS)
def test_no_replacement_character_for_what_completes_later(text: str, cuts: list[int]) -> None:
    ids = list(text.encode())  # one token a byte: every character is split everywhere
    for tokenizer in (BYTE_LEVEL, sentencepiece(strip=False)):
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push([token]) for token in ids]
        assert "".join(pieces) == text
        assert detokenizer.flush() == ""
        assert "".join(in_pieces(tokenizer, ids, cuts, skip=True)) == text


def test_an_emoji_in_two_tokens_appears_with_the_second() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert [detokenizer.push([i]) for i in (256, 259, 260, 257)] == ["he", "", "🙂", "ll"]
    assert detokenizer.push([259]) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.push([256]) == "he"


def test_special_tokens_are_skipped_or_shown() -> None:
    end, call = BYTE_LEVEL._backend.token_to_id("<|end|>"), 262
    assert BYTE_LEVEL.special_ids == {end}
    assert BYTE_LEVEL.decode([256, end, call]) == "he<｜tool▁call｜>"
    assert BYTE_LEVEL.decode([256, end], skip_special_tokens=False) == "he<|end|>"
    # One between the halves of a character does not break it when it is skipped.
    assert BYTE_LEVEL.decode([259, end, 260]) == "🙂"


def test_sentencepiece_drops_one_space_at_the_start() -> None:
    ids = [256, 257, 258, 259, 260]
    assert SENTENCEPIECE.decode(ids) == "Hello world é" == SENTENCEPIECE._backend.decode(ids)
    assert sentencepiece(strip=False).decode(ids) == " Hello world é"
    assert SENTENCEPIECE.token_bytes(0xE2) == b"\xe2"


def test_an_unknown_decoder_is_refused() -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="x: tokenizer decoder WordPiece is not supported"):
        Tokenizer(backend, Path("x"))
