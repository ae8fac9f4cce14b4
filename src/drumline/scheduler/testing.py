"""A scheduler from a handful of numbers, for tests and experiments: no model, no engine.

Draft length, table and errors are those of a configured engine, because both read them through
`SpeculativeConfig` and `make_draft_length`.
"""

from __future__ import annotations

from typing import Any

from drumline.config.speculative import SpeculativeConfig
from drumline.kvcache import BlockPool, blocks_for
from drumline.scheduler.draft_cost import CostCurve
from drumline.scheduler.draft_length import make_draft_length
from drumline.scheduler.scheduler import Scheduler
from drumline.scheduler.settings import SchedulerSettings


def create_scheduler(
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    num_speculative_tokens: int | None = None,
    num_speculative_tokens_per_batch_size: Any = None,
    data_parallel_size: int = 1,
    *,
    draft_length: str | None = None,
    dp_draft_length: str = "agree",
    costs: CostCurve | None = None,
    max_model_len: int = 2048,
    block_size: int = 16,
    block_count: int | None = None,
    **settings: Any,
) -> Scheduler:
    """One replica's scheduler out of ``data_parallel_size``.

    None for ``num_speculative_tokens``: nobody drafts. By default there are blocks for
    ``max_num_seqs`` requests of full length. ``settings`` are further fields of
    `SchedulerSettings`. Raises `ConfigError` as a configured engine would.
    """
    spec = None
    keys = {
        "num_speculative_tokens": num_speculative_tokens,
        "num_speculative_tokens_per_batch_size": num_speculative_tokens_per_batch_size,
        "draft_length": draft_length,
    }
    if any(value is not None for value in keys.values()):
        # Host drafting stands for any: a scheduler does not see the difference.
        spec = SpeculativeConfig.from_mapping(
            {"method": "ngram", "dp_draft_length": dp_draft_length, **keys}
        )
    if block_count is None:
        block_count = max_num_seqs * blocks_for(max_model_len, block_size)
    return Scheduler(
        SchedulerSettings(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_speculative_tokens=num_speculative_tokens or 0,
            **settings,
        ),
        BlockPool(block_count, block_size),
        make_draft_length(spec, costs, data_parallel_size),
    )
