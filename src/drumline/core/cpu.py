"""Which instruction sets this processor offers, by name.

`cpu_features` asks the native module where it is built and reads ``/proc/cpuinfo`` where it is
not; a test holds the two together. The start-up table and ``drumline doctor`` print the answer.
This module knows names and refuses to choose kernels.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

# Our name → the kernel's flag. On ARM the kernel calls NEON "asimd" and the dot product "asimddp".
_FLAGS = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512vl": "avx512vl",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "neon": "asimd",
    "dotprod": "asimddp",
    "i8mm": "i8mm",
    "sve": "sve",
}


def features_from_cpuinfo(text: str) -> dict[str, bool]:
    """The features named in the first processor of a ``/proc/cpuinfo`` text.

    x86 kernels write a line ``flags``, ARM kernels ``Features``. No such line: no features.
    """
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
            return {feature: flag in flags for feature, flag in _FLAGS.items()}
    return dict.fromkeys(_FLAGS, False)


def read_cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, bool]:
    """`features_from_cpuinfo` of this machine; all False where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return features_from_cpuinfo(text)


def native_available() -> bool:
    """Whether the native module was built with this installation."""
    try:
        import_module("drumline._native")
    except ImportError:
        return False
    return True


def cpu_features() -> dict[str, bool]:
    """Instruction set → usable, from the native module or, without it, from the kernel's list."""
    if not native_available():
        return read_cpuinfo()
    features: dict[str, bool] = import_module("drumline._native").cpu_features()
    return features


def native_paths() -> tuple[str, ...]:
    """Instruction-set paths of the compiled operations that run here, best first; () without
    them."""
    if not native_available():
        return ()
    return tuple(import_module("drumline._native").available_paths())
