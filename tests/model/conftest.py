from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.models import tiny_model


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3, which no test changes."""
    return tiny_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama")
