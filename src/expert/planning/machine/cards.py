"""The table of NVIDIA cards: memory, compute capability, dense tensor peaks, memory bandwidth.

Peaks are dense (never the doubled "with sparsity" figure) and with FP32 accumulation, in TFLOP/s:
the upper bound of a training step. None means that the unit does not exist or that the number is
unknown; nothing here is a guess. Memory is what nvidia-smi shows, in MiB.

The table is cards.csv. Rules from the FP32 shader rate (cores x 2 x boost clock):
- GeForce RTX 30, 40, 50: bf16 = fp16 = 2x, tf32 = 1x, fp8 = 4x from the RTX 40 on.
- The workstation cards with the same chips: bf16 = fp16 = 4x, tf32 = 2x, fp8 = 8x from Ada on.
- Turing: fp16 = 8x; GeForce RTX 20 halves that with FP32 accumulation. No bf16, tf32 or fp8.
- GTX 16: no tensor cores, fp16 is 2x on the shaders.
Data-centre peaks are from the data sheets; Pascal's are of its shaders, before tensor cores.
Published shader rates of the RTX PRO 4000, 4500, 5000 and of the 6000 Server Edition disagree, and
those of a laptop depend on the power limit set by its maker: their peaks stay unknown. Up to Turing
a laptop chip may carry the desktop name; its peaks are then an upper bound.

A card is found by what a user types or what the driver reports.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from expert.core.files import read_text

Capability = tuple[int, int]

VOLTA: Capability = (7, 0)
AMPERE: Capability = (8, 0)
ADA: Capability = (8, 9)
HOPPER: Capability = (9, 0)


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card as sold; peaks in TFLOP/s, dense, with FP32 accumulation."""

    slug: str
    name: str
    memory_gib: float
    capability: Capability
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    tf32_tflops: float | None = None
    fp8_tflops: float | None = None
    bandwidth_gbs: float | None = None
    nvml_names: tuple[str, ...]
    """NVML's product names of this card, as in current drivers."""


def _card(row: dict[str, str]) -> Card:
    major, minor = row["capability"].split(".")
    peaks = ("bf16", "fp16", "tf32", "fp8")
    return Card(
        slug=row["slug"],
        name=row["name"],
        memory_gib=int(row["mib"]) / 1024,
        capability=(int(major), int(minor)),
        bandwidth_gbs=float(row["gbs"]) if row["gbs"] else None,
        nvml_names=tuple(row["nvml_names"].split("|")),
        **{f"{peak}_tflops": float(row[peak]) for peak in peaks if row[peak]},
    )


_TABLE = read_text(Path(__file__).with_name("cards.csv"))
CARDS: tuple[Card, ...] = tuple(map(_card, csv.DictReader(_TABLE.splitlines())))

MEMORY_TOLERANCE = 0.15
"""ECC and driver versions change the total by up to 7 % (T4, A40), a MIG slice by half or more."""

# Other common names for slugs.
_ALIASES = {
    "h100-sxm": "h100",
    "h100-sxm5": "h100",
    "h100-80gb": "h100",
    "h200-sxm": "h200",
    "h200-141gb": "h200",
    "a100-sxm": "a100-40gb",
    "a100-sxm-40gb": "a100-40gb",
    "a100-sxm-80gb": "a100-80gb",
    "v100-sxm": "v100-16gb",
    "v100-sxm-16gb": "v100-16gb",
    "v100-sxm-32gb": "v100-32gb",
    "rtx-pro-6000-blackwell": "rtx-pro-6000",
}


def find_card(text: str) -> Card | None:
    """The card meant by `text` ("RTX 4090", "4080-super"), or None rather than a guess.

    If a name is sold with several memory sizes, the bare name means the smallest.
    """
    return _BY_KEY.get(_key(text))


def card_by_nvml_name(nvml_name: str, memory_bytes: int) -> Card | None:
    """The card with this NVML product name and about this memory, or None.

    A known name with another memory size (a MIG slice, a vGPU) is not that card.
    """
    memory_gib = memory_bytes / 2**30
    name = _without_maker(nvml_name)
    same_name = [card for card in CARDS if name in map(_without_maker, card.nvml_names)]
    nearest = min(same_name, key=lambda card: abs(card.memory_gib - memory_gib), default=None)
    if nearest is None:
        return None
    off_by = abs(nearest.memory_gib - memory_gib) / nearest.memory_gib
    return nearest if off_by <= MEMORY_TOLERANCE else None


def suggest_cards(text: str, count: int = 5) -> list[str]:
    """Slugs most similar to `text`, best first, for a did-you-mean."""
    keys = difflib.get_close_matches(_key(text), _BY_KEY, n=len(_BY_KEY), cutoff=0.6)
    return list(dict.fromkeys(_BY_KEY[key].slug for key in keys))[:count]


def _without_maker(nvml_name: str) -> str:
    """The product name as older drivers gave it, without "NVIDIA" in front."""
    return nvml_name.strip().removeprefix("NVIDIA ")


def _key(text: str) -> str:
    """Lower-case letters and digits only, without words that do not distinguish cards."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    return re.sub(r"nvidia|geforce|tesla|generation|gpu", "", plain)


def _by_key() -> dict[str, Card]:
    """Every accepted spelling; exact slugs and names first, so no short form can shadow them."""
    by_slug = {card.slug: card for card in CARDS}
    smallest_first = sorted(CARDS, key=lambda card: card.memory_gib)
    exact = {_key(slug): card for slug, card in by_slug.items()}
    exact |= {_key(alias): by_slug[slug] for alias, slug in _ALIASES.items()}
    keys = dict(exact)
    for card in smallest_first:
        bare = re.sub(r"-\d+gb$", "", card.slug)
        for spelling in (card.name, *card.nvml_names, bare):
            keys.setdefault(_key(spelling), card)
    for slug_key, card in list(keys.items()):
        short = re.sub(r"^(rtx|gtx)", "", slug_key)
        keys.setdefault(short, card)
    return keys


_BY_KEY = _by_key()
