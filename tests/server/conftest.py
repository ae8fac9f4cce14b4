"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from server.running import Server

LENGTH = 8192


@pytest.fixture(scope="session")
def long_tiny(tiny_path: Callable[..., Path]) -> Path:
    """A miniature model whose requests can run for many seconds."""
    return tiny_path(vocab=300, max_position_embeddings=LENGTH)


@pytest.fixture(scope="session")
def server(long_tiny: Path) -> Iterator[Server]:
    arguments = ("--served-model-name", "tiny", "mini", "--max-num-seqs", "16", "--seed", "5")
    with Server(str(long_tiny), *arguments) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
