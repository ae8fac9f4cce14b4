"""The linters agree, the import law holds, and what is stated twice is stated alike."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest

import drumline
from tidy.source import ROOT, modules

TOOLS = {
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "import law": [
        "-c",
        "from importlinter.cli import lint_imports_command as c; c()",
        "--no-cache",
    ],
    "mypy": ["-m", "mypy"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_linters_agree(tool: str) -> None:
    run = subprocess.run(
        [sys.executable, *TOOLS[tool]],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert run.returncode == 0, f"\n{run.stdout}{run.stderr}"


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\]", text, flags=re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0] == drumline.__version__


def test_the_pins_cover_what_is_required() -> None:
    """Every direct requirement is pinned, at a release that the requirement allows."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {}
    for line in (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        wanted += [text for text in extra if not text.startswith("drumline[")]
    for text in wanted:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not pinned"
        assert requirement.specifier.contains(pins[name]), f"{name} {pins[name]} is not {text}"


def test_every_dependency_is_used() -> None:
    """A requirement that no module imports has no reason to be there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    modules_of = {"pyzmq": "zmq", "pyyaml": "yaml", "prometheus-client": "prometheus_client"}
    source = "\n".join(path.read_text(encoding="utf-8") for path in modules())
    unused = []
    for text in project["dependencies"]:
        package = re.split(r"[<>=!~\[ ]", text)[0]
        module = modules_of.get(package, package)
        if not re.search(rf"^\s*(import|from) {module}\b", source, flags=re.MULTILINE):
            unused.append(package)
    assert not unused


def test_the_installed_package_is_this_one() -> None:
    """Where drumline is installed, its version and requirements are those of this tree."""
    from importlib.metadata import PackageNotFoundError

    try:
        installed = version("drumline")
    except PackageNotFoundError:
        pytest.skip("drumline is not installed here")
    assert installed == drumline.__version__
    assert any(text.startswith("torch") for text in requires("drumline") or [])


def test_make_passes_the_prompt_as_typed(tmp_path: Path) -> None:
    """Quotes, dollars and backticks of PROMPT reach the command unharmed."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    fake = tmp_path / "venv"
    (fake / "bin").mkdir(parents=True)
    command = fake / "bin" / "drumline"
    command.write_text(
        '#!/bin/sh\nfor a in "$@"; do printf "<%s>\\n" "$a"; done\n', encoding="utf-8"
    )
    command.chmod(0o755)
    (fake / "bin" / "python").write_text("", encoding="utf-8")
    work = tmp_path / "work"
    work.mkdir()
    (work / "Makefile").write_text(makefile, encoding="utf-8")
    for file in ("pyproject.toml", "constraints-cpu.txt", "CMakeLists.txt"):
        (work / file).write_text("", encoding="utf-8")
    (fake / ".drumline").write_text("", encoding="utf-8")
    prompt = 'it\'s "$5", `id` and $(shell date) #1 100%'
    for given in ([f"PROMPT={prompt}"], []):
        run = subprocess.run(
            ["make", "-s", "demo", f"VENV={fake}", *given],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=work,
            env={"PATH": "/usr/bin:/bin", **({} if given else {"PROMPT": prompt})},
        )
        assert run.returncode == 0, run.stderr
        assert f"<{prompt}>" in run.stdout
