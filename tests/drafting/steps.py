"""One rank driven by hand: a test says which sequences run, with how many tokens and drafts.

The worker, the verifier and the drafter are the engine's own; blocks, chunks, preemptions and
prefix hits are what the test wants them to be, so that it can count what each costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drumline.config import SpeculativeConfig
from drumline.core.params import SamplingParams
from drumline.core.plan import Admission, Row, RowResult, StepPlan
from drumline.core.request import Request
from drumline.drafting.base import Drafter, DrafterContext, PassLedger
from drumline.drafting.registry import load_drafter
from drumline.models.checkpoint import open_checkpoint
from drumline.models.registry import model_module
from drumline.ops import load_ops
from drumline.sampling.accept import Verifier
from drumline.sampling.draft import DraftSampler
from drumline.sampling.sampler import Sampler
from drumline.worker.speculator import Speculator
from drumline.worker.worker import Worker

BLOCK = 4


@dataclass(eq=False)
class Running:
    """One request on its way: as the scheduler would keep it."""

    request: Request
    tokens: list[int]
    computed: int = 0
    drafts: tuple[int, ...] = ()
    blocks: list[int] = field(default_factory=list)
    known: bool = False
    gains: list[int] = field(default_factory=list)  # tokens that each of its drafted steps brought
    drafted: int = 0

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt_token_ids) :])


class Bench:
    """``speculative``: keys of the speculative config, or None for no drafter."""

    def __init__(
        self,
        target: Path,
        speculative: dict[str, Any] | None = None,
        length: int = 64,
        blocks: int = 64,
        backend: str = "reference",
    ) -> None:
        checkpoint = open_checkpoint(target)
        vocab = checkpoint.config.vocab_size
        ops = load_ops(backend, "cpu")
        model = model_module(checkpoint.config.model_type).Model(
            checkpoint.config, checkpoint.tensors, ops, length
        )
        spec = model.kv_spec
        cache = ops.allocate_kv(spec.layers, blocks, BLOCK, spec.kv_heads, spec.head_dim, "float32")
        sampler = Sampler(vocab, "raw_logprobs")
        speculator = None
        self.drafter: Drafter | None = None
        self.ledger = PassLedger()
        self.length = length
        self.ranged = True  # rows ask for drafts within the drafter's range only
        if speculative is not None:
            settings = SpeculativeConfig.from_mapping(speculative)

            def make_draft_sampler(sharpening: float = 1.0, token_table: Any = None) -> Any:
                method = settings.draft_sample_method
                return DraftSampler(vocab, method, sharpening, token_table, sampler.state)

            self.drafter = load_drafter(
                DrafterContext(
                    speculative=settings,
                    checkpoint=checkpoint,
                    target=model,
                    ops=ops,
                    max_model_len=length,
                    num_kv_blocks=blocks,
                    block_size=BLOCK,
                    kv_cache_dtype="float32",
                    ledger=self.ledger,
                    make_draft_sampler=make_draft_sampler,
                )
            )
            speculator = Speculator(self.drafter, self.ledger, vocab)
        self.worker = Worker(model, ops, cache, Verifier(sampler), speculator)
        self.free = list(range(blocks))
        self._released: list[int] = []
        self._next = 0
        self._step = 0

    def add(self, prompt: Sequence[int], **params: Any) -> Running:
        """A sequence that has not run; ``params`` as in `SamplingParams`, greedy by default."""
        settings = SamplingParams(**{"temperature": 0.0, "seed": 7, "ignore_eos": True} | params)
        request = Request(
            number=self._next,
            prompt_token_ids=tuple(prompt),
            params=settings,
            max_tokens=self.length - len(prompt),
            seed=settings.seed or 0,
        )
        self._next += 1
        return Running(request, list(prompt))

    def adopt(self, sequence: Running, other: Running, blocks: int) -> None:
        """A prefix hit: the first full blocks of ``other`` hold what ``sequence`` begins with."""
        length = blocks * BLOCK
        assert not sequence.blocks
        assert other.computed >= length
        assert sequence.tokens[:length] == other.tokens[:length]
        sequence.blocks = other.blocks[:blocks]
        sequence.computed = length

    def preempt(self, sequence: Running) -> None:
        """Takes its blocks and keeps its tokens."""
        self._give_back(sequence)
        sequence.computed = 0
        sequence.drafts = ()
        sequence.known = False

    def end(self, sequence: Running) -> None:
        self._give_back(sequence)
        self.step([])

    def step(
        self,
        sequences: Sequence[Running],
        k: int = 0,
        budget: int = 10**6,
        spare: int | None = None,
    ) -> list[RowResult]:
        """One step. ``budget``: most tokens that a prefill takes. ``spare``: slots past the
        committed tokens that a row may hold at most (None: as many as drafts need)."""
        admitted, rows = [], []
        for sequence in sequences:
            if not sequence.known:
                admitted.append(Admission(sequence.request, tuple(sequence.tokens)))
            rows.append(self._row(sequence, k, budget, spare))
        plan = StepPlan(
            epoch=0,
            step=self._step,
            rows=tuple(rows),
            admitted=tuple(admitted),
            released=tuple(self._released),
            draft_k=k,
        )
        self._released.clear()
        self._step += 1
        with torch.inference_mode():
            results = self.worker.execute(plan).rows
        for sequence, row, result in zip(sequences, rows, results, strict=True):
            self._commit(sequence, row, result)
        return list(results)

    def run(self, sequences: Sequence[Running], count: int, k: int, budget: int = 10**6) -> None:
        """Steps until each has at least ``count`` outputs; who has them rests."""
        while left := [s for s in sequences if len(s.outputs) < count]:
            self.step(left, k, budget)

    def _row(self, sequence: Running, k: int, budget: int, spare: int | None) -> Row:
        start = sequence.computed
        tokens = tuple(sequence.tokens[start : start + budget])
        samples = start + len(tokens) == len(sequence.tokens)
        drafts = sequence.drafts if samples else ()
        end = start + len(tokens) + len(drafts)
        wanted = end + (1 + k if spare is None else spare)
        while len(sequence.blocks) * BLOCK < min(max(wanted, end), self.length):
            sequence.blocks.append(self.free.pop())
        limit = min(self.length - 1, len(sequence.blocks) * BLOCK)
        if spare is not None:
            limit = min(limit, end + spare)
        traits = None if self.drafter is None else self.drafter.traits
        if self.ranged and traits is not None and traits.drafter_range is not None:
            limit = min(limit, traits.drafter_range - 1)
        return Row(
            number=sequence.request.number,
            start=start,
            tokens=tokens,
            block_ids=tuple(sequence.blocks),
            samples=samples,
            drafts=drafts,
            draft_limit=limit if samples else 0,
            draft_max=k,
        )

    def _commit(self, sequence: Running, row: Row, result: RowResult) -> None:
        assert result.error is None, result.error
        sequence.known = True
        sequence.computed = row.start + len(row.tokens)
        sequence.drafts = ()
        if row.samples:
            if row.drafts:
                sequence.gains.append(len(result.tokens))
            sequence.tokens += result.tokens
            sequence.computed += len(result.tokens) - 1
            sequence.drafts = result.drafts
            sequence.drafted += len(result.drafts)

    def _give_back(self, sequence: Running) -> None:
        self.free = sequence.blocks + self.free
        sequence.blocks = []
        self._released.append(sequence.request.number)
