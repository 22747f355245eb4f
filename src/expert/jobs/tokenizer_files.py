"""Where the tokenizer of a planned model lies; that of a hub model is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.planning.run_plan import RunPlan


def tokenizer_folder(plan: RunPlan, folder: Path) -> Path:
    """The model's folder on this machine; for a hub model its tokenizer files are fetched.

    `folder`: that of the manifest, near which models are looked for.
    """
    from expert.data.records import DataNotHere
    from expert.planning.resolve import near_model

    if plan.model.place != "hub":
        return Path(plan.model.location)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise DataNotHere(
            f"{plan.model.location} is not on this machine  (put its folder into models/, or "
            "pip install 'expert-cli[hub]' to fetch it)"
        ) from None
    files = ["tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt"]
    try:
        found = snapshot_download(
            plan.model.location, revision=plan.model.revision, allow_patterns=files
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        near = near_model(plan.model.name, folder)
        meant = f"did you mean {near!r}? If not, " if near else ""
        raise DataNotHere(
            f"{plan.model.location} is not on this machine and could not be fetched from the hub: "
            f"{reason}  ({meant}put its folder into models/ beside the manifest)"
        ) from None
    return Path(found)
