"""Where this installation came from, and the command that installs extras from the same place."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from expert.core.install import NAME, Origin, install_hint, origin, origin_of, pip_install
from tests.each import each
from tests.wording import wording

ROOT = Path(__file__).parents[2]


def installed(tmp_path: Path, direct_url: object = None) -> Path:
    """The package folder of an installation that is not a checkout, with PEP 610's record of it."""
    package = tmp_path / "site-packages" / "expert"
    package.mkdir(parents=True)
    facts = package.parent / "expert_trainer-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: expert-trainer\nVersion: 0.1.0\n")
    if direct_url is not None:
        text = direct_url if isinstance(direct_url, str) else json.dumps(direct_url)
        (facts / "direct_url.json").write_text(text)
    return package


def test_the_distribution_is_not_named_as_somebody_elses():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == NAME == "expert-trainer"
    assert set(project["scripts"]) == {"expert", "expert-cli"}
    own = [line for line in project["optional-dependencies"]["dev"] if line.startswith("expert")]
    assert own == ["expert-trainer[quant,tensorboard,validate,gguf,serve]"]


def test_a_checkout_adds_to_itself_and_names_its_folder(tmp_path):
    package = tmp_path / "my clone" / "src" / "expert"
    package.mkdir(parents=True)
    (tmp_path / "my clone" / "pyproject.toml").write_text('[project]\nname = "expert-trainer"\n')
    found = origin_of(package)
    assert found == Origin("checkout", str(tmp_path / "my clone"))
    assert pip_install("quant", "hub", of=found, windows=False) == (
        f"pip install -e '{tmp_path}/my clone[quant,hub]'"
    )
    assert shlex.split(pip_install("quant", of=found, windows=False))[-1].endswith("clone[quant]")
    assert pip_install("quant", of=found, windows=True) == (
        f'pip install -e "{tmp_path}/my clone[quant]"'
    )


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


@each(
    ("record", "command"),
    [
        (None, "pip install 'expert-trainer[hub]'"),
        (
            {"url": "https://x.org/e.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "pip install 'expert-trainer[hub] @ git+https://x.org/e.git@ab12'",
        ),
        (
            {
                "url": "https://x.org/e.git",
                "vcs_info": {"vcs": "git", "commit_id": "ab12", "requested_revision": "v2"},
                "subdirectory": "py",
            },
            "pip install 'expert-trainer[hub] @ git+https://x.org/e.git@ab12#subdirectory=py'",
        ),
        (
            {"url": "https://x.org/expert_trainer-0.1.0.whl", "archive_info": {}},
            "pip install 'expert-trainer[hub] @ https://x.org/expert_trainer-0.1.0.whl'",
        ),
        (
            {"url": "https://me:secret@x.org/e.whl", "archive_info": {}},
            "pip install 'expert-trainer[hub] @ https://x.org/e.whl'",
        ),
        ({"url": "file:///home/me/e%20x", "dir_info": {}}, "pip install '/home/me/e x[hub]'"),
        (
            {"url": "file:///home/me/ex", "dir_info": {"editable": True}},
            "pip install -e '/home/me/ex[hub]'",
        ),
    ],
)
def test_an_installation_adds_from_where_it_came_from(tmp_path, record, command):
    found = origin_of(installed(tmp_path, record))
    assert pip_install("hub", of=found, windows=False) == command


@each("record", ["{", "[]", '{"url": 3}', "{}"])
def test_an_invalid_pip_record_is_ignored(tmp_path, record):
    found = origin_of(installed(tmp_path, record))
    assert found.kind == "unknown"
    assert pip_install("quant", of=found, windows=False) == wording("in-clone-expert-pip")


def test_the_record_of_another_installation_is_not_that_of_this_code(tmp_path):
    installed(tmp_path)
    (tmp_path / "src" / "expert").mkdir(parents=True)  # of another project
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
    for elsewhere in (tmp_path / "copied" / "expert", tmp_path / "src" / "expert"):
        assert origin_of(elsewhere).kind == "unknown"


def test_install_instructions_never_name_a_local_folder():
    here = "/home/me/x"
    for found in (Origin("checkout", here), Origin("folder", here), Origin("unknown", "")):
        text = install_hint(found)
        assert text == wording("from-clone-repository-pip")
    local = Origin("url", "file:///home/me/e.whl")
    assert "/home/me" not in install_hint(local)
    assert install_hint(Origin("index", NAME)) == "`pip install expert-trainer`"
    public = install_hint(Origin("url", "git+https://x.org/e.git@ab12"))
    assert public == "`pip install 'expert-trainer @ git+https://x.org/e.git@ab12'`"


@pytest.mark.slow
def test_pip_understands_the_command_for_this_installation():
    """With --no-deps and --dry-run: nothing is fetched or changed."""
    pytest.importorskip("pip", reason="this environment has no pip")
    words = shlex.split(pip_install("quant", windows=False))
    if words[:2] != ["pip", "install"]:
        pytest.skip(f"installed in another way: {origin()}")
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
