"""The array twin of `core.random`: many keyed draws at once, equal integers to the scalar form.

Philox4x32-10 on uint64 arrays: a product of two 32-bit numbers fits exactly, so every integer is
the one that `core.random.philox` gives, on any machine. Token id v at a position reads lane
v % 4 of counter block v // 4. Knows seeds, positions and token ids; no logits and no requests.

    uniform   (bits + 0.5) / 2**32     in float64, strictly between 0 and 1
    gumbel    -log(-log(uniform))      in float64, rounded to float32
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from drumline.core.random import MASK, MULTIPLIERS, ROUNDS, WEYL, Purpose, seed_key

Words = NDArray[np.uint64]  # each element holds 32 bits
Noise = NDArray[np.float32]

LANES = 4
_M0, _M1 = (np.uint64(multiplier) for multiplier in MULTIPLIERS)
_W0, _W1 = (np.uint64(step) for step in WEYL)
_MASK = np.uint64(MASK)
_HIGH = np.uint64(32)


def philox_words(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike],
    key: tuple[ArrayLike, ArrayLike],
    count: int,
) -> Words:
    """Philox4x32-10 for ``count`` counters, words given as scalars or ``[count]``: ``[4, count]``.

    Works in place on one scratch array: at this size allocation costs more than arithmetic.
    """
    scratch = np.empty((6, count), dtype=np.uint64)
    c0, c1, c2, c3, p0, p1 = scratch
    for lane, word in zip(scratch, counter, strict=False):
        lane[:] = word
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    for _ in range(ROUNDS):
        np.multiply(c0, _M0, out=p0)
        np.multiply(c2, _M1, out=p1)
        np.right_shift(p1, _HIGH, out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, k0, out=c0)
        np.right_shift(p0, _HIGH, out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, k1, out=c2)
        np.bitwise_and(p1, _MASK, out=c1)
        np.bitwise_and(p0, _MASK, out=c3)
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return scratch[:LANES]


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Some token ids, ascending, and where their bits are found among those of their blocks."""

    ids: NDArray[np.int64]  # [n]
    blocks: Words  # [m], the counter blocks that hold them
    places: NDArray[np.int64]  # [n], into the flattened ``[m, 4]``

    @staticmethod
    def of(ids: NDArray[np.int64]) -> TokenTable:
        blocks, inverse = np.unique(ids // LANES, return_inverse=True)
        return TokenTable(ids, blocks.astype(np.uint64), inverse * LANES + ids % LANES)


def token_bits(seed: int, sample: int, position: int, purpose: int, vocab: int) -> Words:
    """The 32 random bits of every token id at one position: ``[vocab]``."""
    blocks = np.arange(-(-vocab // LANES), dtype=np.uint64)
    counter = (blocks, _word(position), _word(sample), _word(purpose))
    lanes = philox_words(counter, seed_key(seed), len(blocks))
    return lanes.T.reshape(-1)[:vocab]


def table_bits(seed: int, sample: int, position: int, purpose: int, table: TokenTable) -> Words:
    """The bits of a table's token ids: ``[len(table.ids)]``."""
    counter = (table.blocks, _word(position), _word(sample), _word(purpose))
    lanes = philox_words(counter, seed_key(seed), len(table.blocks))
    return lanes.T.reshape(-1)[table.places]


def chosen_bits(
    seeds: Sequence[int],
    samples: Sequence[int],
    positions: Sequence[int],
    purposes: int | Sequence[int],
    ids: Sequence[NDArray[np.int64]],
) -> list[Words]:
    """The bits of some token ids per row, all rows in one pass: one ``[len(ids[r])]`` per row.

    ``purposes`` here and elsewhere: `Purpose`, or a word of `core.random.purpose_word`; one for
    all rows, or one each.
    """
    if not ids:
        return []
    counts = [len(chosen) for chosen in ids]
    keys = np.array([seed_key(seed) for seed in seeds], dtype=np.uint64).reshape(-1, 2)
    spread = np.repeat(np.arange(len(ids)), counts)
    tokens = np.concatenate(ids).astype(np.uint64)
    words = np.broadcast_to(np.asarray(purposes, dtype=np.uint64), len(ids))
    lanes = philox_words(
        (
            tokens >> np.uint64(2),
            np.array([_word(position) for position in positions], dtype=np.uint64)[spread],
            np.array([_word(sample) for sample in samples], dtype=np.uint64)[spread],
            words[spread],
        ),
        (keys[spread, 0], keys[spread, 1]),
        len(tokens),
    )
    bits = lanes[tokens & np.uint64(3), np.arange(len(tokens))]
    return np.split(bits, np.cumsum(counts)[:-1])


def uniform_from_bits(bits: Words) -> NDArray[np.float64]:
    """Uniform numbers strictly between 0 and 1, exact in float64."""
    uniform = bits.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-32
    return uniform


def gumbel_from_bits(bits: Words) -> Noise:
    """Standard Gumbel noise (Gumbel 1954), monotonic in the bits."""
    noise = uniform_from_bits(bits)
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise.astype(np.float32)


def gumbel(
    seeds: Sequence[int],
    samples: Sequence[int],
    positions: Sequence[int],
    purpose: Purpose,
    vocab: int,
) -> Noise:
    """The noise of every token id, one row per (seed, sample, position): ``[rows, vocab]``."""
    noise = np.empty((len(seeds), vocab), dtype=np.float32)
    for row, (seed, sample, position) in enumerate(zip(seeds, samples, positions, strict=True)):
        noise[row] = gumbel_from_bits(token_bits(seed, sample, position, purpose, vocab))
    return noise


def _word(value: int) -> int:
    assert 0 <= value <= MASK, "a counter word has 32 bits"
    return value


GUMBEL_MIN, GUMBEL_MAX = (
    float(extreme) for extreme in gumbel_from_bits(np.array([0, MASK], dtype=np.uint64))
)
"""No draw lies outside these, so a token that trails by more than their distance cannot win."""
