"""The rooms: what decides imports without torch, and the import law names every room."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tidy.source import DAGGER_ROOMS, ROOT, SOURCE, modules, name, rooms, tree

BLOCKED = """
import sys, importlib
for name in ("torch", "transformers", "safetensors", "gguf", "tokenizers", "fastapi", "pydantic"):
    sys.modules[name] = None
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def _modules_of(room: str) -> list[str]:
    found = []
    for path in (SOURCE / room).rglob("*.py"):
        dotted = ".".join(("drumline", *path.relative_to(SOURCE).with_suffix("").parts))
        found.append(dotted.removesuffix(".__init__"))
    return sorted(found)


@pytest.mark.parametrize("room", [room for room in DAGGER_ROOMS if room in rooms()])
def test_what_decides_imports_without_torch(room: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED, *_modules_of(room)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
    )
    assert run.returncode == 0, run.stderr


def test_the_package_imports_without_torch() -> None:
    probe = "import drumline, sys; sys.exit('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
    )
    assert run.returncode == 0, run.stderr


def test_config_imports_quickly() -> None:
    """Under 100 ms of processor time, the best of three: torch-free is not enough."""
    probe = (
        "import time; a = time.process_time(); import drumline.config; "
        "print(time.process_time() - a)"
    )
    seconds = []
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-c", probe],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        )
        seconds.append(float(run.stdout))
    assert min(seconds) < 0.1


def test_every_public_name_can_be_imported() -> None:
    import drumline

    # Constants and acronyms first, as the linter sorts them.
    assert sorted(drumline.__all__) == dir(drumline)
    assert len(set(drumline.__all__)) == len(drumline.__all__)
    for public in drumline.__all__:
        assert getattr(drumline, public) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = drumline.nothing


def test_the_import_law_names_every_room() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    by_id = {contract["id"]: contract for contract in contracts}
    layered = " ".join(by_id["deciding"]["layers"] + by_id["computing"]["layers"])
    decides = by_id["deciding-knows-no-computing"]
    listed = {*decides["source_modules"], *decides["forbidden_modules"]}
    for room in rooms():
        assert f"drumline.{room}" in layered, f"{room} has no layer"
        if room != "sim":
            assert f"drumline.{room}" in listed, f"{room} must be listed as deciding or computing"
    if "sim" in rooms():
        assert any("drumline.sim" in c.get("source_modules", []) for c in contracts)


def test_every_folder_with_code_is_a_package() -> None:
    for path in modules():
        assert (path.parent / "__init__.py").exists(), f"{name(path.parent)} has no __init__.py"


def test_room_docstrings_say_what_they_refuse() -> None:
    import ast

    for room in rooms():
        text = ast.get_docstring(tree(SOURCE / room / "__init__.py")) or ""
        assert text, f"{room} has no docstring"
