"""Every drafter in every circumstance, and not one changed bit: `make matrix`.

    python tests/matrix.py [--part one|ranks] [--minutes M] [--results FOLDER] [--page FILE]

The suite runs an array of cases in which every pair of values meets; this runs them all, with one
rank and (`matrix_ranks`) with several. The same command goes on after the last combination, runs
what failed again, and starts afresh if the code it measures has changed. The page in docs/ is
written at the end, complete or not, of what is known of both parts. Exit codes: 0 all equal, 1 not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded

import torch

import matrix_ranks
from drafting.methods import ITSELF, METHODS, WRITING, Method
from drafting.world import VOCAB, truth
from drumline.engine.llm import LLM
from drumline.models.tiny import write_tiny
from engine.circumstances import CHUNKS, DRAFT_LENGTHS, K, Truth, check
from matrix_results import ROOT, Code, Results

FACTORS: dict[str, tuple[Any, ...]] = {
    "k": K,
    "draft_length": DRAFT_LENGTHS,
    "sampled": (False, True),
    "caching": (True, False),
    "chunk": CHUNKS,
    "preempt": (False, True),
}
METHODS_HERE = {**METHODS, ITSELF.name: ITSELF, WRITING.name: WRITING}
PARTS = ("one", "ranks")
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


def run_all(results: Results, folder: Path, deadline: float) -> None:
    """Runs what is left until then."""
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


def backend(folder: Path) -> str:
    """What computes where nothing is said."""
    write_tiny("llama", folder, 3)
    llm = LLM(model=str(folder), threads=1, max_model_len=16)
    path = getattr(llm.core.worker.ops, "path", None)
    return llm.core.resolved.ops_backend + (f" ({path})" if path else "")


# ---------------------------------------------------------------- the page

HEAD = """# The matrix

Whatever drafts, and on whatever ranks: the same bits. Written by `make matrix`.

## One rank

Every method with every K, draft length, way of sampling, prefix cache, chunk budget and memory,
each time a batch of eight requests with draft lengths of their own between 0 and K. A combination
is *equal* if token ids, every log-probability with its alternatives, prompt log-probabilities, text
and finish reason of all eight are, bit for bit, what each request gives alone, in an engine without
speculation. The models are seeded miniatures.

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


def write_page(page: Path, one: Results, ranks: Results, operations: str) -> tuple[int, int]:
    """Writes the page; gives (equal, wanted)."""
    rows: list[str] = []
    barred: Counter[str] = Counter()
    equal = wanted = 0
    for method in METHODS_HERE.values():
        reasons = [excluded(method, case) for other, case in combinations() if other is method]
        barred.update(f"{method.name}, {reason}" for reason in reasons if reason is not None)
        good = [entry for entry in one.of(method.name) if entry["problem"] is None]
        asked = reasons.count(None)
        equal, wanted = equal + len(good), wanted + asked
        preempted = sum(entry["preemptions"] > 0 for entry in good)
        sums = [sum(entry[key] for entry in good) for key in SUMS]
        cells = [method.name, f"{len(good)} of {asked}", str(preempted), *map("{:,}".format, sums)]
        rows.append(f"| {' | '.join(cells)} |\n")
    text = HEAD + _verdict(one, equal, wanted, f"Operations: {operations}, one thread.")
    text += TABLE + "".join(rows) + TAIL
    text += "\nCombinations that a method cannot have, each refused by the configuration:\n\n"
    text += "".join(f"- {reason} ({count})\n" for reason, count in barred.items())
    shared, asked_ranks = matrix_ranks.count(ranks)
    over = f"Native operations: {operations}; one thread a rank."
    text += matrix_ranks.HEAD + _verdict(ranks, shared, asked_ranks, over)
    text += matrix_ranks.table(ranks)
    failed = one.failed() + ranks.failed()
    if failed:
        text += "\n## What differs\n\n"
        text += "".join(f"- `{entry['name']}`: {entry['problem']}\n" for entry in failed)
    page.write_text(text, encoding="utf-8")
    return equal + shared, wanted + asked_ranks


def _verdict(results: Results, equal: int, wanted: int, how: str) -> str:
    failed = len(results.failed())
    commit = "none" if results.code is None else results.code.commit
    return (
        f"**{equal:,} of {wanted:,} combinations are equal, {failed} differ, "
        f"{wanted - equal - failed:,} were not run.**\nCode: commit {commit}. {how}\n\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="what to run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then stop")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "matrix.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    one, ranks = (Results(arguments.results / f"{name}.jsonl") for name in PARTS)
    deadline = time.monotonic() + 60 * arguments.minutes
    code = Code.here()
    with tempfile.TemporaryDirectory() as folder:
        if "one" in arguments.part:
            one.begin(code)
            run_all(one, Path(folder), deadline)
        if "ranks" in arguments.part:
            ranks.begin(code)
            matrix_ranks.run_ranks(ranks, Path(folder), deadline)
        operations = backend(Path(folder) / "backend")
    equal, wanted = write_page(arguments.page, one, ranks, operations)
    print(f"matrix: {equal} of {wanted} combinations are equal")
    return 0 if equal == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
