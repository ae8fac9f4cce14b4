"""Draft lengths over replicas: the static fallback (vLLM's, PR 45963), and agreement in its place.

The batch of 256 requests is the one for which a table gives 0: a replica that chose alone would
draft nothing while another drafts 3, and they would wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from drumline.config import (
    DrafterFacts,
    EngineConfig,
    MachineFacts,
    ModelFacts,
    Resolved,
    resolve,
)
from drumline.config.report import log_adjustments
from drumline.core.ledger import Ledger
from drumline.core.plan import RowResult, StepPlan, StepProposal, StepResult
from drumline.core.traits import Collective, DrafterTraits, ModelTraits, PerToken
from drumline.lockstep.conductor import WORKING, GroupConductor, Rest
from drumline.lockstep.decide import Rules
from drumline.lockstep.shape import Vector
from drumline.scheduler import Scheduler, TokenFinish, make_draft_length
from drumline.scheduler.testing import create_scheduler

from .world import make_request

TABLE = [[1, 16, 3], [64, 128, 2], [256, 4096, 0]]
SHARED = ModelTraits(body=(Collective("all_gather", "ep", (PerToken(), 4)),))
MTP = DrafterTraits("mtp", True, True, True, first_pass=SHARED, later_pass=SHARED)


def resolved(policy: str, **more: Any) -> Resolved:
    config = EngineConfig.from_kwargs(
        data_parallel_size=2,
        enable_expert_parallel=True,
        max_num_seqs=256,
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": 3,
            "num_speculative_tokens_per_batch_size": TABLE,
            "dp_draft_length": policy,
        },
        **more,
    )
    model = ModelFacts(
        model_type="mixtral",
        max_position_embeddings=64,
        vocab_size=128,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
    )
    machine = MachineFacts(
        available_cores=2,
        physical_cores=2,
        free_memory_bytes=2**30,
        total_memory_bytes=2**30,
    )
    return resolve(config, model, machine, DrafterFacts(method="mtp"))


def scheduler(policy: str, request_count: int) -> Scheduler:
    found = create_scheduler(
        256, 4096, 3, TABLE, data_parallel_size=2, dp_draft_length=policy, max_model_len=64
    )
    for number in range(request_count):
        found.add(make_request(number, [1, 2], 40))
    return found


def execute(own: Scheduler, plan: StepPlan) -> None:
    rows = tuple(RowResult(row.number, (7,) if row.samples else ()) for row in plan.rows)
    own.commit(plan, StepResult(plan.step, rows), TokenFinish())


# ---------------------------------------------------------------- static


def test_the_static_policy_drops_the_table_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = resolved("static")
    assert found.speculation is not None
    assert found.speculation.num_speculative_tokens_per_batch_size is None
    assert found.speculation.draft_length == "static"
    assert found.num_speculative_tokens == 3
    (note,) = found.adjustments
    assert note.field == "speculative_config.num_speculative_tokens_per_batch_size"
    assert (note.asked, note.used) == (TABLE, None)
    with caplog.at_level(logging.WARNING):
        log_adjustments(found, logging.getLogger("drumline.tests"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "data parallelism does not support a dynamic draft length" in record.getMessage()
    assert make_draft_length(found.speculation, None, 2).lookup is None


def test_256_requests_are_scheduled_with_the_static_length() -> None:
    own = scheduler("static", 256)
    assert own.dynamic_sd_lookup is None
    for step in range(2):  # in prefill, and decoding
        proposal = own.propose()
        assert len(proposal.rows) == 256
        assert own.num_spec_tokens_to_schedule == proposal.draft_wish == 3
        assert proposal.vote.wish is None
        execute(own, StepPlan(0, step, proposal.rows, proposal.admitted, draft_k=0))


def test_an_adaptive_length_is_dropped_too_and_one_replica_keeps_everything() -> None:
    keys = {"method": "mtp", "num_speculative_tokens": 3, "dp_draft_length": "static"}
    base = resolved("static")

    def run(size: int, **more: Any) -> Resolved:
        config = EngineConfig.from_kwargs(
            data_parallel_size=size, speculative_config={**keys, **more}
        )
        return resolve(config, base.model, base.machine, DrafterFacts(method="mtp"))

    two = run(2, draft_length="adaptive")
    (note,) = two.adjustments
    assert (note.field, note.asked, note.used) == (
        "speculative_config.draft_length",
        "adaptive",
        "static",
    )
    assert run(2).adjustments == ()
    one = run(1, num_speculative_tokens_per_batch_size=TABLE)
    assert one.adjustments == ()
    assert one.speculation is not None
    assert one.speculation.draft_length == "table"


# ---------------------------------------------------------------- agree


class Preset:
    """A channel of which all members' vectors are known."""

    ranks = (0, 1)

    def __init__(self) -> None:
        self.vectors: list[Vector] = []

    def exchange(self, vector: Vector, timeout: float) -> Sequence[Vector]:
        assert vector in self.vectors
        return self.vectors


class Pair:
    """Two replicas, step by step."""

    def __init__(self, *schedulers: Scheduler) -> None:
        self.schedulers = schedulers
        self.channel = Preset()
        self.conductors = [
            GroupConductor(self.channel, Rules.of(3, MTP), Ledger.in_memory(rank), drafter=MTP)
            for rank in range(2)
        ]

    def step(self) -> list[StepPlan]:
        proposals: list[StepProposal] = [own.propose() for own in self.schedulers]
        pairs = list(zip(self.conductors, proposals, strict=True))
        self.channel.vectors = [c.shape_of(p, WORKING).encode(3) for c, p in pairs]
        plans = []
        for conductor, proposal in pairs:
            sealed = conductor.seal(proposal)
            assert not isinstance(sealed, Rest)
            plans.append(sealed)
        for own, plan in zip(self.schedulers, plans, strict=True):
            execute(own, plan)
        return plans


def test_agreeing_replicas_keep_the_table() -> None:
    found = resolved("agree", strict_config=True)
    assert found.adjustments == ()
    assert found.speculation is not None
    assert found.speculation.draft_length == "table"
    length = make_draft_length(found.speculation, None, 2)
    assert length.lookup is not None
    assert [length.lookup(size) for size in (1, 16, 64, 255, 256)] == [3, 3, 2, 2, 0]


def test_256_requests_are_scheduled_with_the_agreed_length() -> None:
    """The mirror: in prefill nobody's batch speaks and all take 3; decoding, 256 wish for 0, one
    for 3, and both take 0; when the crowd has gone both take 3."""
    crowd, lone = scheduler("agree", 256), scheduler("agree", 1)
    assert crowd.dynamic_sd_lookup is not None
    pair = Pair(crowd, lone)
    plans = pair.step()
    assert [len(plan.rows) for plan in plans] == [256, 1]
    assert [plan.num_spec_tokens_to_schedule for plan in plans] == [3, 3]
    for _ in range(3):
        plans = pair.step()
        assert [len(plan.rows) for plan in plans] == [256, 1]
        assert [own.num_spec_tokens_to_schedule for own in (crowd, lone)] == [0, 3]
        assert [plan.num_spec_tokens_to_schedule for plan in plans] == [0, 0]
    crowd.cancel_all()
    for _ in range(3):
        plans = pair.step()
        assert [len(plan.rows) for plan in plans] == [0, 1]
        assert [plan.num_spec_tokens_to_schedule for plan in plans] == [3, 3]
        assert plans[0].draft_sizes == plans[1].draft_sizes
        assert len(plans[0].draft_sizes) == 3


def test_an_idle_replica_is_neutral_and_a_middle_batch_takes_its_own_length() -> None:
    for count, wanted in ((1, 3), (16, 3), (64, 2), (255, 2), (256, 0)):
        pair = Pair(scheduler("agree", 0), scheduler("agree", count))
        pair.step()
        assert [plan.draft_k for plan in pair.step()] == [wanted, wanted]
