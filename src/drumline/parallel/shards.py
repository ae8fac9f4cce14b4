"""Which part of each thing a rank of a tensor-parallel group holds, as arithmetic.

    heads        by groups that share keys and values, as even as can be: 9 heads in 3 groups over
                 2 ranks are 3 and 6 heads
    widths       in whole blocks of quantized columns, so that no block is cut
    vocabulary   equal parts, but for the end of the last

Parts are contiguous and ascend with the rank. Knows no tensor and no name of a weight.
"""

from __future__ import annotations

from drumline.core.errors import ConfigError

FIELD = "tensor_parallel_size"


def split(count: int, size: int, rank: int, unit: int = 1) -> range:
    """The part of ``count`` that ``rank`` of ``size`` holds, in whole ``unit``s, of which earlier
    ranks never have more than later ones, and those at most one more."""
    assert 0 <= rank < size
    assert count % unit == 0, (count, unit)
    units = count // unit
    return range(units * rank // size * unit, units * (rank + 1) // size * unit)


def head_split(heads: int, groups: int, size: int, rank: int) -> range:
    """The heads of a rank: whole groups. ConfigError where ranks are more than groups."""
    if size > groups:
        allowed = ", ".join(map(str, range(1, groups + 1)))
        problem = f"the model's {heads} heads lie in {groups} groups; allowed: {allowed}"
        raise ConfigError(FIELD, size, problem)
    return split(heads, size, rank, heads // groups)


def width_split(width: int, size: int, rank: int, block: int) -> range:
    """The columns of a rank, in whole blocks of ``block`` where there is one for each rank, else
    column by column. ConfigError where ranks are more than columns."""
    if size > width:
        raise ConfigError(FIELD, size, f"a width of {width} has not so many parts")
    whole = width % block == 0 and width // block >= size
    return split(width, size, rank, block if whole else 1)


def vocabulary_width(vocab: int, size: int) -> int:
    """Rows of every rank's part; the last one's may be fewer. ConfigError if it would have none."""
    width = -(-vocab // size)
    if (size - 1) * width >= vocab:
        raise ConfigError(FIELD, size, f"a vocabulary of {vocab} has not so many equal parts")
    return width


def vocabulary_split(vocab: int, size: int, rank: int) -> range:
    """The token ids whose rows a rank holds."""
    assert 0 <= rank < size
    width = vocabulary_width(vocab, size)
    return range(rank * width, min((rank + 1) * width, vocab))


def expert_split(count: int, size: int, rank: int) -> range:
    """The experts that member ``rank`` of an ep group holds, as `Mesh.experts` has them; none
    where members are more than experts."""
    return split(count, size, rank)


def experts_max(count: int, size: int) -> int:
    """The most experts that one member holds."""
    return -(-count // size)
