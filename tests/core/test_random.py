"""Philox against the published known answers, and the laws of keyed draws."""

from __future__ import annotations

import pytest

from drumline.core.random import MASK, Purpose, derive_seed, philox, seed_key, uniform_bits

# The kat_vectors of Random123 (Salmon et al.) for philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (MASK, MASK, MASK, MASK),
        (MASK, MASK),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == expected


def test_four_neighbouring_tokens_share_one_block() -> None:
    block = philox((3, 40, 2, int(Purpose.ACCEPT)), seed_key(99))
    assert tuple(uniform_bits(99, 2, 40, Purpose.ACCEPT, 12 + lane) for lane in range(4)) == block


def test_every_part_of_the_key_matters() -> None:
    base = uniform_bits(1, 0, 0, Purpose.TARGET)
    others = [
        uniform_bits(2, 0, 0, Purpose.TARGET),
        uniform_bits(1 + 2**32, 0, 0, Purpose.TARGET),
        uniform_bits(1, 1, 0, Purpose.TARGET),
        uniform_bits(1, 0, 1, Purpose.TARGET),
        uniform_bits(1, 0, 0, Purpose.DRAFT),
        uniform_bits(1, 0, 0, Purpose.TARGET, token=1),
    ]
    assert len({base, *others}) == 7


def test_seeds_are_keys_modulo_2_64() -> None:
    assert seed_key(0x1122334455667788) == (0x55667788, 0x11223344)
    assert seed_key(-1) == seed_key(2**64 - 1)


def test_derived_seeds_are_the_same_everywhere_and_keep_their_parts_apart() -> None:
    assert derive_seed("engine", 7) == 9369473385666440441
    assert derive_seed("a", "bc") != derive_seed("ab", "c")
    assert 0 <= derive_seed() < 2**64
    assert len({derive_seed(5, number) for number in range(1000)}) == 1000
