"""Heads inside the package: how their targets are known, and which one is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drafting.golden_world import settings
from drumline.core.errors import ConfigError
from drumline.drafting import eagle3, mtp, shipped
from drumline.drafting.shipped import ShippedHead, best_method, find_shipped, shipped_head
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tiny_drafts import write_eagle3, write_mtp

TinyPath = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=2, layers=2, hidden=48)


def test_a_head_is_found_by_method_name_and_shape(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(target)
    config, name = checkpoint.config, str(target)
    known = target.name.lower()
    heads = tuple(
        ShippedHead(method, f"tiny-{method}", known, 48, 2, 128) for method in ("eagle3", "mtp")
    )
    monkeypatch.setattr(shipped, "SHIPPED", heads)
    monkeypatch.setattr(shipped, "HEADS", tmp_path)
    assert best_method(config, name) is None, "nothing is there yet"
    write_mtp(target, tmp_path / "tiny-mtp", 5, draft_vocab=50)
    assert shipped_head("mtp", config, name) == tmp_path / "tiny-mtp"
    assert shipped_head("eagle3", config, name) is None
    assert best_method(config, name) == "mtp"
    with pytest.raises(ConfigError, match="no eagle3 head is shipped"):
        find_shipped("eagle3", checkpoint)
    write_eagle3(target, tmp_path / "tiny-eagle3", 6, draft_vocab=60, verifier_head=True)
    assert best_method(config, name) == "eagle3"
    assert shipped_head("mtp", config, "another-model") is None
    found = mtp.read(settings("mtp", None), checkpoint).table
    other = eagle3.read(settings("eagle3", None), checkpoint).table
    assert found is not None
    assert len(found) == 50
    assert other is not None
    assert len(other) == 60
    monkeypatch.setattr(shipped, "SHIPPED", (ShippedHead("mtp", "tiny-mtp", known, 64, 2, 128),))
    assert best_method(config, name) is None, "a target of another shape"


def test_smollm2_is_known() -> None:
    assert [head.method for head in shipped.SHIPPED] == ["eagle3", "mtp"]
    for head in shipped.SHIPPED:
        assert head.name in "SmolLM2-135M-Instruct.Q4_1.gguf".lower()
        assert head.name in "/models/HuggingFaceTB/SmolLM2-135M-Instruct".lower()
