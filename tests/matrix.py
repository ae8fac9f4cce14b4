"""Every drafter in every circumstance, and not one changed bit: `make matrix`.

    python tests/matrix.py [--minutes M] [--results FILE] [--page FILE]

The suite runs an array of cases in which every pair of values meets; this runs them all. A line of
the results file is a combination that is done; the same command goes on after the last one, runs
what failed again, and starts afresh if the code it measures has changed. The page in docs/ is
written at the end, complete or not. Exit codes: 0 all equal, 1 not. One process, one thread.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded

import torch

import drumline
from drafting.methods import ITSELF, METHODS, WRITING, Method
from drafting.world import VOCAB, truth
from drumline.engine.llm import LLM
from drumline.models.tiny import write_tiny
from engine.circumstances import CHUNKS, DRAFT_LENGTHS, K, Truth, check
from parallel_engine import layouts
from parallel_engine.fleet import Fleets

ROOT = Path(__file__).resolve().parents[1]
# The rooms that take part in a run, and the tests' modules that say what a run is.
DECIDING = ("core", "config", "kvcache", "lockstep", "scheduler", "fleet")
COMPUTING = ("parallel", "ops", "models", "sampling", "drafting", "worker", "engine")
RUN = (
    *("drafting/methods.py", "drafting/world.py", "engine/circumstances.py"),
    *("parallel_engine/fleet.py", "parallel_engine/layouts.py"),
)
FACTORS: dict[str, tuple[Any, ...]] = {
    "k": K,
    "draft_length": DRAFT_LENGTHS,
    "sampled": (False, True),
    "caching": (True, False),
    "chunk": CHUNKS,
    "preempt": (False, True),
}
METHODS_HERE = {**METHODS, ITSELF.name: ITSELF, WRITING.name: WRITING}
Case = dict[str, Any]


def excluded(method: Method, case: Case) -> str | None:
    """Why a method cannot have a combination; None where it can."""
    if case["k"] > method.k_max:
        return f"K above {method.k_max}: it drafts nothing, and says so with K = {method.k_max}"
    if method is WRITING and case["draft_length"] != "static":
        return "table, adaptive: nothing is drafted, so there is no length to choose"
    return None


def combinations() -> Iterator[tuple[Method, Case]]:
    for method in METHODS_HERE.values():
        for values in itertools.product(*FACTORS.values()):
            yield method, dict(zip(FACTORS, values, strict=True))


def name_of(method: Method, case: Case) -> str:
    return " ".join((method.name, *(f"{key}={value}" for key, value in case.items())))


# ---------------------------------------------------------------- results


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
    """A file of JSON lines: the code, then finished combinations. Written line by line."""

    def __init__(self, path: Path, code: Code) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        lines = [json.dumps({"code": code.digest})]
        if old and old[0] == lines[0]:
            for line in old[1:]:
                try:
                    entry = json.loads(line)
                except ValueError:  # a run ended in the middle of it
                    continue
                self.done[entry["name"]] = entry
                lines.append(line)
        elif old:
            print(f"{path} is about other code: starting afresh")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def of(self, method: Method) -> list[dict[str, Any]]:
        return [entry for entry in self.done.values() if entry["method"] == method.name]

    def add(self, entry: dict[str, Any]) -> None:
        self.done[entry["name"]] = entry
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def wanted(self, name: str) -> bool:
        return self.done.get(name, {}).get("problem", "not run") is not None


# ---------------------------------------------------------------- running


def run_one(target: Path, alone: Truth, method: Method, case: Case) -> dict[str, Any]:
    """An entry: what was asked and what happened. ``problem`` is None where all is equal."""
    entry: dict[str, Any] = {"name": name_of(method, case), "method": method.name, **case}
    try:
        llm = check(target, alone, method, case)
    except Exception as error:  # whatever it is belongs to the result
        return {**entry, "problem": f"{type(error).__name__}: {error}".splitlines()[0][:400]}
    stats = llm.core.speculation
    return {
        **entry,
        "problem": None,
        "steps": llm.core.counters.steps,
        "tokens": llm.core.counters.completion_tokens,
        "preemptions": llm.core.counters.preemptions,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
    }


def run_all(results: Results, folder: Path, deadline: float) -> str:
    """Runs what is left until then; says what computed."""
    target = folder / "target"
    write_tiny("llama", target, 3, vocab=VOCAB)
    alone = {sampled: truth(target, sampled) for sampled in (False, True)}
    for tokens in (sum(len(one[0]) for one in found) for found in alone.values()):
        assert tokens > 80, "the batch is too short to prove anything"
    left = [
        (method, case)
        for method, case in combinations()
        if excluded(method, case) is None and results.wanted(name_of(method, case))
    ]
    began, failed = time.monotonic(), 0
    for number, (method, case) in enumerate(left, 1):
        if time.monotonic() > deadline:
            break
        entry = run_one(target, alone, method, case)
        results.add(entry)
        if entry["problem"] is not None:
            failed += 1
            print(f"DIFFERENT {entry['name']}\n  {entry['problem']}", flush=True)
        if number % 50 == 0 or number == len(left):
            seconds = time.monotonic() - began
            print(f"{number}/{len(left)}  {seconds:.0f} s  {failed} failed", flush=True)
    return _backend(target)


LAYOUT = "layout"  # the method's place in entries of several ranks


def run_layouts(results: Results, folder: Path, deadline: float) -> None:
    """Runs what is left of several ranks, each combination an engine of its own."""
    left = [case for case in layouts.combinations() if results.wanted(layouts.name_of(case))]
    if not left or time.monotonic() > deadline:
        return
    fleets = Fleets()
    try:
        checks = layouts.Layouts(layouts.write_model(folder / "layouts"), fleets.start)
        for number, case in enumerate(left, 1):
            if time.monotonic() > deadline:
                return
            entry: dict[str, Any] = {"name": layouts.name_of(case), "method": LAYOUT, **case}
            try:
                core = checks.check(case)
                stats = core.speculation
                sums = {"drafted": stats.drafted, "accepted": stats.accepted}
                entry |= {"problem": None, "steps": core.counters.steps, **sums}
            except Exception as error:  # whatever it is belongs to the result
                text = f"{type(error).__name__}: {error}".splitlines()[0][:400]
                entry["problem"] = text
                print(f"DIFFERENT {entry['name']}\n  {text}", flush=True)
            results.add(entry)
            fleets.close_all()
            if number % 20 == 0 or number == len(left):
                print(f"layouts {number}/{len(left)}", flush=True)
    finally:
        fleets.close()


def _backend(target: Path) -> str:
    llm = LLM(model=str(target), threads=1, max_model_len=16)
    path = getattr(llm.core.worker.ops, "path", None)
    return llm.core.resolved.ops_backend + (f" ({path})" if path else "")


# ---------------------------------------------------------------- the page

HEAD = """# The matrix

Every method with every K, draft length, way of sampling, prefix cache, chunk budget and memory,
each time a batch of eight requests with draft lengths of their own between 0 and K. A combination
is *equal* if token ids, every log-probability with its alternatives, prompt log-probabilities, text
and finish reason of all eight are, bit for bit, what each request gives alone, in an engine without
speculation. Written by `make matrix`; the models are seeded miniatures.

    K               1, 3, 5, 8
    draft length    static, by a table with a zero in it, adaptive
    sampling        greedy; temperature 0.8 and top_p 0.9 with seeds; some with penalties and bans
    prefix cache    on (the batch runs twice, the second time with hits), off
    chunk budget    5 tokens, 256 tokens per step
    memory          enough; so little that requests are preempted

"""
SUMS = ("steps", "tokens", "drafted", "accepted")  # columns
TABLE = """| method | equal | preempted in | steps | tokens | drafted | accepted |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""
TAIL = """
*Preempted in*: combinations in which requests were in fact preempted. Half of them are short of
memory; with a budget of 5 tokens few requests run at a time. Drafted and accepted are sums and show
that there was something to verify; they are no measure of a method, since the draft models are as
random as their target (*draft_model itself* has the target as its own draft). Of the drafters for
tests `oracle` and `brittle` know the target's output, and `brittle` fails the run if it is asked
for a position outside its range; `liar` is always wrong, `scripted` is right about the first few
drafts of a step, `random` now and then.
"""


LAYOUTS = """
## Several ranks

A batch of ten requests on a miniature with experts, over replicas (dp) and ranks that share each
layer (tp), with experts spread over all ranks or not: without drafts, and with ngram, draft_model,
eagle3, mtp (both with experts of their own) and dflash, each with a static length, a table and an
adaptive one. At tp = 1 *equal* means the bits of one rank; at tp = 2 the same tokens,
log-probabilities within 1e-4, and the same bits whatever dp and whoever drafts. In all of them
every rank's log of collectives is that of its group's others, and there is one exchange before each
step.

| layout | equal |
| --- | ---: |
"""


def _layout_rows(results: Results) -> tuple[dict[str, tuple[int, int]], int]:
    """Per layout (equal, wanted), and all that are wanted."""
    rows: dict[str, tuple[int, int]] = {}
    cases = list(layouts.combinations())
    for case in cases:
        name = " ".join(layouts.name_of(case).split()[1:4])
        good, count = rows.get(name, (0, 0))
        done = results.done.get(layouts.name_of(case), {}).get("problem", "not run") is None
        rows[name] = (good + done, count + 1)
    return rows, len(cases)


def write_page(page: Path, results: Results, code: Code, backend: str) -> tuple[int, int]:
    """Writes the page; gives (equal, wanted)."""
    rows: list[str] = []
    barred: Counter[str] = Counter()
    equal = wanted = 0
    for method in METHODS_HERE.values():
        reasons = [excluded(method, case) for other, case in combinations() if other is method]
        barred.update(f"{method.name}, {reason}" for reason in reasons if reason is not None)
        good = [one for one in results.of(method) if one["problem"] is None]
        asked = reasons.count(None)
        equal, wanted = equal + len(good), wanted + asked
        preempted = sum(one["preemptions"] > 0 for one in good)
        sums = [sum(one[key] for one in good) for key in SUMS]
        cells = [method.name, f"{len(good)} of {asked}", str(preempted), *map("{:,}".format, sums)]
        rows.append(f"| {' | '.join(cells)} |\n")
    failed = [one for one in results.done.values() if one["problem"] is not None]
    shared, asked_layouts = _layout_rows(results)
    equal += sum(good for good, _ in shared.values())
    wanted += asked_layouts
    text = HEAD + f"**{equal:,} of {wanted:,} combinations are equal, {len(failed)} differ"
    text += f", {wanted - equal - len(failed):,} were not run.**\n"
    text += f"Code: commit {code.commit}. Operations: {backend}, one thread.\n\n"
    text += TABLE + "".join(rows) + TAIL
    text += LAYOUTS + "".join(
        f"| {name} | {good} of {count} |\n" for name, (good, count) in shared.items()
    )
    text += "\nCombinations that a method cannot have, each refused by the configuration:\n\n"
    text += "".join(f"- {reason} ({count})\n" for reason, count in barred.items())
    if failed:
        text += "\n## What differs\n\n"
        text += "".join(f"- `{one['name']}`: {one['problem']}\n" for one in failed)
    page.write_text(text, encoding="utf-8")
    return equal, wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then stop")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "matrix.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "matrix.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    code = Code.here()
    results = Results(arguments.results, code)
    deadline = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        backend = run_all(results, Path(folder), deadline)
        run_layouts(results, Path(folder), deadline)
    equal, wanted = write_page(arguments.page, results, code, backend)
    print(f"matrix: {equal} of {wanted} combinations are equal")
    return 0 if equal == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
