"""Fixes of findings are valid keys and values of a manifest."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import expert
from expert.insight.findings.finding import CONFIG
from expert.insight.findings.table import TABLE
from expert.manifest.reader import read_manifest
from tests.each import each
from tests.jobs.runs import write_expert

FILES = sorted((Path(expert.__file__).parent / "insight" / "findings").glob("*.py"))
SETTING = re.compile(r"(?:training\.[a-z_.]+\.)?[a-z0-9_]+=\S+")


def settings() -> list[str]:
    """Every override of the table, and those written in a rule."""
    found = {key for rule in TABLE.values() for key in rule.keys}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if SETTING.fullmatch(node.value) else set()
    return sorted(each if "." in each.partition("=")[0] else f"{CONFIG}.{each}" for each in found)


@each("setting", settings())
@each("config", [{}, {"dataloader_num_workers": 0, "packing": False}], ids=str)
def test_a_fix_that_is_a_key_is_one_that_manifests_have(tmp_path, setting, config):
    read_manifest(write_expert(tmp_path, "tiny", config), overrides=(setting,), strict=True)
