"""The make_data.py of an expert as a module: folders with a dash in their name are no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXPERTS = Path(__file__).parents[1]


def generator_of(folder: Path) -> ModuleType:
    """The generator in an expert's folder."""
    name = f"make_data_of_{folder.name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, folder / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
