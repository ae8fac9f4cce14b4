"""Keyed randomness: a draw is a function of its key and of nothing else (promise P1 (d)).

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", SC 2011): counter-based, so position 900 can be drawn before position 3, on any rank, in
any batch, and gives the same integers. This is the scalar form in plain integers; `sampling`
holds the tensor twin. Nothing here knows what a draw is used for beyond its `Purpose`.

    key      (low, high) 32 bits each: the request's seed
    counter  (token block, position, sample index, purpose + 256 * ahead) 32 bits each

``ahead`` is 0 but for draws whose outcome can matter to a token before their own position, and
which must not come again when that position is reached: block verification looks at all drafts
and all acceptance draws of a window to place its first token. There it is the distance from the
window's start, which makes the draws of overlapping windows independent.
"""

from __future__ import annotations

import enum
import hashlib

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


class Purpose(enum.IntEnum):
    """What a draw is for. Different purposes never share a number."""

    TARGET = 0  # the target's own token at a position, under match acceptance
    DRAFT = 1  # a probabilistic draft
    ACCEPT = 2  # accept or reject, under standard and block acceptance
    RESIDUAL = 3  # the token drawn after a rejection


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit integers from a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0 = MULTIPLIERS[0] * c0
        p1 = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0 = (k0 + WEYL[0]) & MASK
        k1 = (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def seed_key(seed: int) -> tuple[int, int]:
    """A 64-bit seed as a Philox key; negative seeds are taken modulo 2**64."""
    seed &= 2**64 - 1
    return seed & MASK, seed >> 32


def purpose_word(purpose: Purpose, ahead: int = 0) -> int:
    """The counter's last word."""
    assert 0 <= ahead < 1 << 24, "the distance has 24 bits"
    return int(purpose) | ahead << 8


def uniform_bits(
    seed: int, sample: int, position: int, purpose: Purpose, token: int = 0, ahead: int = 0
) -> int:
    """The 32 random bits that belong to one token id at one position of one sample."""
    counter = (token // 4, position, sample, purpose_word(purpose, ahead))
    return philox(counter, seed_key(seed))[token % 4]


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed from named parts, the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
