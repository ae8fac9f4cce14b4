"""The contract between a worker and a drafter.

In every step, after the target has run and tokens were accepted, the worker calls `propose` once
with all rows of the step: those that decode, those still in prefill, and those that may not draft
(``k`` 0). The drafter first takes in what was committed, then makes exactly
``traits.passes(draft_k)`` passes, whatever the rows are, none at all included; rows beyond their
``k`` are masked, never called with a position outside its range. Whoever asks a drafter for less
than the step's draft length says so to the ledger first (`PassLedger.shorten`), which refuses it
where other ranks take part in the passes; so does a drafter that lets what was committed wait for a
step in which somebody drafts.

    position     0 ....... start ......... start + count - 1 | n - 1 | n  n + 1 ..  n + k - 1
                 before    computed by the target just now   | new   | drafts to propose
    committed    [...................................................]
    hidden rows            offset ......... offset + count - 1

A row that finished nothing (prefill goes on) has no new token: its n - 1 is the prompt token after
the last computed one, and its ``k`` is 0. In both cases the pair (hidden at p, token at p + 1) is
there for every computed p: that is what EAGLE-like drafters learn from, and they keep the entry
made of it at slot p + 1 of the target's own block ids.

The target also computed ``width - count`` rejected drafts, whose hidden rows follow at
``offset + count``. A padded drafter batch feeds them too, masked (slot -1); with
``disable_padded_drafter_batch`` only what was committed is fed. Sizes in the ledger are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct
from numpy.typing import ArrayLike
from torch import Tensor

from drumline.config import SpeculativeConfig
from drumline.core.request import Request
from drumline.core.traits import DrafterTraits
from drumline.models.checkpoint import Checkpoint
from drumline.models.config import ArchitectureConfig
from drumline.models.layers import KVSpec, ModelOutput
from drumline.models.sharding import WHOLE, ShardedTensors, Share, shard_config
from drumline.ops.base import KVCache, Linear, Ops, PagedBatch
from drumline.ops.weights import WeightTensor
from drumline.sampling.distribution import Distribution
from drumline.sampling.draft import DraftSampler, DraftToken
from drumline.sampling.history import SamplingRow


class DraftRow(Struct, frozen=True):
    """One sequence of the step as a drafter sees it.

    ``committed`` holds all committed ids up to and with position n - 1 (only read during a call).
    ``count`` of the row's ``width`` target tokens are committed; the others were rejected drafts.
    ``samples`` says that the step brought a new token (else prefill goes on).
    ``block_ids`` may end before slot n - 1 when blocks are short: what has no slot is not written
    (``k`` is 0 then, and respects the slots of drafts). ``fresh`` says that the row's
    ``start`` came from the prefix cache, or is 0: the drafter sees the sequence for the first time.
    """

    request: Request
    committed: Sequence[int]
    start: int
    count: int
    offset: int
    block_ids: tuple[int, ...]
    k: int
    fresh: bool = False
    width: int = 0
    samples: bool = True

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def length(self) -> int:
        """n: committed tokens, and the position of the first draft."""
        return self.start + self.count + 1

    def sampling_row(self, drafts: tuple[int, ...]) -> SamplingRow:
        """The history of the next draft: everything committed and the drafts before it."""
        return SamplingRow(self.request, self.committed, drafts)


class Proposal(Struct, frozen=True):
    """Per row of the call, in its order: at most ``k`` target token ids each.

    ``probs`` holds, for probabilistic drafts, the distribution each draft was drawn from
    (`DraftToken.probs`), row by row like ``drafts``; None for a point mass. Empty: all are.
    """

    drafts: tuple[tuple[int, ...], ...]
    probs: tuple[tuple[Distribution | None, ...], ...] = ()

    @classmethod
    def of(cls, rows: Sequence[Sequence[DraftToken]]) -> Proposal:
        """From what a `DraftSampler` drew, row by row."""
        return cls(
            tuple(tuple(token.token_id for token in row) for row in rows),
            tuple(tuple(token.probs for token in row) for row in rows),
        )


class Pass(Struct, frozen=True):
    """A ledger entry: pass ``index`` of ``phase``, padded to ``size`` tokens."""

    phase: str
    index: int
    size: int


@dataclass(slots=True)
class PassLedger:
    """What one rank's drafter issues, beside what the step's script says it must.

    The worker begins a step with the script's sizes; a drafter issues each of its passes, in
    order, just before it runs. With no live row it issues the same ones. ``exact``: passes share
    collectives with other ranks, so each is padded to exactly its size; else to one token.
    """

    sizes: tuple[int, ...] = ()
    exact: bool = False
    passes: list[Pass] = field(default_factory=list)  # of this step

    def begin(self, sizes: tuple[int, ...], exact: bool = False) -> None:
        self.sizes = sizes
        self.exact = exact
        self.passes = []

    def issue(self, tokens: int) -> int:
        """Notes the next draft pass with ``tokens`` live tokens; returns its padded size."""
        index = len(self.passes)
        assert index < len(self.sizes), f"draft pass {index} is not in the script"
        size = self.sizes[index]
        assert tokens <= size, f"draft pass {index} takes {tokens} tokens, the script says {size}"
        self.passes.append(Pass("draft", index, size))
        return size

    def shorten(self, count: int) -> None:
        """Leaves all passes after the first ``count`` out, before any is issued. What is shared
        cannot be left out, because others would wait in it."""
        assert not self.exact, "a pass that others take part in is never left out"
        assert not self.passes, "a pass was issued already"
        assert count <= len(self.sizes), f"{count} draft passes of {len(self.sizes)}"
        self.sizes = self.sizes[:count]

    def padding(self, laid_out: int) -> int:
        """Tokens to add to those of the pass just issued, which are laid out."""
        size = self.sizes[len(self.passes) - 1] if self.exact else 1
        assert laid_out <= size or not self.exact, f"{laid_out} tokens in a pass of {size}"
        return max(0, size - laid_out)

    def end(self) -> None:
        """Asserts that what was issued is what the script said."""
        assert len(self.passes) == len(self.sizes), (
            f"{len(self.passes)} draft passes issued, the script says {len(self.sizes)}"
        )


class Drafter(Protocol):
    """One drafter of one rank."""

    @property
    def traits(self) -> DrafterTraits: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target it reads: tap k is the stream after k layers."""
        ...

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        """Takes in the step and drafts. ``output`` holds the target's hidden states and taps of
        this step's flat tokens; None in a step without target tokens (a dummy step)."""
        ...

    def forget(self, number: int) -> None:
        """The request has ended or was preempted; what is kept beside its blocks may go."""
        ...

    def close(self) -> None:
        """Releases what outlives a step, as files."""
        ...


# ---------------------------------------------------------------- what a drafter is made from


class TargetModel(Protocol):
    """Weights and a forward pass; no state of any sequence. Every architecture has this form."""

    embedding: Linear
    head: Linear
    final_norm: Tensor

    @property
    def kv_spec(self) -> KVSpec: ...

    def forward(
        self,
        ids: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        taps: Sequence[int] = (),
        logits_at: Sequence[int] = (),
        read_at: Sequence[int] | None = None,
    ) -> ModelOutput:
        """``[tokens]`` int64 → hidden states before the final norm ``[tokens, hidden]``, taps, and
        the logits of the tokens at ascending ``logits_at``. ``read_at``: see `Ops.run_decoder`."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` → ``[rows, vocab]``."""
        ...


class MakeDraftSampler(Protocol):
    def __call__(
        self, sharpening: float = 1.0, token_table: ArrayLike | None = None
    ) -> DraftSampler: ...


@dataclass(frozen=True)
class DrafterContext:
    """Everything a drafter may be made from; `registry.load_drafter` hands it to a method.

    ``speculative`` is the resolved speculative config: no key that its method needs is None.
    ``checkpoint`` is the target's: config, tensors, path and tokenizer. Positions stay below
    ``max_model_len``. A drafter's cache has ``num_kv_blocks`` blocks of ``block_size`` tokens, like
    the target's, because it is addressed by the same block ids. ``make_draft_sampler(sharpening,
    token_table)`` gives a `DraftSampler` for the configured ``draft_sample_method``. ``share``:
    which part of the drafter's layers this rank holds; all of them unless
    ``draft_tensor_parallel_size`` says that the target's ranks share them (`own_share`).
    """

    speculative: SpeculativeConfig
    checkpoint: Checkpoint
    target: TargetModel
    ops: Ops
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    kv_cache_dtype: str
    ledger: PassLedger
    make_draft_sampler: MakeDraftSampler
    share: Share = WHOLE

    def own_share(
        self, config: ArchitectureConfig, weights: Mapping[str, WeightTensor]
    ) -> tuple[ArchitectureConfig, Mapping[str, WeightTensor]]:
        """What this rank holds of a draft's layers."""
        if self.share.size == 1:
            return config, weights
        local = shard_config(config, weights, self.share)
        return local, ShardedTensors(config, weights, self.share)


class DrafterModule(Protocol):
    """What a module of `registry.MODULES` offers.

    ``facts`` runs before the cache is sized and reads no weights: KV layers, heads and size per
    head, positions, default draft length and weight bytes, by the names of config's
    `DrafterFacts`; a host drafter has an empty mapping. Both raise `UsageError` for what is
    missing or does not fit.
    """

    def facts(
        self, speculative: SpeculativeConfig, checkpoint: Checkpoint
    ) -> Mapping[str, Any]: ...

    def load(self, context: DrafterContext) -> Drafter: ...
