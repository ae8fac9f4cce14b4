"""Quality against the reference: what is equal counts as equal, what is worse is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drumline import LLM, ConfigError
from drumline.bench.quality import OPENERS, Quality, Reader, Text, compare, measure_quality
from drumline.core.cpu import native_available
from drumline.models.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tiny_path: Callable[..., Path]) -> Checkpoint:
    return open_checkpoint(tiny_path())


def texts(checkpoint: Checkpoint, lengths: tuple[int, ...]) -> list[Text]:
    draw = torch.Generator().manual_seed(1)
    vocab = checkpoint.config.vocab_size
    return [
        Text(tuple(torch.randint(0, vocab, (length,), generator=draw).tolist()), first)
        for first, length in enumerate(lengths, 1)
    ]


class Shifted(Reader):
    """A backend that adds ``noise`` to the logits of every second token."""

    noise = 0.0

    def logits(self, sequence: tuple[int, ...], first: int) -> Tensor:  # type: ignore[override]
        out = super().logits(sequence, first)
        out[:, ::2] += self.noise
        return out


def test_a_backend_agrees_with_itself_and_not_with_noise(checkpoint: Checkpoint) -> None:
    reference = Reader.load(checkpoint, "reference", "float32")
    greedy, drawn = texts(checkpoint, (5, 17, 18)), texts(checkpoint, (40, 33))
    same = compare(greedy, drawn, reference, reference)
    assert (same.positions, same.text_tokens) == (4 + 15 + 15, 39 + 31)
    assert (same.agreement, same.divergence, same.perplexity_change) == (1.0, 0.0, 0.0)
    assert same.failures() == []
    noisy = Shifted(reference.model, reference.ops, "float32")
    noisy.noise = 3.0
    worse = compare(greedy, drawn, noisy, reference)
    assert worse.agreement < 0.9
    assert worse.divergence > 0.1
    assert len(worse.failures()) == 3


def test_logits_belong_to_the_token_before(checkpoint: Checkpoint) -> None:
    """What is read of a text's second half does not depend on where reading it began."""
    reader = Reader.load(checkpoint, "reference", "float32")
    [text] = texts(checkpoint, (20,))
    with torch.inference_mode():
        whole, half = reader.logits(text.tokens, 1), reader.logits(text.tokens, 12)
        other = reader.logits((*text.tokens[:-1], text.tokens[-1] ^ 1), 1)
    assert whole.shape[0] == 19
    assert torch.equal(whole[11:], half)
    assert torch.equal(whole, other), "the last token is foretold, not read"


def test_what_is_not_a_number_fails() -> None:
    good = Quality("native", 10, 1.0, 0.0, 10, 5.0, 5.0)
    assert good.failures() == []
    for bad in (
        Quality("native", 10, 0.96, 0.0, 10, 5.0, 5.0),
        Quality("native", 10, 1.0, math.nan, 10, 5.0, 5.0),
        Quality("native", 10, 1.0, 0.0, 10, math.nan, 5.0),
        Quality("native", 10, 1.0, 0.0, 10, 4.9, 5.0),
    ):
        assert len(bad.failures()) == 1
        assert bad.as_json()["failures"] == bad.failures()


@pytest.mark.skipif(not native_available(), reason="the native module is not built")
def test_native_operations_keep_the_models_answers(tiny_path: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_path()), threads=1, max_num_seqs=8, ops_backend="native")
    quality = measure_quality(llm, greedy_length=4, drawn_length=9)
    assert (quality.positions, quality.text_tokens) == (4 * len(OPENERS), 9 * len(OPENERS))
    assert quality.failures() == []
    with pytest.raises(ConfigError, match="output_len"):
        measure_quality(llm, greedy_length=10**6)


def test_the_reference_is_not_measured_against_itself(tiny_path: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_path()), threads=1, ops_backend="reference")
    with pytest.raises(ConfigError, match="measured against"):
        measure_quality(llm)
