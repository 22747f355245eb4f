"""The command that adds extras to this installation."""

from __future__ import annotations

import re
from pathlib import Path

from expert.core.install import NAME, clone_of, pip_install

ROOT = Path(__file__).parents[2]


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
    for package, command in (
        (clone / "src" / "expert", f"pip install -e '{clone}[quant,hub]'"),
        (site / "expert", "pip install 'expert-trainer[quant,hub]'"),
        (copied, "in a clone of Expert: pip install -e '.[quant,hub]'"),
    ):
        assert pip_install("quant", "hub", package=package) == command


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
