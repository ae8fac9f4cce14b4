"""Flags, variables, file: precedence, names, and one-line errors that name the place."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import EngineConfig, ModelConfig
from drumline.config.arguments import Parser, add_engine_arguments, engine_arguments
from drumline.config.fields import Kind
from drumline.config.parts import FIELDS
from drumline.config.refused import REFUSED, REFUSED_SHORT
from drumline.core.errors import ConfigError
from tidy.source import ROOT


def _parser() -> Parser:
    parser = Parser(prog="drumline")
    verbs = parser.add_subparsers(dest="verb", required=True)
    add_engine_arguments(verbs.add_parser("generate"))
    return parser


def _parse(*args: str) -> dict[str, Any]:
    return engine_arguments(_parser().parse_args(["generate", *args]))


def _error(*args: str) -> str:
    """The one line on standard error of a refused command line."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as caught:
        _parser().parse_args(["generate", *args])
    assert caught.value.code == 2
    assert out.getvalue() == ""
    assert err.getvalue().count("\n") == 1
    return err.getvalue()


# ---------------------------------------------------------------- precedence


def test_command_line_then_environment_then_file_then_default(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max-num-seqs: 3\nmax_model_len: 3k\nblock-size: 32\nseed: 3\n")
    env = {"DRUMLINE_MAX_NUM_SEQS": "2", "DRUMLINE_MAX_MODEL_LEN": "2k", "PATH": "x"}
    config = EngineConfig.from_sources(_parse("--max-num-seqs", "1"), env, file)
    assert config.scheduler.max_num_seqs == 1
    assert config.model.max_model_len == 2000
    assert config.cache.block_size == 32
    assert config.model.seed == 3
    assert config.runtime.threads is None
    assert config.sources == {
        "max_num_seqs": "command line",
        "max_model_len": "DRUMLINE_MAX_MODEL_LEN",
        "block_size": str(file),
        "seed": str(file),
    }


@given(st.permutations(["cli", "env", "file"]), st.integers(1, 7))
def test_the_first_place_that_names_a_field_wins(order: list[str], mask: int) -> None:
    places = [place for bit, place in enumerate(["cli", "env", "file"]) if mask >> bit & 1]
    values = {place: str(11 + index) for index, place in enumerate(order)}
    path = ROOT / ".pytest_cache" / "drumline-precedence.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"max_num_seqs: {values['file']}\n")
    config = EngineConfig.from_sources(
        {"max_num_seqs": values["cli"]} if "cli" in places else {},
        {"DRUMLINE_MAX_NUM_SEQS": values["env"]} if "env" in places else {},
        path if "file" in places else None,
    )
    assert config.scheduler.max_num_seqs == int(values[places[0]])


def test_round_trips() -> None:
    config = EngineConfig.from_kwargs(
        max_model_len="8K", seed=7, served_model_name=["a", "b"], step_timeout_seconds=2
    )
    assert EngineConfig.from_kwargs(**config.flat()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(EngineConfig.from_kwargs(seed=1)) == hash(EngineConfig.from_kwargs(seed=1))
    assert config != EngineConfig()
    assert config.with_fields(seed=8, block_size=8).flat() == {
        **config.flat(),
        "seed": 8,
        "block_size": 8,
    }


def test_configs_are_frozen() -> None:
    config = EngineConfig()
    with pytest.raises(AttributeError):
        config.model.seed = 1  # type: ignore[misc]
    with pytest.raises(ConfigError, match="must be a CacheConfig"):
        EngineConfig(cache=ModelConfig())  # type: ignore[arg-type]


# ---------------------------------------------------------------- flags

SAMPLES = {
    Kind.TEXT: ("abc", "abc"),
    Kind.INTEGER: ("4", 4),
    Kind.SIZE: ("2K", 2048),
    Kind.SECONDS: ("2.5", 2.5),
    Kind.TEXTS: ("abc", ("abc",)),
    Kind.OBJECT: ('{"method": "ngram"}', '{"method":"ngram"}'),
}
SAMPLES_BY_NAME = {"spec_method": ("suffix", "suffix"), "spec_tokens": ("4", 4)}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_from_every_place(name: str, tmp_path: Path) -> None:
    field = FIELDS[name]
    if field.option.kind is Kind.SWITCH:
        text, value, args = "true", True, [field.flag]
    else:
        choice = field.option.choices[-1:]
        text, value = (choice[0], choice[0]) if choice else SAMPLES[field.option.kind]
        text, value = SAMPLES_BY_NAME.get(name, (text, value))
        args = [field.flag, text]
    # A draft length alone says nothing about who drafts.
    company = {"spec_method": "ngram"} if name == "spec_tokens" else {}
    variables = {f"DRUMLINE_{key.upper()}": word for key, word in company.items()}
    file = tmp_path / "one.yaml"
    shown = f"'{text}'" if field.option.kind in (Kind.TEXT, Kind.OBJECT) else text
    file.write_text(f"{name.replace('_', '-')}: {shown}\n")
    for config in (
        EngineConfig.from_sources(_parse(*args), variables),
        EngineConfig.from_sources(_parse(args[0].replace("_", "-"), *args[1:]), variables),
        EngineConfig.from_sources({}, {field.variable: text, **variables}),
        EngineConfig.from_sources({}, variables, file),
        EngineConfig.from_kwargs(**{name: value}, **company),
    ):
        assert config.get(name) == value
    if field.option.short:
        short = EngineConfig.from_sources(_parse(field.option.short, *args[1:]), {})
        assert short.get(name) == value


def test_underscores_and_equals_signs() -> None:
    assert _parse("--max_model_len=4K") == {"max_model_len": "4K"}
    assert _parse("--no_enable_prefix_caching") == {"enable_prefix_caching": False}
    assert _parse("-tp=2", "-dp", "3") == {"tensor_parallel_size": "2", "data_parallel_size": "3"}
    assert _parse("--max-model-len", "-1") == {"max_model_len": "-1"}
    assert _parse() == {}


def test_several_names() -> None:
    names = _parse("--served-model-name", "a", "b")
    assert EngineConfig.from_sources(names, {}).server.served_model_name == ("a", "b")
    origins = _parse("--allowed-origins", '["http://a", "http://b"]')
    config = EngineConfig.from_sources(origins, {})
    assert config.server.allowed_origins == ("http://a", "http://b")


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("--max-modl-len", "--max-model-len"),
        ("--maxmodellen=4", "--max-model-len"),
        ("--blocksize", "--block-size"),
        ("--enable-prefix-cache", "--enable-prefix-caching"),
        ("--max_num_seq", "--max-num-seqs"),
        ("--thread", "--threads"),
    ],
)
def test_unknown_flags_name_the_nearest(typed: str, nearest: str) -> None:
    line = _error(typed)
    assert f"unknown flag {typed.partition('=')[0].replace('_', '-')}" in line
    assert f"did you mean {nearest}?" in line


def test_a_stranger_is_named_before_what_is_missing() -> None:
    parser = Parser(prog="drumline")
    parser.add_argument("--prompt", required=True)
    add_engine_arguments(parser)
    err = io.StringIO()
    with redirect_stderr(err), pytest.raises(SystemExit):
        parser.parse_args(["--max-modl-len", "4"])
    assert "unknown flag --max-modl-len; did you mean --max-model-len?" in err.getvalue()
    # A text that begins like a flag is a value if it has spaces or follows an equals sign.
    assert parser.parse_args(["--prompt", "--a b"]).prompt == "--a b"
    assert parser.parse_args(["--prompt=--a"]).prompt == "--a"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_names_get_their_sentence_everywhere(name: str, tmp_path: Path) -> None:
    assert f"is refused: {REFUSED[name]}" in _error("--" + name.replace("_", "-"), "1")
    file = tmp_path / "refused.yaml"
    file.write_text(f"{name}: 1\n")
    for make in (
        lambda: EngineConfig.from_kwargs(**{name: 1}),
        lambda: EngineConfig.from_sources({}, {"DRUMLINE_" + name.upper(): "1"}),
        lambda: EngineConfig.from_sources({}, {}, file),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert REFUSED[name] in str(caught.value)


@pytest.mark.parametrize("short", sorted(REFUSED_SHORT))
def test_refused_short_forms(short: str) -> None:
    assert f"{short} is refused: {REFUSED[REFUSED_SHORT[short]]}" in _error(short, "1")


@pytest.mark.parametrize("args", [["--port"], ["extra"], ["--enable-prefix-caching=maybe"], ["-x"]])
def test_other_mistakes_are_one_line(args: list[str]) -> None:
    assert _error(*args).startswith("drumline generate: error: ")


def test_help_names_every_flag() -> None:
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as caught:
        _parser().parse_args(["generate", "--help"])
    assert caught.value.code == 0
    for field in FIELDS.values():
        assert field.flag in out.getvalue()


def test_building_the_parser_is_quick() -> None:
    probe = (
        "import time; a = time.process_time()\n"
        "from drumline.config.arguments import Parser, add_engine_arguments\n"
        "add_engine_arguments(Parser())\n"
        "import sys; assert 'torch' not in sys.modules and 'yaml' not in sys.modules\n"
        "print(time.process_time() - a)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    seconds = [
        float(
            subprocess.run(
                [sys.executable, "-c", probe],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
                env=env,
            ).stdout
        )
        for _ in range(3)
    ]
    assert min(seconds) < 0.15


# ---------------------------------------------------------------- environment


def test_unknown_variables_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="DRUMLINE_MAX_MODEL.*did you mean max_model_len"):
        EngineConfig.from_sources({}, {"DRUMLINE_MAX_MODEL": "1"})


def test_an_error_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="port='http'.*from DRUMLINE_PORT"):
        EngineConfig.from_sources({}, {"DRUMLINE_PORT": "http"})
    with pytest.raises(ConfigError, match="DRUMLINE_PORT=''.*unset it instead"):
        EngineConfig.from_sources({}, {"DRUMLINE_PORT": ""})


def test_the_cache_folder_is_no_engine_field() -> None:
    assert EngineConfig.from_sources({}, {"DRUMLINE_CACHE": "x"}) == EngineConfig()


# ---------------------------------------------------------------- file


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- 1\n", "must be a mapping"),
        ("text", "must be a mapping"),
        ("a: [1", "is not YAML"),
        ("\tseed: 1", "is not YAML"),
        ("seed: 1\nseed: 2\n", "seed stands there twice"),
        ("max-model-len: 4\nmax_model_len: 5\n", "are the same field"),
        ("1: 2\n", "must be a text"),
        ("sed: 2\n", "did you mean seed"),
        ("seed: '1'\n", "must be a whole number, not a text"),
        ("seed: 1.0\n", "must be a whole number, not a decimal"),
        ("seed: true\n", "must be a whole number, not true/false"),
        ("max_num_seqs: null\n", "must be set"),
        ("enable_prefix_caching: 1\n", "must be true or false"),
        ("step_timeout_seconds: .nan\n", "finite"),
        ("served_model_name: [1]\n", "must be a text"),
        ("seed: !!python/object:os.system x\n", "is not YAML"),
        ("a: &a [*a, *a]\n", "unknown name"),
        ("? [a]\n: 1\n", ""),
        ("speculative_config: {a: .inf}\n", "speculative_config"),
        ("speculative_config: {2020-01-01: 1}\n", "speculative_config"),
    ],
)
def test_bad_files(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_sources({}, {}, file)
    assert problem in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    with pytest.raises(ConfigError, match=r"config=.*missing.yaml.*No such file"):
        EngineConfig.from_sources({}, {}, missing)
    with pytest.raises(ConfigError, match="directory"):
        EngineConfig.from_sources({}, {}, tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        EngineConfig.from_sources({}, {}, binary)
    large = tmp_path / "large.yaml"
    large.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ConfigError, match="larger than"):
        EngineConfig.from_sources({}, {}, large)


def test_an_empty_file_asks_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert EngineConfig.from_sources({}, {}, file) == EngineConfig()


def test_a_mapping_in_a_file_is_an_object(tmp_path: Path) -> None:
    file = tmp_path / "object.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n")
    config = EngineConfig.from_sources({}, {}, file)
    text = '{"method":"ngram","num_speculative_tokens":3}'
    assert config.speculative.speculative_config == text
