"""What any drafter must pass, whatever it is: functions that take one and assert the contract.

    check_passes       the ledger holds exactly the passes that traits and plan promise, with their
                       sizes, in every step and with no rows at all, whatever was accepted; behind
                       a lookup those that the rows it did not find ask for; none where entries
                       can wait
    check_range        near every limit it is asked for what fits, and drafts no more
    check_steady       drafts follow from what a request committed: not from its neighbours, the
                       cuts of its prompt, a prefix hit, a preemption, or the padded flag
    check_reads        drafts do not change where hidden states that nobody is said to read are none
    check_forgets      who left leaves nothing behind

A drafter is given as a `Method`; everything runs through an engine, as it will. `Ear` stands
between the worker and the drafter and keeps what was said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drafting.methods import Method
from drafting.world import BLOCK, LENGTH, Job, Watch, cache_bytes, engine, jobs, tell
from drumline.core.params import SamplingParams
from drumline.core.plan import StepPlan
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import DraftRow, Pass, Proposal
from drumline.drafting.neural import TapDrafter
from drumline.engine.llm import LLM
from drumline.lockstep.script import pass_sizes
from drumline.models.layers import ModelOutput
from drumline.worker.speculator import Speculator


@dataclass(frozen=True)
class Heard:
    """One call of `propose`: (request's seed, n, k) of each row, its drafts, and the passes.
    ``repeats``: rows that may draft and whose last token stood before."""

    draft_k: int
    rows: tuple[tuple[int, int, int], ...]
    drafts: tuple[tuple[int, ...], ...]
    passes: tuple[Pass, ...]
    repeats: tuple[bool, ...]

    def asked_of_network(self, lookup: bool) -> int:
        """The most drafts that a row wants of a network; behind a lookup of single tokens only
        rows that it does not find want any."""
        if not lookup:
            return self.draft_k
        pairs = zip(self.rows, self.repeats, strict=True)
        return max((0 if repeats else k for (_, _, k), repeats in pairs), default=0)


@dataclass
class Ear:
    """A drafter that hands everything on to another and remembers it."""

    inner: Any
    speculator: Speculator
    heard: list[Heard] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)

    @property
    def traits(self) -> DrafterTraits:
        traits: DrafterTraits = self.inner.traits
        return traits

    @property
    def taps(self) -> tuple[int, ...]:
        taps: tuple[int, ...] = self.inner.taps
        return taps

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        proposal: Proposal = self.inner.propose(rows, output, draft_k)
        self.heard.append(
            Heard(
                draft_k,
                tuple((row.request.seed, row.length, row.k) for row in rows),
                proposal.drafts,
                tuple(self.speculator.ledger.passes),
                tuple(row.k > 0 and row.committed[-1] in row.committed[:-1] for row in rows),
            )
        )
        return proposal

    def forget(self, number: int) -> None:
        self.forgotten.append(number)
        self.inner.forget(number)

    def close(self) -> None:
        self.inner.close()


def listen(llm: LLM) -> Ear:
    speculator = llm.core.worker.speculator
    assert speculator is not None
    ear = Ear(speculator.drafter, speculator)
    speculator.drafter = ear
    speculator.contained = False  # a drafter that fails fails the check
    return ear


def start(
    target: Path, method: Method, k: int, padded: bool = True, **settings: Any
) -> tuple[LLM, Ear, Watch]:
    speculative = method.speculative(target, k, disable_padded_drafter_batch=not padded)
    tokens = settings.pop("cache_tokens", None)
    if tokens is not None:
        settings["kv_cache_memory_bytes"] = cache_bytes(target, speculative, tokens)
    llm = engine(target, speculative, **settings)
    return llm, listen(llm), Watch(llm)


def serve(llm: LLM, batch: Sequence[Job]) -> list[tuple[int, ...]]:
    outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    assert llm.core.pool.used_count == 0
    return [output.outputs[0].token_ids for output in outputs]


# ---- passes ------------------------------------------------------------------------------------


def check_passes(target: Path, method: Method, k: int, padded: bool) -> None:
    """Every call's ledger against the script; then a dummy for each script that was seen."""
    llm, ear, watch = start(target, method, k, padded, max_num_batched_tokens=24, max_num_seqs=4)
    serve(llm, jobs(False, longest=k))
    traits = ear.traits
    scripts: dict[tuple[int, tuple[int, ...]], None] = {}
    assert len(ear.heard) == len(watch.steps)
    spared = waited = 0
    entries = Entries(ear)
    for heard, (plan, _) in zip(ear.heard, watch.steps, strict=True):
        assert heard.draft_k == plan.draft_k
        assert len(heard.rows) == len(plan.rows)
        shapes = [(row.width, row.samples) for row in plan.rows]
        sizes = pass_sizes(traits, shapes, plan.draft_k)
        assert len(sizes) == traits.passes(plan.draft_k)
        made = traits.passes(heard.asked_of_network(method.lookup))
        spared += len(sizes) - made
        if entries.wait(heard, plan, method.lookup):
            waited, made = waited + 1, 0
        script = tuple(Pass("draft", at, size) for at, size in enumerate(sizes))
        assert heard.passes == script[:made]
        for (_, _, allowed), drafts in zip(heard.rows, heard.drafts, strict=True):
            assert len(drafts) <= allowed <= plan.draft_k
        scripts[plan.draft_k, sizes] = None
    assert any(drafts for heard in ear.heard for drafts in heard.drafts)
    assert bool(spared) == (method.lookup and traits.passes(k) > traits.passes(0))
    assert bool(waited) == entries.may_wait
    assert {draft_k for draft_k, _ in scripts} >= {0, k}
    for draft_k, sizes in scripts:
        ear.speculator.ledger.begin(sizes)
        assert ear.inner.propose([], None, draft_k).drafts == ()
        ear.speculator.ledger.end()
        made = traits.passes(0 if method.lookup else draft_k)
        passes = ear.speculator.ledger.passes
        assert [one.size for one in passes] == list(sizes[:made])


@dataclass
class Entries:
    """Which entries of a tap drafter are not made yet, by its rule: none are needed before a row
    drafts, or a block that they lie in is full."""

    ear: Ear
    first: dict[int, int] = field(default_factory=dict)  # number → the first that waits

    @property
    def may_wait(self) -> bool:
        return isinstance(getattr(self.ear.inner, "inner", self.ear.inner), TapDrafter)

    def wait(self, heard: Heard, plan: StepPlan, lookup: bool) -> bool:
        """Whether those of this step may; notes which are left."""
        if not self.may_wait:
            return False
        for admission in plan.admitted:
            self.first.pop(admission.request.number, None)
        firsts = [self.first.pop(row.number, row.start + 1) for row in plan.rows]
        lengths = [length for _, length, _ in heard.rows]
        asked = [0 if lookup and found else row[2]
                 for row, found in zip(heard.rows, heard.repeats, strict=True)]  # fmt: skip
        waits = not any(asked) and all(
            first // BLOCK == (length - 1) // BLOCK
            for first, length in zip(firsts, lengths, strict=True)
        )
        for row, first, length in zip(plan.rows, firsts, lengths, strict=True):
            if waits:
                self.first[row.number] = first
            elif length > len(row.block_ids) * BLOCK:
                self.first[row.number] = length - 1  # no slot yet
        return waits


# ---- range -------------------------------------------------------------------------------------


def check_range(target: Path, method: Method, k: int, padded: bool) -> None:
    """Prompts of every length L - 8 .. L - 1, beside a neighbour far from any limit."""
    llm, ear, watch = start(target, method, k, padded)
    traits = ear.speculator.traits
    for count in range(LENGTH - 8, LENGTH):
        prompt = tuple(5 + index * 11 % 100 for index in range(count))
        params = SamplingParams(temperature=0.0, max_tokens=None, seed=count, ignore_eos=True)
        near = SamplingParams(temperature=0.0, max_tokens=9, seed=1, ignore_eos=True)
        long, short = serve(llm, [(prompt, params), ((9, 8, 7), near)])
        assert len(long) == LENGTH - count
        assert len(short) == 9
        tell(prompt, params, long)
    last = min(LENGTH, traits.drafter_range or LENGTH)
    for heard, (plan, _) in zip(ear.heard, watch.steps, strict=True):
        assert heard.draft_k == plan.draft_k
        for (_, length, allowed), drafts in zip(heard.rows, heard.drafts, strict=True):
            assert len(drafts) <= allowed
            assert allowed == 0 or length + allowed < last
    short_ks = {row[2] for heard in ear.heard for row in heard.rows if row[0] == 1}
    assert k in short_ks, "the neighbour drafts as if it were alone"


# ---- steady --------------------------------------------------------------------------------------

CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "one at a time": {"max_num_seqs": 1},
    "not padded": {"padded": False},
    "in pieces": {"max_num_batched_tokens": 12, "max_num_seqs": 4},
    "thrown out": {"cache_tokens": LENGTH},
    "nothing cached": {"enable_prefix_caching": False},
}


def said(ear: Ear) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """(seed, n, k) → drafts, for every row that might draft. Saying it twice must be the same."""
    found: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for heard in ear.heard:
        for key, drafts in zip(heard.rows, heard.drafts, strict=True):
            if key[2]:
                assert found.setdefault(key, drafts) == drafts, f"row {key} changed its mind"
    return found


def check_steady(target: Path, method: Method, k: int) -> None:
    """The same drafts in all `CIRCUMSTANCES`, at temperature; twice where a prefix may be found."""
    batch = jobs(True)[:7]
    reference: dict[tuple[int, int, int], tuple[int, ...]] = {}
    common = 0
    for name, settings in CIRCUMSTANCES.items():
        llm, ear, _ = start(target, method, k, **settings)
        for _ in range(2 if name in ("all at once", "in pieces") else 1):
            serve(llm, batch)
        for key, drafts in said(ear).items():
            common += key in reference
            assert reference.setdefault(key, drafts) == drafts, f"{name}: row {key}"
        if name == "thrown out":
            assert llm.core.counters.preemptions > 0
    assert common > 50
    assert any(reference.values())


# ---- reads ---------------------------------------------------------------------------------------


def poison_unread(llm: LLM) -> list[int]:
    """Makes hidden states that a pass of the target was not asked for no numbers; returns, pass by
    pass, of how many it did."""
    model = llm.core.worker.model
    forward, counts = model.forward, []

    def poisoned(*args: Any, **more: Any) -> Any:
        output = forward(*args, **more)
        read_at = args[5]
        unread = torch.zeros(len(output.hidden), dtype=torch.bool)
        if read_at is not None:
            unread[:] = True
            unread[list(read_at)] = False
        output.hidden[unread] = torch.nan
        counts.append(int(unread.sum()))
        return output

    model.forward = poisoned
    return counts


def check_reads(target: Path, method: Method, k: int) -> None:
    """Whoever says that it reads no hidden states drafts the same without them."""
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 4}
    llm, ear, _ = start(target, method, k, **settings)
    truth = serve(llm, jobs(False)), [heard.drafts for heard in ear.heard]
    llm, ear, _ = start(target, method, k, **settings)
    counts = poison_unread(llm)
    assert (serve(llm, jobs(False)), [heard.drafts for heard in ear.heard]) == truth
    assert any(counts) != ear.traits.reads_hidden


# ---- forget --------------------------------------------------------------------------------------


def kept(drafter: Any) -> int:
    """Entries that a drafter keeps by request number, in dictionaries of its own."""
    inner = getattr(drafter, "inner", drafter)
    return sum(
        len(value)
        for name, value in vars(inner).items()
        if isinstance(value, dict) and name.startswith("_")
    )


def check_forgets(target: Path, method: Method, k: int) -> None:
    """After everybody has left and one step more, nothing is kept by number."""
    llm, ear, _ = start(target, method, k, cache_tokens=LENGTH)
    before = kept(ear.inner)
    serve(llm, jobs(False))
    assert llm.core.counters.preemptions > 0
    llm.generate([(5, 6)], SamplingParams(temperature=0.0, max_tokens=1, seed=2))
    assert set(range(8)) <= set(ear.forgotten)
    assert len(ear.forgotten) > 8  # preempted, too
    ear.forget(8)
    assert kept(ear.inner) == before
