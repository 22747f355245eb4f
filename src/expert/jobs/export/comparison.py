"""What a model says to a few texts, to hold an export to what was trained."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expert.jobs.export.card_snippet import Asking
    from expert.planning.run_plan import RunPlan
    from expert.run.stored.load import Trained

# Put to both models as prompts; ASCII and short, so that every tokenizer and card can.
CHECKED_TEXTS = (
    "Hello! What can you do?",
    "Write a short answer to this question: why is the sky blue?",
    'Return {"name": "Ada", "year": 1843} as a table with 2 columns.',
)


def checked_ids(trained: Trained) -> list[list[int]]:
    """The texts as tokens; for the character model those characters that it knows."""
    from expert.data.records import Segment
    from expert.data.tokens.encoder import CharacterEncoder
    from expert.jobs.sample.sample import prompt_text

    if isinstance(trained.encoder, CharacterEncoder):
        known = trained.encoder.characters
        texts = ["".join(c for c in text if c in known) for text in CHECKED_TEXTS]
        module: Any = trained.loaded.module
        texts = [(text or known)[: module.size.block_size] for text in texts]
    else:
        assert trained.template is not None
        texts = [prompt_text(trained.template, text) for text in CHECKED_TEXTS]
    return [trained.encoder.encode([[Segment(t, learn=False)]]).ids.tolist() for t in texts]


def asked_as(trained: Trained) -> Asking | None:
    """How `expert sample` would put a question to it; None for the character model."""
    from expert.data.plain_text import FirstRow, trained_on_text
    from expert.data.tokens.encoder import TextEncoder
    from expert.jobs.export.card_snippet import QUESTION, Asking
    from expert.jobs.sample.sample import prompt_text, settle_decoding

    template, encoder = trained.template, trained.encoder
    if template is None:
        return None
    assert isinstance(encoder, TextEncoder)
    first = FirstRow(trained.plan)
    plain = trained_on_text(trained.plan, first)
    tools = "" if plain else first.tools
    stops = list(settle_decoding(trained.plan, {})[0].stop_sequences)
    if not plain and encoder.tokenizer.token_to_id(template.stop) is None:
        stops.append(template.stop)
    text = prompt_text(template, QUESTION, plain=plain, tools=tools)
    return Asking(text, plain, tuple(stops))


def logits_of_trained(trained: Trained, texts: list[list[int]]) -> list[Tensor]:
    """What the trained model says at every place of the texts."""
    import torch

    from expert.model.export_check import logits_of

    if trained.template is None:
        model: Any = trained.loaded.module
        with torch.no_grad():
            return [
                model(torch.tensor([ids], device=trained.device))[0].float().cpu() for ids in texts
            ]
    prompts = trained.loaded.soft_prompts
    rows = prompts.rows().detach() if prompts is not None else None
    return [logits_of(trained.loaded.causal_lm, ids, rows) for ids in texts]


def as_a_stranger(
    folder: Path, plan: RunPlan, *, adapter: bool, dtype: str, device: torch.device
) -> Any:
    """The model in a folder, through transformers and PEFT alone but for a base's quantisation."""
    from expert.model.load import DTYPES

    if not adapter:
        transformers: Any = importlib.import_module("transformers")
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], device_map={"": str(device)}
        ).eval()
    base = _bare_base(folder, plan, device)
    if plan.adapter.type == "none":
        return base.eval()
    from expert.jobs.export.card_snippet import keeps_adapter_dtype

    peft: Any = importlib.import_module("peft")
    own = {"autocast_adapter_dtype": False} if keeps_adapter_dtype(plan) else {}
    return peft.PeftModel.from_pretrained(base, folder, **own).eval()


def _bare_base(folder: Path, plan: RunPlan, device: torch.device) -> Any:
    """The base in the dtype it was trained in, as the model card's code loads it; a quantised one
    as the run does."""
    from expert.jobs.export.portable_base import COPY
    from expert.model.base_folder import model_folder
    from expert.model.load import DTYPES, load_model
    from expert.model.quantised import QUANTISED

    precision = plan.kernels.precision
    if precision == "fp16" and device.type == "cpu":
        precision = "fp32"
    if plan.model.quantization not in QUANTISED:
        copied = folder / COPY
        place = copied if copied.is_dir() else model_folder(plan.model)
        transformers: Any = importlib.import_module("transformers")
        return transformers.AutoModelForCausalLM.from_pretrained(place, dtype=DTYPES[precision]).to(
            device
        )
    changes = {"attention": "sdpa", "precision": precision}
    base: Any = load_model(
        plan.model,
        plan.adapter.model_copy(update={"type": "none", "soft_prompts": []}),
        plan.kernels.model_copy(update=changes),
        vocabulary=None,
        device=device,
        seed=0,
    ).module
    base.set_attn_implementation("sdpa")
    return base


def character_stranger(folder: Path, device: torch.device) -> Any:
    """The character model in a folder."""
    from expert.model.chargpt import load_char_gpt

    return load_char_gpt(folder, device)[0].eval().requires_grad_(False)
