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
    from expert.core.install import pip_install
    from expert.data.records import DataNotHere

    if plan.model.place != "hub":
        return Path(plan.model.location)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise DataNotHere(
            f"{plan.model.location} is not on this machine  (put its folder into models/, or "
            f"{pip_install('hub')} to fetch it)"
        ) from None
    files = ["tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt"]
    try:
        found = snapshot_download(
            plan.model.location, revision=plan.model.revision, allow_patterns=files
        )
    except LocalEntryNotFoundError as error:
        raise DataNotHere(_unreachable(plan.model.location, error, _slip(plan, folder))) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataNotHere(
            f"{plan.model.location} is not on this machine and could not be fetched from the hub: "
            f"{reason}  ({_slip(plan, folder)}put its folder into models/ beside the manifest)"
        ) from None
    return Path(found)


def _slip(plan: RunPlan, folder: Path) -> str:
    """The model that may be meant; the name that this one has anyway is no slip of it."""
    from expert.planning.models.resolve import near_model

    near = near_model(plan.model.name, folder)
    if near is None or near.lower() == plan.model.name.rpartition("/")[2].lower():
        return ""
    return f"did you mean {near!r}? If not, "


def _unreachable(name: str, error: Exception, meant: str) -> str:
    """What to do about a model where the hub does not answer: nothing is known of its name."""
    cause = error.__cause__ or error
    why = str(cause).splitlines()[0].rstrip(".") if str(cause) else type(cause).__name__
    return (
        f"{name} is not on this machine, and the hub cannot be reached: {why}  ({meant}fetch it "
        f"where there is a network, with 'hf download {name} --local-dir "
        f"{name.rpartition('/')[2]}', and put that folder into models/ beside the manifest or name "
        "its path; or set HF_HOME to a cache that holds it)"
    )
