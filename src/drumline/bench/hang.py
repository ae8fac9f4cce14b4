"""The two ways in which data parallel speculation used to hang, as runs that can be repeated.

    near-limit     replicas come near max_model_len one after the other; the old gate lets one of
                   them skip its drafter while the others run theirs
    draft-length   replicas of different batch sizes look up their own draft length

Under ``local`` the old decision is switched on, in one place, and ranks wait for each other; under
``agreed`` all is as it always is here. Either way the run is held against one without speculation.
Knows no command line.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config import EngineConfig
from drumline.core.errors import Diverged, EngineError, RankLost
from drumline.core.params import SamplingParams
from drumline.core.request import FinishReason
from drumline.engine.facts import make_intake
from drumline.engine.fleet_core import FleetCore
from drumline.engine.intake import Prompt
from drumline.engine.loading import Core, load_core
from drumline.engine.messages import Trial
from drumline.engine.ranks import Nursery
from drumline.lockstep.mutants import Mutant

K = 3
SECONDS_MAX = 3600.0
_OLD = {
    "near-limit": Mutant.SKIP_DRAFTER_LOCALLY,
    "draft-length": Mutant.CHOOSE_K_LOCALLY,
}


@dataclass(frozen=True)
class Scenario:
    """What runs. ``prompts[r]``: prompt lengths of the requests that replica r serves. Its first
    one has ``outputs[r]`` tokens to come, each further one ``stagger`` less. ``table``: draft
    length by batch size."""

    name: str
    dp: int
    tp: int
    max_model_len: int
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    table: tuple[tuple[int, int, int], ...] = ()
    stagger: int = 0

    @property
    def request_count(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run. ``hung``: what named it, None if it completed; ``error``: its type.
    ``seconds_to_name``: from the last token of anybody to that error. ``gate_steps``: steps in
    which one replica's old gate failed while another drafted. ``equal``: tokens are those of one
    replica without speculation; None where the run did not complete."""

    scenario: str
    policy: str
    drafter: str
    steps: int
    seconds: float
    draft_lengths: dict[int, int]
    hung: str | None = None
    error: str | None = None
    seconds_to_name: float = 0.0
    gate_steps: int = 0
    equal: bool | None = None

    @property
    def good(self) -> bool:
        """It completed, with the right tokens; and where the old gate is watched, it did fail."""
        watched = self.policy == "agreed" and self.scenario == "near-limit"
        return self.equal is True and (self.gate_steps > 0 or not watched)


def scenario(name: str, scale: str = "full") -> Scenario:
    """The scenario by its name, as it was reported or scaled down to seconds."""
    if name == "draft-length":
        # 16, 64 and 256 requests of the reported table, divided until eight seats hold it. One
        # replica begins in its last range and comes to its first, the other is always there.
        table = ((1, 1, 3), (2, 4, 2), (5, 4096, 0))
        long, short, stagger = (512, 96, 12) if scale == "full" else (32, 24, 3)
        prompts = ((12,), (12, 9, 7, 11, 10, 8))
        return Scenario(name, 2, 1, 24 + long, prompts, (long, short), table, stagger)
    limit, longest, seats, output = (4100, 3072, 8, 1024) if scale == "full" else (150, 112, 2, 38)
    lengths = tuple((longest - 7 * replica,) * seats for replica in range(4))
    return Scenario(name, 4, 2, limit, lengths, (output,) * 4)


class Hang:
    """Runs a scenario on the checkpoint of a model. ``drafter``: its draft folder or method;
    ``module``: the folder of the mtp module, where it is not in the checkpoint."""

    def __init__(
        self,
        what: Scenario,
        model: Path,
        drafter: str = "mtp",
        settings: dict[str, Any] | None = None,
        nursery: Nursery | None = None,
        module: str | None = None,
    ) -> None:
        self.what = what
        self.model = model
        self.drafter = drafter
        self.settings = settings or {}
        self.nursery = nursery
        self.module = module

    def config(self, speculates: bool) -> EngineConfig:
        """With all replicas and drafts, or of one replica without."""
        what = self.what
        fields: dict[str, Any] = {
            "model": str(self.model),
            "max_model_len": what.max_model_len,
            "max_num_seqs": 8,
            "tensor_parallel_size": what.tp,
            **self.settings,
        }
        if speculates:
            fields["data_parallel_size"] = what.dp
            fields["enable_expert_parallel"] = True
            fields["speculative_config"] = json.dumps(self._speculation())
        return EngineConfig.from_kwargs(**fields)

    def _speculation(self) -> dict[str, Any]:
        asked: dict[str, Any] = {"num_speculative_tokens": K}
        if self.what.table:
            asked["num_speculative_tokens_per_batch_size"] = self.what.table
        if self.drafter == "draft-model":
            return {**asked, "method": "draft_model", "model": str(self.model / "draft-model")}
        if self.drafter == "mtp":
            return {**asked, "method": "mtp", "model": self.module}
        return {**asked, "method": "eagle3", "model": str(self.model / self.drafter)}

    def truth(self) -> list[tuple[int, ...]]:
        """Tokens of every request, by one replica without speculation."""
        with _closing(self._start(self.config(speculates=False), Trial())) as core:
            tokens = _Run(core, self.what)
            tokens.drive()
            return tokens.tokens

    def run(self, policy: str, truth: Sequence[tuple[int, ...]]) -> Outcome:
        old = (str(_OLD[self.what.name]),) if policy == "local" else ()
        trial = Trial(mutants=old, watch_gate=not old)
        began = time.monotonic()
        with _closing(self._start(self.config(speculates=True), trial)) as core:
            run = _Run(core, self.what)
            error: EngineError | None = None
            try:
                run.drive()
            except (Diverged, RankLost) as caught:
                error = caught
            now = time.monotonic()
            assert isinstance(core, FleetCore)
            failures = [one.gate_failures for one in core.told().values()]
            return Outcome(
                scenario=self.what.name,
                policy=policy,
                drafter=self.drafter,
                steps=core.counters.steps,
                seconds=now - began,
                draft_lengths=core.draft_lengths,
                hung=None if error is None else str(error),
                error=None if error is None else type(error).__name__,
                seconds_to_name=now - run.last_token if error is not None else 0.0,
                gate_steps=_alone_failures(failures),
                equal=None if error is not None else run.tokens == list(truth),
            )

    def _start(self, config: EngineConfig, trial: Trial) -> Core:
        parallel = config.parallel
        if parallel.data_parallel_size * parallel.tensor_parallel_size == 1:
            return load_core(config)
        return FleetCore.load(config, trial, self.nursery)


def _alone_failures(failures: Sequence[Sequence[int]]) -> int:
    """Steps in which some gates failed and others did not."""
    steps = {step for own in failures for step in own}
    return sum(1 for step in steps if not all(step in own for own in failures))


class _Run:
    """The requests of a scenario on an engine, all at once."""

    def __init__(self, core: Core, what: Scenario) -> None:
        self.core = core
        self.tokens: list[tuple[int, ...]] = [() for _ in range(what.request_count)]
        self.last_token = time.monotonic()
        self._index: dict[int, int] = {}
        self._open: set[int] = set()
        intake = make_intake(core.facts, core.tokenizer)
        vocab = core.facts.limits.vocab_size
        number = 0
        for replica, (lengths, output) in enumerate(zip(what.prompts, what.outputs, strict=True)):
            for place, length in enumerate(lengths):
                count = output - place * what.stagger
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                ids = tuple((7919 * (number + 1) + 31 * at) % vocab for at in range(length))
                requests = intake.admit(Prompt(token_ids=ids), params).requests
                self._index[requests[0].number] = number
                self._open.add(number)
                if isinstance(core, FleetCore) and core.mesh.dp > 1:
                    core.submit(requests, replica)
                else:
                    core.submit(requests)
                number += 1

    def drive(self) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while self._open:
            assert time.monotonic() < deadline, "requests do not end"
            for delta in self.core.step():
                index = self._index[delta.number]
                self.tokens[index] += delta.token_ids
                self.last_token = time.monotonic()
                if delta.finish_reason is not None:
                    assert delta.finish_reason is FinishReason.LENGTH, delta
                    self._open.discard(index)


@contextmanager
def _closing(core: Core) -> Iterator[Core]:
    try:
        yield core
    finally:
        core.close()


@contextmanager
def tiny_model(max_model_len: int) -> Iterator[Path]:
    """A miniature model with experts and all its drafters, for as long as it is used."""
    from drumline.models import tiny_drafts
    from drumline.models.tiny import write_tiny

    with tempfile.TemporaryDirectory(prefix="drumline-hang-") as folder:
        path = write_tiny(
            "qwen3_moe", Path(folder) / "model", 0, max_position_embeddings=max_model_len
        )
        tiny_drafts.add_mtp(path, 0)
        tiny_drafts.write_eagle3(path, path / "eagle3", 0, layer="qwen3_moe")
        tiny_drafts.write_eagle3(path, path / "dense", 0, layer="llama")
        write_tiny(
            "qwen3_moe", path / "draft-model", 1, layers=1, max_position_embeddings=max_model_len
        )
        yield path
