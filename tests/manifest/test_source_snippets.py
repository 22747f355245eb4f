"""What takes the place of each script of the five source documents is in docs/COMING_FROM.md; their
single settings are lines of it, which tests/test_coming_from.py reads."""

from __future__ import annotations

from tests.cli.running import EXAMPLES
from tests.each import each
from tests.manifest.reading import error_of
from tests.wording import wording

COMMANDS = {
    "expert/cli/scripts/find_datasets.py": "find-datasets",
    "expert/cli/scripts/pretokenize_datasets.py": "pretokenize",
    "python cli/clear_cuda_cache.py": "clear-cuda-cache",
    "expert-cli train --manifest": "train",
    "expert/cli/scripts/benchmark_training.py": "benchmark",
    "tests/test_expert.py": "validate",
    "python train.py --dataset shakespeare": "train",
    "python diagnose_training.py": "diagnose",
    "watch -n 1 nvidia-smi": "watch",
    "load_base_model, setup_trainer of expert_trainer.py": "plan",
}
"""The scripts of the documents, and what is run in their place."""


@each(("script", "command"), COMMANDS.items())
def test_what_takes_the_place_of_a_script_is_in_the_document(script, command):
    text = (EXAMPLES.parent / "docs" / "COMING_FROM.md").read_text(encoding="utf-8")
    name = script.split("/")[-1].split(" --")[0].removeprefix("python ")
    assert name.split(" of ")[-1] in text, script
    assert f"expert {command}" in text


def test_a_class_instead_of_its_lines_is_refused_with_what_to_keep():
    text = "from dataclasses import dataclass\n\n@dataclass\nclass Config:\n    epochs: int = 3\n"
    assert wording("keep-name-type-value") in error_of(text)
