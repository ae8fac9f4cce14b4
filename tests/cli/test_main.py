"""`drumline` itself: help at once and without torch, verbs, versions, terminals."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from drumline import __version__
from drumline.cli.main import VERBS, main
from drumline.cli.terminal import printable
from server.running import command, environment

LIGHT = """
import sys, time
began = time.monotonic()
from drumline.cli.main import main
code = main(sys.argv[1:])
seconds = time.monotonic() - began
heavy = [name for name in ("torch", "transformers", "fastapi", "numpy") if name in sys.modules]
print(f"\\n{code} {seconds:.3f} {heavy}", file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([v, "--help"] for v in VERBS)])
def test_help_is_instant_and_loads_nothing_heavy(arguments: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
    )
    code, seconds, heavy = run.stderr.splitlines()[-1].split(maxsplit=2)
    assert (code, heavy) == ("0", "[]"), run.stderr
    assert float(seconds) < 0.5
    assert run.stdout


def test_the_whole_process_takes_less_than_half_a_second() -> None:
    best = 60.0
    for _ in range(3):
        began = time.monotonic()
        subprocess.run(command("--help"), capture_output=True, timeout=60, env=environment())
        best = min(best, time.monotonic() - began)
    assert best < 0.5


def test_help_names_every_verb_and_the_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [verb for verb in VERBS if f"  {verb} " not in shown] == []
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"drumline {__version__}\n"


def test_nothing_typed_shows_the_help_and_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in capsys.readouterr().out


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert printable("a\x1b[31mb\x07\r\x9bc\n\td\0") == "a\ufffd[31mb\ufffd\ufffd\ufffdc\n\td\ufffd"
    assert printable("naïve 👩‍🚀 עברית") == "naïve 👩‍🚀 עברית"


def test_doctor_and_tiny_say_what_they_did(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert main(["doctor"]) == 0
    assert "drumline" in capsys.readouterr().out
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    assert main(["tiny", "--arch", "qwen2", "--output", str(folder), "--vocab", "64"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert (folder / "config.json").exists()


def test_fetch_prints_where_a_model_is(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    assert main(["fetch", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:  # every write says that the disk is full
        run = subprocess.run(
            command(*arguments),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env=environment(),
        )
    assert run.returncode == 1
    assert run.stderr == "drumline: failed: cannot write the output: No space left on device\n"


def test_a_reader_that_has_left_is_told_nothing() -> None:
    run = subprocess.run(
        ["sh", "-c", '"$@" | true', "sh", *command("--help")],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env=environment(),
    )
    assert run.stderr == ""
