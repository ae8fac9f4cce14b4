"""Facts about this machine: cores and memory this process may really use, containers included.

A container sees the host's ``/proc``, so limits are read from its control group too and the
smaller number counts. `read_machine` is the only function here that looks at the world; what
follows from the facts is decided in `resolve`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from drumline.core.cpu import cpu_features, native_available

_UNLIMITED = 2**60  # control groups of version 1 say "no limit" with a number near 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What `resolve` must know of the machine.

    ``available_cores``: processors this process may be scheduled on, cut by the group's quota.
    ``physical_cores``: those of them that are not the second thread of another. Memory in bytes;
    ``free_memory_bytes`` is what can be had without swapping, read before weights are loaded.
    """

    available_cores: int
    physical_cores: int
    free_memory_bytes: int
    total_memory_bytes: int
    cpu_model: str = "unknown"
    cpu_features: tuple[str, ...] = ()
    native_module: bool = False
    native_ops: bool = False

    def __post_init__(self) -> None:
        assert 1 <= self.physical_cores <= self.available_cores
        assert 0 <= self.free_memory_bytes <= self.total_memory_bytes


def read_machine(root: Path = Path("/")) -> MachineFacts:
    """Reads the facts. Files are looked up below ``root``; one that is missing limits nothing."""
    cpuinfo = _read(root / "proc/cpuinfo")
    allowed = _allowed_processors()
    quota = _core_quota(root)
    available = max(1, min(len(allowed), quota or len(allowed)))
    physical = min(available, _physical_among(cpuinfo, allowed) or available)
    free, total = _memory(root)
    return MachineFacts(
        available_cores=available,
        physical_cores=physical,
        free_memory_bytes=free,
        total_memory_bytes=total,
        cpu_model=_cpu_model(cpuinfo),
        cpu_features=tuple(name for name, present in cpu_features().items() if present),
        native_module=native_available(),
        native_ops=native_available(),
    )


def _allowed_processors() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _core_quota(root: Path) -> int | None:
    """Whole cores the control group grants, at least 1; None without a limit."""
    for folder in _group_folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")  # version 2
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us").strip()  # version 1
            period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            return max(1, int(quota) // int(period))
    return None


def _physical_among(cpuinfo: str, allowed: frozenset[int]) -> int:
    """Distinct (socket, core) pairs among the allowed processors; 0 if the kernel names none."""
    cores: set[tuple[str, str]] = set()
    for block in cpuinfo.split("\n\n"):
        entry = _entries(block)
        number = entry.get("processor", "")
        if number.isdigit() and int(number) in allowed and "core id" in entry:
            cores.add((entry.get("physical id", "0"), entry["core id"]))
    return len(cores)


def _memory(root: Path) -> tuple[int, int]:
    """(free, total) bytes: the machine's, or the control group's where that is less."""
    entries = _entries(_read(root / "proc/meminfo"))
    free = _kib(entries.get("MemAvailable", ""))
    total = _kib(entries.get("MemTotal", ""))
    if total == 0:  # not Linux: what POSIX tells
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total // 2
    for folder in _group_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= _UNLIMITED:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        used -= min(used, _inactive_file(folder))  # page cache the kernel gives back
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return min(free, total), total


def _group_folders(root: Path, controller: str) -> list[Path]:
    """This process's control group and its ancestors: the tightest limit may stand on any."""
    base = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controllers if controllers else base
        parts = [part for part in path.split("/") if part and part != ".."]
        folders += [top.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
        if controllers:
            folders.append(base / controller)
    return folders or [base, base / controller]


def _inactive_file(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.strip().isdigit():
            return int(value)
    return 0


def _cpu_model(cpuinfo: str) -> str:
    entries = _entries(cpuinfo.split("\n\n", 1)[0])
    return entries.get("model name") or entries.get("Model") or "unknown"


def _entries(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _kib(text: str) -> int:
    number = text.removesuffix("kB").strip()
    return int(number) * 1024 if number.isdigit() else 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
