"""The matrix over several ranks: what runs on which layout, and its part of the page.

Two models have experts: a miniature, and SmolLM2 made a mixture of eight, with its own MTP head
and with a draft of its first two layers. Every combination is an engine of its own and is held
against one rank without speculation on the same operations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from drumline.drafting.shipped import HEADS
from drumline.models import tiny_drafts
from drumline.models.checkpoint import open_checkpoint
from drumline.models.fetch import fetch_smollm2
from drumline.models.upcycle import upcycle, upcycle_mtp
from engine.covering import covering_array
from matrix_results import Results
from parallel_engine import fleet
from parallel_engine.fleet import Fleets, Job
from parallel_engine.layouts import FACTORS, JOBS, Case, Layouts, combinations, name_of, write_model

Factors = Mapping[str, Sequence[Any]]
TEXTS = (
    ("The capital of France is", 6, 0.0),
    ("Water boils at", 8, 0.0),
    ("Once upon a time, a small ship", 7, 0.0),
    ("def fibonacci(n):\n    ", 6, 0.0),
    ("My favourite colour is", 6, 0.9),
    ("One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,", 5, 0.0),
)
SECONDS = 600.0  # for one batch: eight ranks of a real model may share two cores


@dataclass(frozen=True)
class Part:
    """``few``: only pairs of values meet, in as few runs as that takes."""

    name: str
    model: str
    ops: str
    factors: Factors
    few: bool = False

    def pairs(self) -> list[Case]:
        """Those in which every pair of values meets."""
        return _sensible(covering_array(self.factors))

    def cases(self) -> list[Case]:
        return self.pairs() if self.few else list(combinations(self.factors))

    def name_of(self, case: Case) -> str:
        return f"{self.name}: {name_of(case)}"


def _sensible(cases: Sequence[Case]) -> list[Case]:
    """Without drafts there is no draft length to choose."""
    found: list[Case] = []
    for case in cases:
        one = {**case, "length": "static"} if case["method"] == "none" else case
        if one not in found:
            found.append(one)
    return found


_OVER_DP = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
_ALONE_AND_TP: Factors = {
    **FACTORS,
    "layout": ((1, 1), (2, 1), (1, 2), (1, 3)),
    "method": ("none", "mtp"),
    "length": ("static",),
}
PARTS = (
    Part("miniature", "miniature", "reference", {**FACTORS, "layout": (*_OVER_DP, (1, 3), (1, 4))}),
    Part("smollm2", "smollm2", "native", {**FACTORS, "layout": (*_OVER_DP, (1, 3))}),
    Part("smollm2, reference", "smollm2", "reference", _ALONE_AND_TP, few=True),
)
PLACE = "{} dp={} tp={}"  # a line of the page


def write_smollm2(path: Path) -> Path:
    """SmolLM2 as a mixture, with every drafter of it; all networks but dflash have experts."""
    dense = fetch_smollm2()
    model = upcycle(dense, 8, path)
    upcycle_mtp(HEADS / "smollm2-mtp", 8, model / "mtp")
    tiny_drafts.write_eagle3(
        model, model / "eagle3", 0, layer="qwen3_moe", draft_vocab=2048, embedding=False
    )
    tiny_drafts.write_dflash(model, model / "dflash", 0, draft_vocab=2048)
    shorten(model, model / "draft_model", 2)
    return model


def shorten(model: Path, output: Path, layers: int) -> None:
    """A draft model: the first layers, between the same embedding and head."""
    output.mkdir()
    values = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": layers}
    (output / "config.json").write_text(json.dumps(values))
    open_checkpoint(model).tokenizer().save(output)
    later = tuple(f"model.layers.{index}." for index in range(layers, 30))
    tensors = load_file(model / "model.safetensors")
    kept = {name: data for name, data in tensors.items() if not name.startswith(later)}
    save_file(kept, output / "model.safetensors", metadata={"format": "pt"})


def _jobs(model: Path) -> list[Job]:
    tokenizer = open_checkpoint(model).tokenizer()
    return [Job(tuple(tokenizer.encode(text)), count, heat) for text, count, heat in TEXTS]


def _begin(part: Part, folder: Path, fleets: Fleets) -> Layouts:
    """The part's model, written if it is not there, and its truth."""
    path = folder / part.model
    if part.model == "miniature":  # of as many key heads as ranks will share
        model = write_model(path, heads=8, kv_heads=4)
        return Layouts(model, fleets.start, JOBS, ops_backend=part.ops)
    model = path if path.exists() else write_smollm2(path)
    patience = {"step_timeout_seconds": 120.0, "startup_timeout_seconds": SECONDS}
    # Over tp sums are added in another order: a last bit, which halves may make a thousand of.
    exact = {"kv_cache_dtype": "float32"}
    return Layouts(model, fleets.start, _jobs(model), ops_backend=part.ops, **patience, **exact)


def run_ranks(results: Results, folder: Path, deadline: float) -> None:
    """Runs what is left until then: of all parts first the cases in which every pair meets."""
    fleet.SECONDS = SECONDS
    fleets = Fleets()
    checks: dict[str, Layouts] = {}
    try:
        for part, cases in [(part, part.pairs()) for part in PARTS] + [
            (part, part.cases()) for part in PARTS
        ]:
            left = [case for case in cases if results.wanted(part.name_of(case))]
            if left and time.monotonic() < deadline:
                if part.name not in checks:
                    checks[part.name] = _begin(part, folder, fleets)
                    _remember(checks[part.name], part, results)
                _run_part(part, left, checks[part.name], results, fleets, deadline)
    finally:
        fleets.close()


def _remember(checks: Layouts, part: Part, results: Results) -> None:
    """What ranks that share layers gave in runs before this one."""
    for case in part.cases():
        entry = results.done.get(part.name_of(case), {})
        if entry.get("problem", "not run") is None and case["layout"][1] > 1:
            checks.shared[case["layout"][1], case["experts"]] = entry["bits"]


def _run_part(
    part: Part,
    left: Sequence[Case],
    checks: Layouts,
    results: Results,
    fleets: Fleets,
    deadline: float,
) -> None:
    began = time.monotonic()
    for number, case in enumerate(left, 1):
        if time.monotonic() > deadline:
            return
        entry: dict[str, Any] = {"name": part.name_of(case), "method": part.name, "case": case}
        try:
            core = checks.check(case)
            sums = {"drafted": core.speculation.drafted, "accepted": core.speculation.accepted}
            counts = {"steps": core.counters.steps, "bits": checks.found}
            entry |= {"problem": None, **counts, **sums}
        except Exception as error:  # whatever it is belongs to the result
            text = f"{type(error).__name__}: {error}".splitlines()[0][:400]
            entry["problem"] = text
            print(f"DIFFERENT {entry['name']}\n  {text}", flush=True)
        results.add(entry)
        fleets.close_all()
        if number % 10 == 0 or number == len(left):
            seconds = time.monotonic() - began
            print(f"{part.name} {number}/{len(left)}  {seconds:.0f} s", flush=True)


# ---------------------------------------------------------------- the page

HEAD = """
## Several ranks

A batch of requests on models with experts, over replicas (dp) and ranks that share each layer (tp),
with experts spread over all ranks or not: without drafts, and with ngram, a draft model, eagle3 and
mtp (all three with experts of their own) and dflash, each with a static length of 3, a table and an
adaptive one. Every combination starts an engine, and is held against one rank without speculation.

- At tp = 1 *equal* means its bits: token ids, log-probabilities with alternatives, text.
- At tp above 1, where sums are added in another order, it means log-probabilities within 1e-4 and
  the same tokens (a greedy one may differ where the best two are within 1e-3), and the same bits
  whatever dp and whoever drafts.
- Every rank's log of collectives is that of its group's others, and where experts are spread there
  is one exchange before each step.

*miniature* has ten requests and runs on reference operations. *smollm2* is SmolLM2-135M-Instruct as
a mixture of eight (`drumline upcycle --experts 8 --mtp`) on native operations, with six requests of
text, its own MTP head and a draft model of its first two layers; on reference operations, which
take half a second a step, it runs a selection. Of each model the cases in which every two values of
dp and tp, experts, method and length meet run first, then the others.

"""
TABLE = """| | equal | differ | not run | steps | drafted | accepted |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def count(results: Results) -> tuple[int, int]:
    """(equal, wanted)"""
    names = [part.name_of(case) for part in PARTS for case in part.cases()]
    return sum(not results.wanted(name) for name in names), len(names)


def table(results: Results) -> str:
    """A line for each layout of each part."""
    return TABLE + "".join(f"| {' | '.join(row)} |\n" for row in _rows(results))


def _rows(results: Results) -> Iterator[tuple[str, ...]]:
    for part in PARTS:
        cases = part.cases()
        for layout in part.factors["layout"]:
            names = [part.name_of(case) for case in cases if case["layout"] == layout]
            entries = [results.done[name] for name in names if name in results.done]
            good = [one for one in entries if one["problem"] is None]
            sums = (sum(one[key] for one in good) for key in ("steps", "drafted", "accepted"))
            counts = (len(good), len(entries) - len(good), len(names) - len(entries))
            place = PLACE.format(part.name, *layout)
            yield (place, *map(str, counts), *map("{:,}".format, sums))
