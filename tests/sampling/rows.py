"""Rows and logits for the sampling tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from drumline.core.params import SamplingParams
from drumline.core.request import Request
from drumline.sampling.history import SamplingRow

EOS = 2


def make_row(
    number: int = 0,
    prompt: tuple[int, ...] = (5, 6, 7),
    outputs: tuple[int, ...] = (),
    drafts: tuple[int, ...] = (),
    seed: int = 1,
    sample_index: int = 0,
    bad_words: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> SamplingRow:
    request = Request(
        number,
        prompt,
        SamplingParams(**params),
        max_tokens=params.get("max_tokens", 16),
        seed=seed,
        sample_index=sample_index,
        stop_token_ids=frozenset({EOS, *params.get("stop_token_ids", ())}),
        bad_words=bad_words,
    )
    return SamplingRow(request, prompt + outputs, drafts)


def make_logits(rows: int, vocab: int, seed: int = 0, levels: int | None = None) -> torch.Tensor:
    """Normal logits ``[rows, vocab]``; ``levels`` rounds them so that many are tied."""
    values = np.random.default_rng(seed).standard_normal((rows, vocab)) * 3
    if levels is not None:
        values = np.round(values * levels) / levels
    return torch.from_numpy(values.astype(np.float32))


VOCAB = 61
_tokens = st.integers(0, VOCAB - 1)
_temperatures = st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0, 2.5])

params_mappings = st.fixed_dictionaries(
    {"temperature": _temperatures},
    optional={
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999]),
        "top_k": st.sampled_from([-1, 1, 3, 40, 1000]),
        "min_p": st.sampled_from([0.01, 0.2, 1.0]),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.lists(_tokens, max_size=3).map(tuple),
        "logit_bias": st.dictionaries(_tokens, st.floats(-100, 100), max_size=4),
        "allowed_token_ids": st.lists(_tokens, min_size=1, max_size=30).map(tuple),
        "logprobs": st.sampled_from([0, 1, 5, -1]),
    },
)


@st.composite
def sampling_rows(draw: st.DrawFn, number: int = 0) -> SamplingRow:
    return make_row(
        number=number,
        prompt=tuple(draw(st.lists(_tokens, min_size=1, max_size=12))),
        outputs=tuple(draw(st.lists(_tokens, max_size=12))),
        drafts=tuple(draw(st.lists(_tokens, max_size=4))),
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        sample_index=draw(st.integers(0, 3)),
        bad_words=tuple(
            draw(st.lists(st.lists(_tokens, min_size=1, max_size=3).map(tuple), max_size=3))
        ),
        **draw(params_mappings),
    )
