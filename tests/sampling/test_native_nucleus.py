"""Compiled draws under top_p, which prove a winner instead of sorting, against the numpy form.

Rows are made so that the winner stands where it is hard: at the edge of the nucleus, just inside
and just outside of it, among ties, with hardly any or hardly no token as likely as the best.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("drumline._native", reason="the native module was not built")

from drumline._native import available_paths
from drumline.core.params import SamplingParams
from drumline.core.request import Request
from drumline.sampling.draft import DraftSampler
from drumline.sampling.draw import LogitDraw, draw_tokens
from drumline.sampling.history import SamplingRow
from drumline.sampling.native_draw import PROVED, SORTED, WHOLE, NativeDrawer
from drumline.sampling.order import sorted_ids
from sampling.rows import make_row

PATHS = available_paths()
Logits = NDArray[np.float32]


def make_logits(rng: np.random.Generator, kind: str, count: int) -> Logits:
    logits = rng.standard_normal(count) * 2.5
    if kind == "equal":
        logits[:] = 1.25
    elif kind == "flat":
        logits *= 0.01
    elif kind == "peaked":
        logits[int(rng.integers(count))] += 25.0
    elif kind == "levels":
        logits = np.round(logits)
        logits[rng.random(count) < 0.1] = -0.0
    elif kind == "banned":
        logits[rng.random(count) < 0.9] = -np.inf
        logits[int(rng.integers(count))] = 0.5
    elif kind == "wide":
        logits *= 4.0
    return logits.astype(np.float32)


def make_draw(logits: Logits, seed: int, sharpening: float = 1.0, **params: float) -> LogitDraw:
    request = Request(
        number=1,
        prompt_token_ids=(1,),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        max_tokens=10,
        seed=seed,
    )
    row = SamplingRow(request, [1] * 7)
    return LogitDraw(row, logits, float(logits.max()), sharpening=sharpening)


def share_before(draw: LogitDraw) -> tuple[int, float]:
    """The place of the draw, and the share of the mass that stands before it in the order."""
    (place,) = draw_tokens([draw])
    places = np.arange(len(draw.logits)) if draw.kept is None else draw.kept
    ordered = sorted_ids(draw.logits, places)
    scaled = np.subtract(draw.logits[ordered], draw.maximum, dtype=np.float64)
    weights = np.exp(scaled / draw.row.request.params.temperature)
    at = int(np.flatnonzero(ordered == place)[0])
    return place, float(weights[:at].sum() / weights.sum())


def at_the_edge(draw: LogitDraw, off: float) -> tuple[LogitDraw, int] | None:
    """The draw with a top_p whose nucleus ends where its own winner stands, longer by the share
    ``off`` of itself, and that winner. None where there is no such nucleus."""
    place, share = share_before(draw)
    top_p = share * (1 + off)
    if not 0.0 < top_p < 1.0:
        return None
    request = draw.row.request
    params = replace(request.params, top_p=top_p)
    row = replace(draw.row, request=replace(request, params=params))
    return replace(draw, row=row), place


@pytest.mark.parametrize("path", PATHS)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["normal", "equal", "flat", "peaked", "levels", "banned", "wide"]),
    count=st.sampled_from([2, 15, 16, 17, 33, 300, 4099]),
    off=st.sampled_from([-0.3, -3e-2, -1e-3, -1e-4, -1e-6, 1e-6, 1e-4, 1e-3, 3e-2]),
    temperature=st.sampled_from([1e-3, 0.5, 0.8, 1.0, 3.0, 100.0]),
    limits=st.sampled_from([{}, {}, {"top_k": 40}, {"min_p": 1e-3}, {"min_p": 0.2, "top_k": 300}]),
    sharpening=st.sampled_from([1.0, 1.0, 1.3, 4.0]),
)
@settings(max_examples=300, deadline=None)
def test_a_winner_at_the_edge_of_the_nucleus(
    path: str,
    seed: int,
    kind: str,
    count: int,
    off: float,
    temperature: float,
    limits: dict[str, float],
    sharpening: float,
) -> None:
    logits = make_logits(np.random.default_rng(seed), kind, count)
    whole = make_draw(logits, seed, sharpening, temperature=temperature, **limits)
    edge = at_the_edge(whole, off)
    draws = [whole] if edge is None else [whole, edge[0]]
    drawer = NativeDrawer(path)
    assert drawer(draws) == draw_tokens(draws)
    assert drawer.ways[0] == WHOLE
    assert set(drawer.ways[1:]) <= {PROVED, SORTED}


@cache
def rows_of_a_draft() -> list[LogitDraw]:
    """Rows as flat as a drafter's: hundreds of tokens in a nucleus of 0.9."""
    rng = np.random.default_rng(8)
    return [
        make_draw(make_logits(rng, "normal", 12_288), seed, temperature=0.8) for seed in range(60)
    ]


@pytest.mark.parametrize("path", PATHS)
def test_each_way_is_gone_where_it_is_meant(path: str) -> None:
    """A winner well inside is proved; one well outside makes room for another, which is proved as
    well; one at the edge asks for sorting. Numpy takes the same place each time."""
    drawer = NativeDrawer(path)

    def ways(off: float) -> tuple[Counter[int], int]:
        """How often each way was gone, and how often the winner of all tokens won again."""
        edges = [edge for draw in rows_of_a_draft() if (edge := at_the_edge(draw, off))]
        draws, winners = [draw for draw, _ in edges], [place for _, place in edges]
        assert len(draws) > 40
        places = drawer(draws)
        assert places == draw_tokens(draws)
        again = sum(one == other for one, other in zip(places, winners, strict=True))
        assert again == (len(draws) if off > 0 else 0)
        return Counter(drawer.ways), len(draws)

    for off in (-1e-6, 1e-6):
        found, count = ways(off)
        assert found[SORTED] == count
    for off in (-0.1, 0.1):
        found, count = ways(off)
        assert found[PROVED] > 0.9 * count


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 0.99, 0.9999, 1 - 1e-9])
def test_hardly_a_draw_is_sorted(path: str, top_p: float) -> None:
    """Of 12,288 tokens: sorting would be no less right, but slow. Up to where a nucleus is all but
    everything, which no bound tells from everything."""
    drawer = NativeDrawer(path)
    draws = [
        make_draw(draw.logits, seed, 1.3, temperature=0.8, top_p=top_p)
        for seed, draw in enumerate(rows_of_a_draft())
    ]
    assert drawer(draws) == draw_tokens(draws)
    found = Counter(drawer.ways)
    assert found[SORTED] <= 2 if top_p < 0.99997 else found[SORTED] == len(draws)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [1e-300, 1e-31, 1e-29, 1e-6, 100.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e37])
def test_temperatures_and_logits_of_any_size(path: str, temperature: float, scale: float) -> None:
    rng = np.random.default_rng(2)
    draws = []
    for seed, kind in enumerate(["normal", "equal", "levels", "banned", "peaked"] * 4):
        logits = make_logits(rng, kind, 200) * np.float32(scale)
        draws.append(make_draw(logits, seed, temperature=temperature, top_p=0.7))
    drawer = NativeDrawer(path)
    assert drawer(draws) == draw_tokens(draws)
    assert set(drawer.ways) == ({PROVED} if temperature >= 1e-30 else {SORTED})


@pytest.mark.parametrize("path", PATHS)
def test_a_nucleus_that_ends_among_equals(path: str) -> None:
    """Of n equal tokens the first k are the nucleus, up to the very k where sums are whole."""
    logits = np.full(640, 3.5, dtype=np.float32)
    drawer = NativeDrawer(path)
    for share in (1, 5, 8, 320, 333, 639):
        draws = [make_draw(logits, seed, temperature=0.8, top_p=share / 640) for seed in range(40)]
        places = drawer(draws)
        assert places == draw_tokens(draws)
        assert max(places) < share
    assert len(set(places)) > 30


@pytest.mark.parametrize("path", PATHS)
@given(
    seed=st.integers(0, 2**32),
    table=st.booleans(),
    top_p=st.sampled_from([0.3, 0.9, 0.99]),
    edits=st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.sampled_from([0.5, 1.4]),
            "presence_penalty": st.sampled_from([-2.0, 1.5]),
            "logit_bias": st.just({3: 9.0, 8: -100.0, 400: 5.0}),
            "allowed_token_ids": st.just(tuple(range(2, 900, 3))),
            "min_tokens": st.just(12),
            "min_p": st.just(0.01),
            "top_k": st.just(200),
        },
    ),
)
@settings(max_examples=60, deadline=None)
def test_rows_that_bans_and_penalties_have_edited(
    path: str, seed: int, table: bool, top_p: float, edits: dict[str, object]
) -> None:
    vocab = 900
    rng = np.random.default_rng(seed)
    outputs = tuple(int(token) for token in rng.integers(vocab, size=10))
    rows = [
        make_row(number, outputs=outputs, seed=seed, temperature=0.9, top_p=top_p, **edits)
        for number in range(3)
    ]
    ids = np.flatnonzero(rng.random(vocab) < 0.6) if table else None
    width = vocab if ids is None else len(ids)
    logits = torch.from_numpy((rng.standard_normal((3, width)) * 2).astype(np.float32))
    plain = DraftSampler(vocab, token_table=ids).draw(logits, rows)
    drawn = DraftSampler(vocab, token_table=ids, drawer=NativeDrawer(path)).draw(logits, rows)
    assert drawn == plain
