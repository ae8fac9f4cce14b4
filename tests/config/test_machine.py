"""Facts about the machine, from folders that look like one."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.config.machine import read_machine

MEMINFO = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n"
GIB = 2**30


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def _four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)


def test_this_machine() -> None:
    facts = read_machine()
    assert facts.free_memory_bytes > 0
    assert facts.cpu_model


def test_no_limits(tmp_path: Path) -> None:
    facts = read_machine(_write(tmp_path, {"proc/meminfo": MEMINFO}))
    assert (facts.free_memory_bytes, facts.total_memory_bytes) == (8 * GIB, 16 * GIB)
    assert facts.available_cores == facts.physical_cores == 4


def test_hyperthreads_share_a_core(tmp_path: Path) -> None:
    cpuinfo = "\n\n".join(
        f"processor\t: {cpu}\nmodel name\t: Some CPU\nphysical id\t: 0\ncore id\t: {cpu // 2}"
        for cpu in range(8)
    )
    facts = read_machine(_write(tmp_path, {"proc/meminfo": MEMINFO, "proc/cpuinfo": cpuinfo}))
    assert facts.available_cores == 4
    assert facts.physical_cores == 2
    assert facts.cpu_model == "Some CPU"


def test_a_group_of_version_2(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/box/inner\n",
            "sys/fs/cgroup/box/inner/memory.max": "max\n",
            "sys/fs/cgroup/box/memory.max": str(4 * GIB),
            "sys/fs/cgroup/box/memory.current": str(3 * GIB),
            "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/box/cpu.max": "250000 100000\n",
        },
    )
    facts = read_machine(root)
    assert (facts.free_memory_bytes, facts.total_memory_bytes) == (2 * GIB, 4 * GIB)
    assert facts.available_cores == 2


def test_a_group_of_version_1(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
        },
    )
    facts = read_machine(root)
    assert (facts.free_memory_bytes, facts.total_memory_bytes) == (GIB, 2 * GIB)
    assert facts.available_cores == facts.physical_cores == 1


def test_unreadable_numbers_limit_nothing(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "nonsense",
            "sys/fs/cgroup/cpu.max": "max 100000",
        },
    )
    facts = read_machine(root)
    assert facts.free_memory_bytes == 8 * GIB
    assert facts.available_cores == 4
