"""The native list of instruction sets and its slow twin name the same ones."""

from __future__ import annotations

import pytest

from drumline.core.cpu import cpu_features, features_from_cpuinfo, native_available, read_cpuinfo

ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm aes asimddp i8mm\n"
X86 = "processor\t: 0\nflags\t\t: fpu avx avx2 fma avx512f avx512_vnni\n\nprocessor\t: 1\n"


def test_native_and_python_agree() -> None:
    if not native_available():
        pytest.skip("the native module is not built here")
    from drumline._native import cpu_features as native

    assert native() == read_cpuinfo()
    assert list(native()) == list(read_cpuinfo())


def test_the_answer_has_the_same_names_everywhere() -> None:
    assert set(cpu_features()) == set(features_from_cpuinfo(""))


def test_reading_cpuinfo() -> None:
    x86 = features_from_cpuinfo(X86)
    assert {name for name, there in x86.items() if there} == {
        "avx2",
        "fma",
        "avx512f",
        "avx512_vnni",
    }
    arm = features_from_cpuinfo(ARM)
    assert {name for name, there in arm.items() if there} == {"neon", "dotprod", "i8mm"}
    assert not any(features_from_cpuinfo("no such line").values())
