"""What an engine holds of the machine's memory, asked of the system in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.core.cpu import native_available

SCRIPT = """
import json, sys
from drumline import LLM, SamplingParams

def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: 1024 * int(fields[name].split()[0]) for name in ("VmRSS", "RssFile")}

llm = LLM(model=sys.argv[1], threads=1)
loaded = resident()
prompts = ["Tell me of a fox, a raven and a cheese."] * 4
llm.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True))
worker = llm.core.worker
spec = worker.model.kv_spec
print(json.dumps({
    "loaded": loaded,
    "after": resident(),
    "weights": sum(
        linear.nbytes
        for layer in worker.model.stack.layers
        for linear in (
            layer.attention.qkv, layer.attention.o,
            layer.feed_forward.gate_up, layer.feed_forward.down,
        )
    ) + worker.model.embedding.nbytes,
    "kv_used": 4 * 80 * 2 * 4 * spec.layers * spec.kv_heads * spec.head_dim,
}))
"""


def test_weights_are_resident_once(smollm2_path: Path) -> None:
    """Weights, used cache and 350 MB for everything else; of the checkpoint's file nothing stays
    mapped: what is left of files are libraries."""
    if not native_available() or not Path("/proc/self/status").exists():
        pytest.skip("needs the native module and Linux")
    command = [sys.executable, "-c", SCRIPT, str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] > 90e6
    assert found["after"]["VmRSS"] < found["weights"] + found["kv_used"] + 350e6, found
    assert found["loaded"]["RssFile"] < found["weights"] + 60e6, found
    assert found["after"]["VmRSS"] - found["loaded"]["VmRSS"] < found["kv_used"] + 60e6, found
