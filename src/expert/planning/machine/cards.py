"""Finds a card in the table by what a user types or what the driver reports."""

from __future__ import annotations

import difflib
import re

from expert.planning.machine.card_table import CARDS, Card

__all__ = ["CARDS", "Card", "card_named", "find_card", "suggest_cards"]

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


def card_named(nvml_name: str, memory_bytes: int) -> Card | None:
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
