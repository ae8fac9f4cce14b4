"""Cosine and sine tables for rotary position embeddings, one row a position.

    angle[p, i] = float32(p) * inv_freq[i]         both float32, as transformers multiplies them
    cos, sin    = evaluated in float64, rounded to float32, times YaRN's attention factor

The scalings: linear (kaiokendev), dynamic NTK (bloc97, emozilla) with its base fixed from
max_model_len, llama3 (Llama 3.1), yarn (Peng et al. 2023, arXiv:2309.00071), factors (GGUF).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from drumline.models.config import ArchitectureConfig, RopeScaling
from drumline.ops.base import RopeTable


def build_rope(config: ArchitectureConfig, max_model_len: int, device: torch.device) -> RopeTable:
    """The table for positions ``0..max_model_len - 1``: ``[max_model_len, rotary_dim / 2]``.

    Under dynamic NTK scaling the base is `ArchitectureConfig.fixed_rope_base`, which is also how
    a caller learns of it.
    """
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angles = (positions[:, None] * inverse_frequencies(config, max_model_len)[None, :]).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    if config.rope_scaling is not None and config.rope_scaling.attention_factor != 1.0:
        cos = cos * config.rope_scaling.attention_factor
        sin = sin * config.rope_scaling.attention_factor
    return RopeTable(cos.to(device), sin.to(device))


def inverse_frequencies(config: ArchitectureConfig, max_model_len: int) -> Tensor:
    """Radians a position, ``[rotary_dim / 2]`` float32."""
    dim, scaling = config.rotary_dim, config.rope_scaling
    base = config.fixed_rope_base(max_model_len) or config.rope_theta
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    plain = 1.0 / powers
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "factors":
        return plain / torch.tensor(scaling.factors, dtype=torch.float32)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    assert scaling.kind == "yarn", scaling.kind
    return _yarn(powers, scaling, base, dim)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves slow down by the factor, short ones stay, those between are blended."""
    wavelength = 2 * math.pi / plain
    length, low, high = scaling.original_length, scaling.low_freq_factor, scaling.high_freq_factor
    slowed = plain / scaling.factor
    share = (length / wavelength - low) / (high - low)  # how much of the plain frequency to keep
    blended = (1 - share) * slowed + share * plain
    result = torch.where(wavelength > length / low, slowed, plain)
    between = (wavelength <= length / low) & (wavelength >= length / high)
    return torch.where(between, blended, result)


def _yarn(powers: Tensor, scaling: RopeScaling, base: float, dim: int) -> Tensor:
    """Interpolates dimensions that turn less than beta_slow times over the original length,
    keeps those that turn more than beta_fast times, and ramps between (section 3.2)."""

    def dimension(turns: float) -> float:
        ratio = scaling.original_length / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, float(dim - 1))
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep
