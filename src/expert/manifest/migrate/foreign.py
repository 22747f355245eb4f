"""Files of other trainers: what they mean there, in words that mean the same here."""

from __future__ import annotations

from pathlib import Path

from expert.manifest.migrate.moving import Migration
from expert.manifest.peers.answers import answer_keys
from expert.manifest.peers.axolotl import read_axolotl
from expert.manifest.peers.class_files import read_litgpt, read_torchtune
from expert.manifest.peers.data_sets import read_hub_parts
from expert.manifest.peers.llama_factory import read_llama_factory, read_quantization
from expert.manifest.peers.python_lines import read_python_lines
from expert.manifest.peers.sections import open_sections
from expert.manifest.peers.switches import read_methods, read_switches
from expert.manifest.text.document import Item


def read_foreign(work: Migration, folder: Path) -> None:
    """Rewrite what Axolotl, LLaMA-Factory, LitGPT, torchtune, TRL and Unsloth write otherwise.

    `folder`: where the file lies, beside which LLaMA-Factory keeps the list of its data sets.
    """
    read_python_lines(work)
    read_litgpt(work)
    read_torchtune(work)
    if not is_whole(work):
        open_sections(work, work.root)
    open_sections(work, work.section("training"))
    read_methods(work)
    read_llama_factory(work, folder)
    read_quantization(work)
    read_hub_parts(work)
    read_axolotl(work)
    config = work.root.get("training", Item(None)).get("config")
    model = work.root.get("model")
    zones = [work.root, work.section("training")]
    zones += [item.fields() for item in (config, model) if item is not None]
    for zone in zones:
        read_switches(work, zone)
        # The shape of a character model has a `bias` too, and that is no adapter's.
        answer_keys(work, zone, keep=("bias",) if model and zone is model.value else ())


def is_whole(work: Migration) -> bool:
    """A manifest of our own layout, whose top level describes the expert."""
    return work.root.get("training", Item(None)).get("config") is not None
