"""The speculative config: one JSON object that says who drafts, how much, and how it is judged.

    {"method": "ngram", "num_speculative_tokens": 3}      flag, variable, file, LLM(...)
         │
         ▼
    `SpeculativeConfig`   every key checked, fitted to the method, filled; refusals by name
         │
         ▼
    `resolve`             what only the checkpoints and the machine can say; with method auto it is
                          they that say who drafts, and `settled` makes the config of it

Keys and defaults are vLLM's where it has them. The shortcuts ``spec_method``, ``spec_model`` and
``spec_tokens`` stand for the keys of the same meaning. This module reads; it opens no checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Self

from drumline.config.fields import Field, Kind, check, option, read_value
from drumline.config.speculative_methods import (
    AUTO,
    HOST_METHODS,
    KEY_METHODS,
    METHODS,
    NEEDS_MODEL,
    WEIGHTED,
)
from drumline.config.speculative_refused import REFUSED_KEYS, REFUSED_METHODS, REFUSED_REJECTION
from drumline.core.errors import ConfigError, nearest_name

PREFIX = "speculative_config."
# What method auto takes where nothing is said; of a network on a CPU one draft pays, rarely two.
TOKENS_AUTO, LOOKUP_AUTO, MISS_AUTO_CPU = 3, (2, 4), 1
TOKENS_MAX = 128  # vLLM's limit on drafts per request and step
PARALLEL_MAX = 1024  # ranks of one kind: a limit on typing errors

_REFUSED_VALUES = {"method": REFUSED_METHODS, "rejection_sample_method": REFUSED_REJECTION}

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_FILE_ENDINGS = (".gguf", ".safetensors", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Who drafts, how much, and how drafts are judged; complete but for what checkpoints say.

    ``num_speculative_tokens`` and ``max_model_len`` may be None until `resolve` has seen the
    checkpoints. ``model`` of a custom class is its dotted path. Raises `ConfigError` naming the
    key as ``speculative_config.KEY``.
    """

    method: str = option(
        "draft_model",
        Kind.CHOICE,
        "who drafts; auto: whoever suits the model and the device; a dotted path is a custom class",
        choices=METHODS,
    )
    model: str | None = option(
        None,
        Kind.TEXT,
        "draft checkpoint: folder, file or hub name; dotted path of a custom class",
        when_none="none, or the target's own for mtp",
    )
    revision: str | None = option(
        None, Kind.TEXT, "branch, tag or commit of a hub model", when_none="the hub's default"
    )
    num_speculative_tokens: int | None = option(
        None,
        Kind.INTEGER,
        "most drafts per request and step",
        low=1,
        high=TOKENS_MAX,
        when_none="the draft checkpoint's, or 3 for auto; required where none is stated",
    )
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = option(
        None,
        Kind.TABLE,
        "[[start, end, K], …]: draft length by the number of decoding requests",
        when_none="none",
    )
    draft_length: str = option(
        None,
        Kind.CHOICE,
        "static, by the table, or adaptive: what brings most tokens per second, by measurement",
        choices=("static", "table", "adaptive"),
        when_none="table if there is one, else adaptive for auto, else static",
    )
    dp_draft_length: str = option(
        "agree",
        Kind.CHOICE,
        "several replicas agree on each step's draft length, or all take the static one; "
        "one replica has nobody to agree with",
        choices=("agree", "static"),
    )
    rejection_sample_method: str = option(
        "match",
        Kind.CHOICE,
        "match keeps a draft that is the target's own token (equal tokens); standard and block "
        "are rejection sampling (equal distribution)",
        choices=("match", "standard", "block"),
    )
    draft_sample_method: str = option(
        None,
        Kind.CHOICE,
        "how drafts are drawn: coupled to the target's own noise, greedy, or probabilistic",
        choices=("coupled", "greedy", "probabilistic"),
        when_none="coupled under match for drafters with logits, else greedy",
    )
    max_model_len: int | None = option(
        None,
        Kind.INTEGER,
        "positions the drafter is used for; longer requests go on without drafts",
        low=1,
        high=2**24,
        unit="tokens",
        when_none="the drafter's own range, at most the target's",
    )
    draft_tensor_parallel_size: int = option(
        1,
        Kind.INTEGER,
        "ranks that share the drafter: 1, or as many as share the target's layers",
        low=1,
        high=PARALLEL_MAX,
    )
    disable_padded_drafter_batch: bool = option(
        False, Kind.SWITCH, "draft after the host's bookkeeping; the same tokens either way"
    )
    prompt_lookup_min: int | None = option(
        None,
        Kind.INTEGER,
        "shortest n-gram that is looked up; with a method that runs a network: before it",
        low=1,
        high=1024,
        when_none="prompt_lookup_max, or 5 for ngram, or 2 for auto, else no lookup",
    )
    prompt_lookup_max: int | None = option(
        None,
        Kind.INTEGER,
        "longest n-gram that is looked up",
        low=1,
        high=1024,
        when_none="prompt_lookup_min, or 5 for ngram, or 4 for auto, else no lookup",
    )
    lookup_miss_tokens: int | None = option(
        None,
        Kind.INTEGER,
        "most drafts of the network where the lookup finds nothing",
        low=1,
        high=TOKENS_MAX,
        when_none="num_speculative_tokens",
    )
    suffix_decoding_max_tree_depth: int = option(
        24, Kind.INTEGER, "longest string in the suffix trees", low=1, high=1024
    )
    suffix_decoding_max_cached_requests: int = option(
        10000, Kind.INTEGER, "past outputs that are remembered; 0 is none", low=0, high=2**24
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, Kind.NUMBER, "most drafts per matched token", low=0.0, high=1024.0
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, Kind.NUMBER, "least estimated probability of a draft", low=0.0, high=1.0
    )
    use_heterogeneous_vocab: bool = option(
        False, Kind.SWITCH, "the draft model has another vocabulary; map its tokens"
    )
    hidden_states_dir: str | None = option(
        None, Kind.TEXT, "folder that hidden states are written to", when_none="required"
    )
    hidden_states_taps: tuple[int, ...] | None = option(
        None,
        Kind.INTEGERS,
        "residual streams to write: tap k is the stream after k layers",
        low=0,
        high=4096,
        when_none="the last",
    )

    def __post_init__(self) -> None:
        for name, key in KEYS.items():
            check(key, getattr(self, name))
        for name, value in _left_open(self).items():
            object.__setattr__(self, name, value)
        _check_together(self)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """From a JSON object's keys; null is "not given". See the class for errors."""
        for name in given:
            if name not in KEYS:
                _refuse_stranger(name, given[name])
        asked = {name: value for name, value in given.items() if value is not None}
        for name, refused in _REFUSED_VALUES.items():
            value = asked.get(name)
            if isinstance(value, str) and value in refused:
                _refuse(name, value, f"refused: {refused[value]}")
        _name_method(asked)
        for name in asked:
            methods = KEY_METHODS.get(name, METHODS)
            if asked["method"] not in methods:
                _refuse(name, asked[name], f"method {asked['method']} has no use for it")
        return cls(**{name: read_value(KEYS[name], value) for name, value in asked.items()})

    def to_mapping(self) -> dict[str, Any]:
        """The keys that mean something here; `from_mapping` makes an equal value of it."""
        values = {name: getattr(self, name) for name in KEYS}
        return {
            name: value
            for name, value in values.items()
            if value is not None and self.method in KEY_METHODS.get(name, METHODS)
        }

    def settled(self, method: str, device: str) -> SpeculativeConfig:
        """The config of the method that was chosen for auto on ``device``: what was asked and what
        auto fills in are passed on. Raises `ConfigError` for a key that means nothing there."""
        assert self.method == AUTO
        said = {
            name: value for name, value in self.to_mapping().items() if value != KEYS[name].default
        }
        if device == "cpu" and method in WEIGHTED:
            said.setdefault("lookup_miss_tokens", MISS_AUTO_CPU)
        try:
            return SpeculativeConfig.from_mapping({**said, "method": method})
        except ConfigError as error:
            problem = f"{error.problem} (method auto chose {method} here)"
            raise ConfigError(error.field, error.value, problem) from None

    @property
    def runs_on_host(self) -> bool:
        """Whether drafts come from tokens alone, with no model behind them."""
        return self.method in HOST_METHODS


KEYS: dict[str, Field] = {
    spec.name: Field(PREFIX + spec.name, "speculation", spec.default, spec.metadata["option"])
    for spec in fields(SpeculativeConfig)
}


SHORTCUTS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}


def asked_keys(
    config: Mapping[str, Any] | None, shortcuts: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Keys by name, shortcuts included. A shortcut excludes the same key in the object."""
    given = dict(config or {})
    for shortcut, value in shortcuts.items():
        if value is None:
            continue
        key = SHORTCUTS[shortcut]
        if given.get(key) is not None:
            problem = f"speculative_config has {key}={given[key]!r} too; say it once"
            raise ConfigError(shortcut, value, problem)
        given[key] = value
    return None if config is None and not given else given


# ---------------------------------------------------------------- reading


def _refuse(name: str, value: object, problem: str) -> NoReturn:
    raise ConfigError(PREFIX + name, value, problem)


def _refuse_stranger(name: str, value: Any) -> NoReturn:
    if name in REFUSED_KEYS:
        _refuse(name, value, f"refused: {REFUSED_KEYS[name]}")
    _refuse(name, value, "unknown key" + nearest_name(name, KEYS))


def _name_method(asked: dict[str, Any]) -> None:
    """Fills in who drafts, as vLLM infers it: from the model's name, else a draft model."""
    method, model = asked.get("method"), asked.get("model")
    if isinstance(method, str) and _is_dotted(method) and method not in METHODS:
        if model not in (None, method):
            _refuse("model", model, f"the custom class is {method} already")
        asked.update(method="custom_class", model=method)
        return
    if method is not None:
        read_value(KEYS["method"], method)
        return
    if model is None:
        raise ConfigError(
            "speculative_config", dict(asked), "needs a method: " + ", ".join(METHODS)
        )
    read_value(KEYS["model"], model)
    asked["method"] = _inferred(model)
    if asked["method"] == "ngram":
        del asked["model"]


def _is_dotted(text: str) -> bool:
    return bool(_DOTTED.fullmatch(text)) and not text.endswith(_FILE_ENDINGS)


def _inferred(model: str) -> str:
    lowered = model.lower()
    if lowered in ("ngram", "[ngram]"):
        return "ngram"
    if _is_dotted(model):
        return "custom_class"
    for mark, method in (("eagle3", "eagle3"), ("eagle-", "eagle"), ("medusa", "medusa")):
        if mark in lowered:
            return method
    return "dflash" if "dflash" in lowered else "draft_model"


# ---------------------------------------------------------------- together


def _left_open(config: Any) -> dict[str, Any]:
    """Values for what may be left open and does not wait for a checkpoint."""
    filled: dict[str, Any] = {}
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    auto = config.method == AUTO
    if auto and not (low or high):
        low, high = LOOKUP_AUTO
    if config.method == "ngram" or low or high:
        filled["prompt_lookup_min"] = low or high or 5
        filled["prompt_lookup_max"] = high or low or 5
    if auto and config.num_speculative_tokens is None:
        filled["num_speculative_tokens"] = TOKENS_AUTO
    if config.draft_sample_method is None and not auto:  # follows from who it will be
        has_logits = config.method not in (*HOST_METHODS, "extract_hidden_states")
        coupled = config.rejection_sample_method == "match" and has_logits
        filled["draft_sample_method"] = "coupled" if coupled else "greedy"
    if config.draft_length is None:
        has_table = config.num_speculative_tokens_per_batch_size is not None
        filled["draft_length"] = "table" if has_table else "adaptive" if auto else "static"
    if config.method == "extract_hidden_states" and config.num_speculative_tokens is None:
        filled["num_speculative_tokens"] = 1
    return filled


def _check_together(config: SpeculativeConfig) -> None:
    method, table = config.method, config.num_speculative_tokens_per_batch_size
    if config.model is None and method in NEEDS_MODEL:
        what = "the dotted path of the class" if method == "custom_class" else "a draft checkpoint"
        _refuse("model", None, f"method {method} needs {what}")
    if method == "custom_class" and not _is_dotted(config.model or ""):
        _refuse("model", config.model, "must be a dotted path: package.module.Class")
    if table is not None and config.draft_length != "table":
        problem = "num_speculative_tokens_per_batch_size is there; it would be ignored"
        _refuse("draft_length", config.draft_length, problem)
    if table is None and config.draft_length == "table":
        _refuse("draft_length", "table", "needs num_speculative_tokens_per_batch_size")
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is not None and high is not None and low > high:
        _refuse("prompt_lookup_min", low, f"must be at most prompt_lookup_max={high}")
    if config.lookup_miss_tokens is not None and low is None:
        problem = "needs prompt_lookup_min or prompt_lookup_max: nothing is looked up"
        _refuse("lookup_miss_tokens", config.lookup_miss_tokens, problem)
    _check_sampling(config)
    if method == "extract_hidden_states":
        if config.hidden_states_dir is None:
            _refuse("hidden_states_dir", None, f"method {method} needs a folder to write to")
        if config.num_speculative_tokens != 1:
            tokens = config.num_speculative_tokens
            _refuse("num_speculative_tokens", tokens, f"must be 1: {method} proposes nothing")
        if config.draft_length != "static":
            _refuse("draft_length", config.draft_length, f"must be static: {method} drafts nothing")


def _check_sampling(config: SpeculativeConfig) -> None:
    method, draws = config.method, config.draft_sample_method
    rule = config.rejection_sample_method
    if draws == "probabilistic" and rule == "match":
        allowed = "coupled or greedy; probabilistic drafts go with standard and block"
        _refuse("draft_sample_method", draws, f"under match must be {allowed}")
    if draws == "coupled" and rule != "match":
        allowed = "greedy or probabilistic; coupled drafts go with match"
        _refuse("draft_sample_method", draws, f"under {rule} must be {allowed}")
    if draws != "greedy" and method in (*HOST_METHODS, "extract_hidden_states"):
        _refuse("draft_sample_method", draws, f"must be greedy: {method} drafts have no logits")
    if draws == "probabilistic" and config.use_heterogeneous_vocab:
        problem = "must be greedy or coupled with use_heterogeneous_vocab"
        _refuse("draft_sample_method", draws, problem)
