"""One batch under one combination of circumstances, held against the truth.

A case names values for some of the factors below; what it leaves out has a default. The covering
array of the suite and the whole matrix run their cases here, so that both mean the same by each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafting.methods import Method
from drafting.world import LENGTH, Signature, jobs, run
from drumline.engine.llm import LLM

K = (1, 3, 5, 8)
DRAFT_LENGTHS = ("static", "table", "adaptive")
CHUNKS = (5, 256)

Truth = dict[bool, list[Signature]]  # sampled → what each request gives alone, without drafts
# Drafters that know the future. Stops, limits and shorter windows cut some of what they say.
KNOWING = ("oracle", "brittle")


def check(target: Path, alone: Truth, method: Method, case: dict[str, Any]) -> LLM:
    """Runs the batch; `AssertionError` if a bit differs, a drafter failed, or nothing happened
    where something must. Gives the engine, whose counters say how much did."""
    k, sampled, chunk = min(case["k"], method.k_max), case["sampled"], case["chunk"]
    settings: dict[str, Any] = {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": min(8, chunk),
        "enable_prefix_caching": case["caching"],
        "disable_padded_drafter_batch": not case.get("padded", True),
        "draft_length": case["draft_length"],
        "rounds": 2 if case["caching"] else 1,
    }
    if case["draft_length"] == "table":
        table = [[1, 2, k], [3, 4, 0], [5, 6, max(1, k - 2)], [7, 8, k]]
        settings["num_speculative_tokens_per_batch_size"] = table
    if case["preempt"]:
        settings["cache_tokens"] = LENGTH
    longest = k if case.get("mixed", True) else None
    llm, found = run(target, method, k, jobs(sampled, longest), **settings)
    for index, (one, other) in enumerate(zip(found, alone[sampled], strict=True)):
        assert one == other, f"request {index}: {one}, alone {other}"
    speculator = llm.core.worker.speculator
    assert speculator is not None
    assert speculator.failure_count == 0
    if case["preempt"] and chunk == 256:  # few at a time need few blocks
        assert llm.core.counters.preemptions > 0
    if method.name in KNOWING:
        stats = llm.core.speculation
        assert stats.accepted >= 0.6 * stats.drafted > 0, stats
    return llm
