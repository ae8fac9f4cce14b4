"""What the matrix found, kept between runs: lines of a file, and which code they are about.

A line is a combination that is done; what failed, and what another code gave, is run again. Knows
nothing of what a combination is.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drumline

ROOT = Path(__file__).resolve().parents[1]
# The rooms that take part in a run, and the tests' modules that say what a run is.
DECIDING = ("core", "config", "kvcache", "lockstep", "scheduler", "fleet")
COMPUTING = ("parallel", "ops", "models", "sampling", "drafting", "worker", "engine")
RUN = (
    *("drafting/methods.py", "drafting/world.py", "engine/circumstances.py"),
    *("parallel_engine/fleet.py", "parallel_engine/layouts.py", "matrix_ranks.py"),
)


@dataclass(frozen=True, slots=True)
class Code:
    """What is measured: a digest of all of it, and its place in the history for people."""

    digest: str
    commit: str

    @classmethod
    def here(cls) -> Code:
        rooms = [ROOT / "src" / "drumline" / room for room in (*DECIDING, *COMPUTING)]
        files = sorted(path for top in rooms for path in top.rglob("*.py"))
        files += [ROOT / "tests" / name for name in RUN]
        files += sorted(Path(path) for top in drumline.__path__ for path in Path(top).glob("*.so"))
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        paths = [str(path.relative_to(ROOT)) for path in rooms] + ["native"]
        commit = _git("log", "-1", "--format=%h", "--", *paths) or "unknown"
        changed = _git("status", "--porcelain", "--", *paths)
        return cls(digest.hexdigest(), commit + (", with changes" if changed else ""))


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return run.stdout.strip()


class Results:
    """Of one part of the matrix: a file of JSON lines, the code and then finished combinations.
    ``code`` is that of the results, None before there are any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.code: Code | None = None
        self.done: dict[str, dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
            except ValueError:  # a run ended in the middle of it
                continue
            if number == 0:
                self.code = Code(entry["code"], entry["commit"])
            else:
                self.done[entry["name"]] = entry

    def begin(self, code: Code) -> None:
        """Goes on for this code, or afresh. What changed nothing that runs keeps its place in the
        history: the commit at which the first combination ran."""
        if self.code is None or self.code.digest != code.digest:
            if self.code is not None:
                print(f"{self.path} is about other code: starting afresh")
            self.code, self.done = code, {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = {"code": self.code.digest, "commit": self.code.commit}
        lines = [json.dumps(line) for line in (head, *self.done.values())]
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def of(self, method: str) -> list[dict[str, Any]]:
        return [entry for entry in self.done.values() if entry["method"] == method]

    def add(self, entry: dict[str, Any]) -> None:
        self.done[entry["name"]] = entry
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def wanted(self, name: str) -> bool:
        return self.done.get(name, {}).get("problem", "not run") is not None

    def failed(self) -> list[dict[str, Any]]:
        return [entry for entry in self.done.values() if entry["problem"] is not None]
