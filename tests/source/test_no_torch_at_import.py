"""Planning and reading need no torch: importing them leaves the heavy packages alone."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import expert

HEAVY = ("torch", "transformers", "numpy")
LIGHT = ("core", "manifest", "planning", "insight", "judging", "jobs", "cli")


def light_modules() -> list[str]:
    found = [
        module.name
        for module in pkgutil.walk_packages(expert.__path__, "expert.")
        if module.name.split(".")[1] in LIGHT
    ]
    for layer in LIGHT:
        assert f"expert.{layer}" in found
    assert len(found) > 20
    return found


def loaded_after_importing(modules: list[str]) -> list[str]:
    """Heavy packages that a fresh interpreter has loaded after these imports."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n    importlib.import_module(name)\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_light_layers_loads_nothing_heavy():
    assert loaded_after_importing(["expert", *light_modules()]) == []


def test_importing_the_package_alone_imports_nothing_of_it():
    code = "import sys, expert\nprint(*[one for one in sys.modules if one.startswith('expert.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == ([], 0)
