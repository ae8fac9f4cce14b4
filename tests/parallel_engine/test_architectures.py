"""mixtral and deepseek_v3 with their own next-token modules, over ranks: the tokens of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.core.cpu import native_available
from drumline.engine.core import EngineCore
from drumline.models.tiny import write_tiny
from drumline.models.tiny_drafts import add_mtp
from parallel_engine.fleet import Fleets, Job, bits, config, run

JOBS = [Job((5 + index, 9, 2 * index + 1), 5 + 2 * index) for index in range(4)]
MTP = {"speculative_config": json.dumps({"method": "mtp", "num_speculative_tokens": 2})}
LAYOUTS = [(2, 1), (1, 2), (2, 2)]
MODELS = [("mixtral", "native"), ("deepseek_v3", "reference"), ("deepseek_v3", "native")]


@pytest.fixture(scope="module", params=MODELS, ids=lambda pair: "-".join(pair))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A miniature with a next-token module of its own, and the operations to run it on."""
    arch, backend = request.param
    if backend == "native" and not native_available():
        pytest.skip("the native module is not built")
    path = write_tiny(arch, tmp_path_factory.mktemp(arch), 6)
    add_mtp(path, 0)
    return path, backend


@pytest.fixture(scope="module")
def alone(model: tuple[Path, str]) -> list[Any]:
    path, backend = model
    return bits(run(EngineCore.load(config(path, ops_backend=backend)), JOBS))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_are_those_of_one_rank(
    layout: tuple[int, int], fleets: Fleets, model: tuple[Path, str], alone: list[Any]
) -> None:
    (dp, tp), (path, backend) = layout, model
    core = fleets.start(
        path,
        data_parallel_size=dp,
        tensor_parallel_size=tp,
        enable_expert_parallel=dp > 1,
        ops_backend=backend,
        **MTP,
    )
    found = run(core, JOBS)
    assert core.speculation.drafted > 10
    if tp == 1:
        assert bits(found) == alone
    else:
        assert [out.token_ids for out in found] == [tokens for tokens, *_ in alone]
