"""The command that adds extras to this installation."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from expert.core.install import NAME, clone_of, pip_install

ROOT = Path(__file__).parents[2]


def test_the_distribution_is_not_named_as_somebody_elses():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == NAME == "expert-trainer"
    assert set(project["scripts"]) == {"expert", "expert-cli"}
    own = [line for line in project["optional-dependencies"]["dev"] if line.startswith("expert")]
    assert own == ["expert-trainer[quant,tensorboard,validate,gguf,serve]"]


def package_in(folder: Path, project: str) -> Path:
    package = folder / "src" / "expert"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(project)
    return package


def test_a_clone_adds_to_itself_and_any_other_installation_to_the_installed_package(tmp_path):
    clone = tmp_path / "my clone"
    assert clone_of(package_in(clone, f'[project]\nname = "{NAME}"\n')) == clone
    others = ('[project]\nname = "theirs"\n', "[project", "project = 3\n", "")
    for number, other in enumerate(others):
        assert clone_of(package_in(tmp_path / str(number), other)) is None
    site = tmp_path / "site-packages"
    (site / f"{NAME.replace('-', '_')}-1.0.dist-info").mkdir(parents=True)
    copied = tmp_path / "0" / "src" / "expert"
    for package, before, posix, windows in (
        (clone / "src" / "expert", "", f"-e '{clone}[quant,hub]'", f'-e "{clone}[quant,hub]"'),
        (site / "expert", "", "'expert-trainer[quant,hub]'", '"expert-trainer[quant,hub]"'),
        (copied, "in a clone of Expert: ", "-e '.[quant,hub]'", '-e ".[quant,hub]"'),
    ):
        extras = partial(pip_install, "quant", "hub", package=package)
        assert extras(windows=False) == f"{before}pip install {posix}"
        assert extras(windows=True) == f"{before}pip install {windows}"
    assert pip_install(package=site / "expert", windows=False) == "pip install expert-trainer"


def test_this_checkout_knows_itself_without_being_installed():
    code = "from expert.core.install import pip_install; print(pip_install('quant'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{ROOT}[quant]" in done.stdout


@pytest.mark.slow
def test_pip_understands_the_command_for_this_installation():
    """With --no-deps and --dry-run: nothing is fetched or changed."""
    pytest.importorskip("pip", reason="this environment has no pip")
    words = shlex.split(pip_install("quant", windows=False))
    options = ["--dry-run", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", *words[:2], *options, *words[2:]], capture_output=True, text=True
    )
    if "setuptools" in done.stderr:
        pytest.skip("building needs setuptools, which is not installed")
    assert done.returncode == 0, done.stderr


def test_no_text_sends_people_to_another_package_or_names_an_extra_without_asking_where_from():
    """`expert-cli` is the name of a command; the package of that name is unrelated."""
    places = ("docs", "experts", "recipes", "src")
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    files += [path for name in places for path in (ROOT / name).rglob("*") if path.is_file()]
    texts = [path for path in files if path.suffix in (".md", ".py", ".toml")]
    assert len(texts) > 200
    wrong = re.compile(r"expert-cli\[|install (-\S+ )*['\"`]?expert-cli|expert_cli")
    source = ROOT / "src" / "expert"
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in texts
        for line in path.read_text(encoding="utf-8").splitlines()
        if (wrong.search(line) and path.name != "CHANGELOG.md")
        or ("expert-trainer" in line and source in path.parents and path.name != "install.py")
    ]
    assert found == []
