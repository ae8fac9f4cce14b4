"""What this machine is, which backends are here, and what is fast and what is not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from typing import Any

from drumline._version import __version__
from drumline.config import read_machine
from drumline.config.sizes import format_bytes
from drumline.core.cpu import native_available, native_paths

LIBRARIES = ("torch", "tokenizers", "safetensors", "huggingface_hub", "fastapi", "uvicorn")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    facts = gather()
    if args.json:
        print(json.dumps(facts))
        return 0
    for name, value in facts.items():
        print(f"{name:<18} {value}")
    return 0


def gather() -> dict[str, Any]:
    """Environment, machine and backends. Reads; changes nothing."""
    from drumline.models.fetch import cache_folder, is_fetched

    machine = read_machine()
    native = native_available()
    paths = native_paths()
    facts: dict[str, Any] = {
        "drumline": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": machine.cpu_model,
        "cores": f"{machine.physical_cores} physical, {machine.available_cores} available",
        "instructions": " ".join(machine.cpu_features) or "none known",
        "memory": f"{format_bytes(machine.free_memory_bytes)} free of "
        f"{format_bytes(machine.total_memory_bytes)}",
        "native module": "built" if native else "not built: no compiler was found at install",
        "ops reference": "here: plain torch in float32; the oracle, not the fast one",
        "ops native": f"here: {paths[0]} path; compiled for this CPU" if native else "not built",
        "model cache": str(cache_folder()),
        "smollm2": "fetched" if is_fetched("smollm2") else "not fetched: drumline fetch smollm2",
    }
    for name in LIBRARIES:
        facts[name] = _version(name)
    return facts


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
