"""Method auto: who is chosen for which target on which device, what is passed on to it, and that
tokens do not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafting.world import VOCAB, engine, jobs, signature
from drumline.config import DrafterFacts, EngineConfig, Resolved, SpeculativeConfig, resolve
from drumline.config.speculative_methods import AUTO
from drumline.core.errors import ConfigError
from drumline.drafting import shipped
from drumline.drafting.auto import choose_method
from drumline.drafting.registry import MODULES, drafter_facts
from drumline.drafting.shipped import ShippedHead
from drumline.engine.core import EngineCore
from drumline.engine.opening import open_engine
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tiny import write_tiny
from drumline.models.tiny_drafts import add_mtp, write_eagle3

TinyPath = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=3, vocab=VOCAB)


@pytest.fixture
def with_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target for which the package ships a head."""
    path = tmp_path / "known"
    write_tiny("llama", path, 3, vocab=VOCAB)
    config = open_checkpoint(path).config
    head = ShippedHead(
        "eagle3", "head", "known", config.hidden_size, config.num_hidden_layers, VOCAB
    )
    monkeypatch.setattr(shipped, "SHIPPED", (head,))
    monkeypatch.setattr(shipped, "HEADS", tmp_path)
    write_eagle3(path, tmp_path / "head", 7)
    return path


def with_module(tmp_path: Path) -> Path:
    """A target with a next-token module among its own tensors."""
    path = tmp_path / "with-module"
    write_tiny("llama", path, 3, vocab=VOCAB)
    add_mtp(path, 4)
    return path


def opened(path: Path, **keys: Any) -> Resolved:
    config = EngineConfig.from_kwargs(
        model=str(path), max_model_len=64, threads=1, speculative_config={"method": AUTO, **keys}
    )
    return open_engine(config).resolved


# ---- the choice --------------------------------------------------------------------------------


def test_the_own_module_then_a_shipped_head_then_a_lookup(
    target: Path, with_head: Path, tmp_path: Path
) -> None:
    paths = (with_module(tmp_path), with_head, target)
    chosen = [choose_method(open_checkpoint(path)) for path in paths]
    assert [method for method, _ in chosen] == ["mtp", "eagle3", "ngram"]
    assert len({reason for _, reason in chosen}) == 3


def test_the_facts_are_those_of_the_chosen_drafter(with_head: Path) -> None:
    checkpoint = open_checkpoint(with_head)
    asked = SpeculativeConfig(method=AUTO)
    facts = drafter_facts(asked, checkpoint, "cuda")
    assert (facts.method, facts.layers) == ("eagle3", 1)
    assert facts.reason == choose_method(checkpoint)[1]
    assert AUTO not in MODULES


# ---- what is passed on -------------------------------------------------------------------------


def test_what_auto_takes_and_why_is_in_the_start_up_table(target: Path) -> None:
    resolved = opened(target)
    spec = resolved.speculation
    assert spec is not None
    assert (spec.method, spec.num_speculative_tokens, spec.draft_length) == ("ngram", 3, "adaptive")
    assert (spec.prompt_lookup_min, spec.prompt_lookup_max) == (2, 4)
    assert spec.draft_sample_method == "greedy", "as the chosen one draws"
    rows = {name: (value, reason) for name, value, reason in table(resolved)}
    method, reason = rows["speculative_config.method"]
    assert method == "ngram"
    assert "no head is shipped" in reason
    taken = ("num_speculative_tokens", "draft_length", "prompt_lookup_min", "prompt_lookup_max")
    for name in taken:
        assert rows[f"speculative_config.{name}"][1] == "what method auto takes"
    again = resolve(resolved.config, resolved.model, resolved.machine, DrafterFacts(method="ngram"))
    assert again.speculation == spec, "what was resolved names the chosen one"


def table(resolved: Resolved) -> list[tuple[str, str, str]]:
    from drumline.config import startup_table

    return startup_table(resolved)


@pytest.mark.parametrize(
    "keys",
    [
        {"num_speculative_tokens": 5, "draft_length": "static"},
        {"num_speculative_tokens_per_batch_size": ((1, 4, 2), (5, 64, 0)), "draft_length": "table"},
        {"rejection_sample_method": "standard", "draft_sample_method": "greedy"},
        {"prompt_lookup_min": 1, "prompt_lookup_max": 3, "max_model_len": 40},
        {"disable_padded_drafter_batch": True, "dp_draft_length": "static"},
    ],
)
def test_keys_are_passed_on(target: Path, keys: dict[str, Any]) -> None:
    resolved = opened(target, **keys)
    assert resolved.speculation is not None
    for name, value in keys.items():
        assert getattr(resolved.speculation, name) == value
    rows = {name: reason for name, _, reason in table(resolved)}
    for name in keys.keys() - {"max_model_len", "dp_draft_length"}:  # which have words of their own
        assert rows[f"speculative_config.{name}"] == "asked"


def test_a_table_needs_no_draft_length(target: Path) -> None:
    spec = opened(target, num_speculative_tokens_per_batch_size=[[1, 64, 1]]).speculation
    assert spec is not None
    assert spec.draft_length == "table"


@pytest.mark.parametrize(
    ("device", "keys", "miss"),
    [
        ("cpu", {}, 1),  # a second pass and a third row are rarely worth their time
        ("cpu", {"lookup_miss_tokens": 2}, 2),
        ("cuda", {}, None),
        ("cuda", {"lookup_miss_tokens": 2}, 2),
    ],
)
def test_what_a_network_is_asked_for_depends_on_the_device(
    device: str, keys: dict[str, Any], miss: int | None
) -> None:
    asked = SpeculativeConfig.from_mapping({"method": AUTO, **keys})
    assert asked.settled("eagle3", device).lookup_miss_tokens == miss


def test_a_cpu_asks_the_head_for_one_draft_and_says_so(with_head: Path) -> None:
    resolved = opened(with_head)
    assert resolved.speculation is not None
    assert resolved.speculation.method == "eagle3"
    rows = {name: (value, reason) for name, value, reason in table(resolved)}
    assert rows["speculative_config.lookup_miss_tokens"] == ("1", "what method auto takes")
    assert rows["speculative_config.method"][1] == "a head is shipped for this model"


def test_a_head_is_asked_after_a_lookup_and_keeps_what_was_asked() -> None:
    asked = SpeculativeConfig.from_mapping(
        {"method": AUTO, "draft_sample_method": "greedy", "draft_tensor_parallel_size": 2}
    )
    spec = asked.settled("eagle3", "cuda")
    assert (spec.prompt_lookup_min, spec.prompt_lookup_max) == (2, 4)
    assert (spec.draft_sample_method, spec.draft_tensor_parallel_size) == ("greedy", 2)
    assert SpeculativeConfig(method=AUTO).settled("eagle3", "cuda").draft_sample_method == "coupled"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "head"),
        ("revision", "main"),
        ("suffix_decoding_max_tree_depth", 3),
        ("use_heterogeneous_vocab", True),
        ("hidden_states_dir", "out"),
    ],
)
def test_a_key_that_fits_no_choice_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="method auto has no use for it") as caught:
        EngineConfig.from_kwargs(speculative_config={"method": AUTO, key: value})
    assert caught.value.field == f"speculative_config.{key}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("draft_tensor_parallel_size", 2),
        ("draft_sample_method", "coupled"),
        ("lookup_miss_tokens", 1),
    ],
)
def test_a_key_that_does_not_fit_the_choice_is_refused_with_it(
    target: Path, key: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match="method auto chose ngram here") as caught:
        opened(target, **{key: value})
    assert caught.value.field == f"speculative_config.{key}"


@pytest.mark.parametrize(("dp", "length"), [(1, "adaptive"), (2, "static")])
def test_replicas_that_do_not_agree_take_the_static_length(
    target: Path, dp: int, length: str
) -> None:
    """As if it had been asked for: auto fills in nothing that would have to be adjusted."""
    config = EngineConfig.from_kwargs(
        model=str(target),
        max_model_len=64,
        data_parallel_size=dp,
        strict_config=True,
        threads=1,
        speculative_config={"method": AUTO, "dp_draft_length": "static"},
    )
    spec = open_engine(config).resolved.speculation
    assert spec is not None
    assert spec.draft_length == length


def test_every_leader_and_every_node_resolves_the_same(with_head: Path) -> None:
    """From the files and the device alone: what they exchange before the first step is equal."""
    from drumline.config import config_digest

    assert config_digest(opened(with_head)) == config_digest(opened(with_head))


# ---- tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("keys", [{}, {"lookup_miss_tokens": 3}])
def test_tokens_are_those_without_speculation(
    with_head: Path, sampled: bool, keys: dict[str, Any]
) -> None:
    batch, miss = jobs(sampled), keys.get("lookup_miss_tokens", 1)
    runs = []
    for speculative in (None, {"method": AUTO, "prompt_lookup_min": 1, **keys}):
        llm = engine(with_head, speculative)
        outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
        runs.append([signature(output) for output in outputs])
        if speculative is not None:
            assert isinstance(llm.core, EngineCore)
            assert llm.core.worker.traits is not None
            assert llm.core.worker.traits.method == "eagle3"
            assert llm.core.resolved.speculation.lookup_miss_tokens == miss
            assert llm.core.scheduler.speculation.drafted > 0
    assert runs[0] == runs[1]
