"""Writes the target's hidden states to files, one row per token; proposes nothing, runs no pass.

    <hidden_states_dir>/<request number, 8 digits>.safetensors
        token_ids  [rows] int64             the tokens at positions 0 .. rows - 1
        tap_<k>    [rows, hidden] float32   the residual stream after k layers at those positions
    with the prompt's length, the sampling seed and the sample's index as metadata

A row is what the target computed at a position, so the token sampled last has none: rows =
prompt + completion - 1. Rows are kept by position: a position that is computed twice (after a
preemption) is one row, and its bits are the same (promise P1).

A file appears, whole, when its request ends. A preempted request has its rows so far in a file,
too, which its further rows extend. Every position must be computed by this engine: under this
method no request starts from another's cached prefix (`resolve` turns prefix caching off, and a
row that starts beyond what is known here is an error, not a hole in a file).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drumline.config import SpeculativeConfig
from drumline.core.errors import ConfigError, EngineError
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import DrafterContext, DraftRow, Proposal
from drumline.drafting.host import no_facts
from drumline.models.checkpoint import Checkpoint
from drumline.models.layers import ModelOutput

TOKENS = "token_ids"

logger = logging.getLogger("drumline.drafting")


@dataclass(slots=True)
class Recording:
    """The rows of one request, in memory: ``chunks`` follow each other from position 0."""

    token_ids: list[int]
    metadata: dict[str, str]
    chunks: dict[int, list[Tensor]] = field(default_factory=dict)  # tap → [rows, hidden] each


class HiddenStatesWriter:
    """A `Drafter` in form: it sees every step, and has no guess."""

    def __init__(self, folder: Path, taps: Sequence[int], method: str) -> None:
        """``folder`` is made if it is not there. ConfigError if that cannot
        be, or if it holds an earlier run's files."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "speculative_config.hidden_states_dir", str(folder), f"no folder: {error.strerror}"
            ) from None
        if any(folder.glob("*.safetensors")):
            raise ConfigError(
                "speculative_config.hidden_states_dir",
                str(folder),
                "holds hidden states of an earlier run, which would be overwritten; name another",
            )
        self.folder = folder
        self.taps = tuple(taps)
        self.traits = DrafterTraits(method=method, needs_taps=True, reads_hidden=False)
        self._recordings: dict[int, Recording] = {}
        self._parked: set[int] = set()  # written, and extended if the request comes back
        self._problem: str | None = None  # why a file could not be written

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        """Takes in what was committed; no drafts. EngineError if a file could not be written."""
        if self._problem is not None:
            raise EngineError(self._problem)
        for row in rows:
            assert output is not None, "rows without the target's hidden states"
            self._take(row, output)
        return Proposal(((),) * len(rows))

    def forget(self, number: int) -> None:
        """Writes what there is: the whole if the request ended, the start if it was preempted.
        A failure is logged, and ends the engine's next step."""
        recording = self._recordings.pop(number, None)
        if recording is not None:
            self._write(number, recording)
            self._parked.add(number)

    def close(self) -> None:
        """Writes what has not ended yet."""
        for number in list(self._recordings):
            self.forget(number)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:08}.safetensors"

    def _take(self, row: DraftRow, output: ModelOutput) -> None:
        recording = self._recordings.get(row.number) or self._begin(row)
        known = len(recording.token_ids)
        if row.start > known:
            raise EngineError(
                f"request {row.number} starts at position {row.start}, but hidden states are "
                f"known up to {known} only: prefix caching must be off"
            )
        skip = known - row.start
        if skip >= row.count:
            return
        recording.token_ids += row.committed[known : row.start + row.count]
        part = slice(row.offset + skip, row.offset + row.count)
        for tap in self.taps:
            recording.chunks.setdefault(tap, []).append(output.taps[tap][part].cpu().clone())

    def _begin(self, row: DraftRow) -> Recording:
        request = row.request
        metadata = {
            "prompt_tokens": str(len(request.prompt_token_ids)),
            "seed": str(request.seed),
            "sample_index": str(request.sample_index),
        }
        recording = Recording([], metadata)
        if row.number in self._parked:
            self._parked.discard(row.number)
            stored = load_file(self.path(row.number))
            recording.token_ids = stored[TOKENS].tolist()
            recording.chunks = {tap: [stored[f"tap_{tap}"]] for tap in self.taps}
        self._recordings[row.number] = recording
        return recording

    def _write(self, number: int, recording: Recording) -> None:
        tensors = {TOKENS: torch.tensor(recording.token_ids, dtype=torch.int64)}
        tensors |= {f"tap_{tap}": torch.cat(recording.chunks[tap]) for tap in self.taps}
        path = self.path(number)
        unfinished = path.with_suffix(".part")
        try:
            save_file(tensors, unfinished, metadata=recording.metadata)
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            self._problem = f"hidden states of request {number} cannot be written: {error}"
            logger.error(self._problem)


def facts(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """See `DrafterModule.facts`: no weights, no cache, no positions of its own."""
    return no_facts(speculative, checkpoint)


def load(context: DrafterContext) -> HiddenStatesWriter:
    """See `DrafterModule.load`. ConfigError for a tap that the target has not."""
    speculative = context.speculative
    depth = context.checkpoint.config.num_hidden_layers
    taps: tuple[int, ...] = speculative.hidden_states_taps or (depth,)
    name = "speculative_config.hidden_states_taps"
    if len(set(taps)) < len(taps):
        raise ConfigError(name, list(taps), "names a tap twice")
    for tap in taps:
        if tap > depth:
            raise ConfigError(name, list(taps), f"tap {tap} is outside 0..{depth}")
    assert speculative.hidden_states_dir is not None, "the config requires it"
    return HiddenStatesWriter(Path(speculative.hidden_states_dir), taps, speculative.method)
