"""Shared fixtures: one thread for torch, checkpoints, and what may be skipped where.

In CI (``CI=true``) a test that would skip because the system lacks something fails instead: a
suite that shrinks in silence proves nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about what is tested.
settings.register_profile("drumline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("drumline")

# Threads that spin while they wait take the core from the thread they wait for wherever tests share
# the machine. Read when torch is loaded, so it stands here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Whoever is started in the background of a shell ignores interrupts, and so do its children; tests
# send some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CI = os.environ.get("CI", "").lower() in ("true", "1")


@pytest.fixture(autouse=True, scope="session")
def _clean_environment() -> Iterator[None]:
    """No DRUMLINE_* variable of the person who runs the tests reaches them, but for the cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("DRUMLINE_")]:
            if name != "DRUMLINE_CACHE":
                patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """torch computes in one thread, before each test, if it is loaded; tests may raise it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF, fetched once into the user's model cache."""
    from drumline.models.fetch import fetch_smollm2

    return Path(fetch_smollm2())


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_path(arch="llama", seed=0, …)``: a seeded miniature checkpoint, written once each."""
    from drumline.models.tiny import write_tiny

    written: dict[tuple[Any, ...], Path] = {}

    def make(arch: str = "llama", seed: int = 0, **sizes: Any) -> Path:
        key = (arch, seed, *sorted(sizes.items()))
        if key not in written:
            output = tmp_path_factory.mktemp(f"tiny-{arch}")
            write_tiny(arch, output, seed, **sizes)
            written[key] = output
        return written[key]

    return make


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where everything must run: {reason}"
