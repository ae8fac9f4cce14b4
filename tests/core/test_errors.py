"""The error tree is the one that is drawn, and each message is one line that names the thing."""

from __future__ import annotations

import pytest

from drumline.core import errors
from drumline.core.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    Diverged,
    DrumlineError,
    EngineDead,
    EngineError,
    PromptTooLong,
    RankLost,
    Refused,
    RequestError,
    UsageError,
)


@pytest.mark.parametrize(
    ("error", "parent"),
    [
        (UsageError, DrumlineError),
        (ConfigError, UsageError),
        (CheckpointError, UsageError),
        (RequestError, UsageError),
        (PromptTooLong, RequestError),
        (Refused, DrumlineError),
        (EngineError, DrumlineError),
        (DeadlineExceeded, EngineError),
        (EngineDead, EngineError),
        (RankLost, EngineError),
        (Diverged, EngineError),
    ],
)
def test_the_tree(error: type[Exception], parent: type[Exception]) -> None:
    assert error.__bases__[0] is parent
    assert error.__name__ in (errors.__doc__ or "")


def test_users_mistakes_are_value_errors_and_the_engines_are_not() -> None:
    assert issubclass(UsageError, ValueError)
    assert not issubclass(EngineError, ValueError)


def test_messages_name_the_thing() -> None:
    assert str(ConfigError("block_size", 0, "at least 1")) == "block_size=0: at least 1"
    assert str(CheckpointError("model.gguf", "is truncated")) == "model.gguf: is truncated"
    assert str(RequestError("is empty", param="prompt")) == "prompt: is empty"
    assert str(RequestError("is empty")) == "is empty"
    assert str(DeadlineExceeded("start-up", 120.0)) == "start-up: nothing after 120 s"
    assert PromptTooLong("too long", param="prompt").param == "prompt"


def test_a_lost_rank_is_named_with_where_and_why() -> None:
    error = RankLost(3, 17, "draft pass 1", "all_to_all over ep", "has not come within 5 s")
    assert isinstance(error, EngineError)
    assert str(error) == (
        "rank 3 lost in step 17, draft pass 1, all_to_all over ep: has not come within 5 s"
    )
    assert (error.rank, error.step, error.phase) == (3, 17, "draft pass 1")


def test_ranks_that_differ_are_named_with_their_values_in_order() -> None:
    error = Diverged("config digest", [(4, "b"), (0, "a")], 0)
    assert isinstance(error, EngineError)
    assert str(error) == "step 0: config digest differs: rank 0 has a, rank 4 has b"
    assert error.values == ((0, "a"), (4, "b"))
