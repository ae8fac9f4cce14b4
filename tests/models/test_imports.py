"""What deciding rooms may import from here comes without torch, and importing does nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
TORCH_FREE = ["config", "hub_config", "gguf_config", "gguf_file", "registry", "fetch"]
TORCH_FREE += ["tokenizer", "hub_tokenizer", "gguf_tokenizer", "chat_template"]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_it_imports_without_torch(module: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); sys.modules['torch'] = None\n"
        f"import drumline.models.{module}\n"
        "assert 'transformers' not in sys.modules and 'huggingface_hub' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_package_imports_none_of_its_modules() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
        "import drumline.models\n"
        "print([name for name in sys.modules if name.startswith('drumline.models.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n"
