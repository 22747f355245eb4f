"""Compares the logits of an export with those of the trained model, on a few texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.data.records import Segment
from expert.jobs.export.card import PromptFormat, keeps_adapter_dtype
from expert.jobs.export.exported import ExportRequest, Quality
from expert.jobs.export.portable_base import BASE_COPY
from expert.jobs.sample.sample import prompt_text
from expert.manifest.schema.kinds import QUANTISED
from expert.manifest.schema.manifest import CHAR_GPT
from expert.model.base_folder import TO_TEXT_ALONE, inside_of, model_folder
from expert.run.stored.load import Trained

if TYPE_CHECKING:
    from torch import Tensor

# Short and ASCII, so that every tokenizer and GPU can handle them.
CHECKED_TEXTS = (
    "Hello! What can you do?",
    "Write a short answer to this question: why is the sky blue?",
    'Return {"name": "Ada", "year": 1843} as a table with 2 columns.',
)
TOLERANCE = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1.5e-1}
"""Allowed difference of logits: its root mean square, as a share of their spread (standard
deviation). Summing in another order changes float32 logits by up to 5e-6 of it. Rounding to
bfloat16 (8 bits) changed those of SmolLM2-135M (30 blocks) with its adapters by 2.7 to 4.5 %, to
float16 (11 bits) by 0.3 to 0.4 %, leaving the adapter out by 22 to 58 %
(export-rounding-h200.json). The largest of millions of differences is no measure: it was 15 to 31 %
in bfloat16."""
LARGEST = 10
"""A single difference may be this many times the tolerance: a wrong row of the head differs by more
than a spread, rounding by up to ten times its root mean square."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Logits of the trained model on the checked texts, and its prompt."""

    ids: list[list[int]]
    prompt_format: PromptFormat | None
    logits: list[Tensor]
    adapter_effect: float | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of logits, over all positions and tokens."""

    largest: float
    """The largest, in logits."""
    share: float
    """The root mean square, as a share of the spread of the expected logits."""
    largest_share: float

    def within(self, tolerance: float) -> bool:
        """False for NaN too."""
        return self.share <= tolerance and self.largest_share <= LARGEST * tolerance


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written, and the results of its checks; the last two are those of a GGUF file."""

    difference: Difference
    """Between the logits of the export and of the trained model."""
    notes: tuple[str, ...]
    file: str = ""
    quality: Quality | None = None


def compare(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> Difference:
    """The difference between the logits of the same texts."""
    import torch

    pairs = zip(expected, actual, strict=True)
    differences = torch.cat([(left - right).flatten() for left, right in pairs])
    largest = float(differences.abs().max())
    spread = max(float(torch.cat([logits.flatten() for logits in expected]).std()), 1e-12)
    return Difference(
        largest=largest,
        share=float(differences.square().mean().sqrt()) / spread,
        largest_share=largest / spread,
    )


def checked_ids(trained: Trained) -> list[list[int]]:
    """The texts as tokens; for the character model, only the characters it knows."""
    from expert.data.tokens.encoder import CharacterEncoder

    if isinstance(trained.encoder, CharacterEncoder):
        known = trained.encoder.characters
        texts = ["".join(c for c in text if c in known) for text in CHECKED_TEXTS]
        module: Any = trained.loaded.module
        texts = [(text or known)[: module.size.block_size] for text in texts]
    else:
        assert trained.template is not None
        texts = [prompt_text(trained.template, text) for text in CHECKED_TEXTS]
    return [trained.encoder.encode([[Segment(t, learn=False)]]).ids.tolist() for t in texts]


def logits_of(model: Any, ids: Sequence[int], soft_rows: Tensor | None = None) -> Tensor:
    """Logits of `ids` after the soft prompts: [positions, vocabulary], float32, on the CPU. A model
    without input embeddings is the character model."""
    import torch

    # Without TF32, which a run in the same process may have allowed: it moves float32 logits by
    # 0.2 % of their spread (export-rounding-h200.json).
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            if not hasattr(model, "get_input_embeddings"):
                tokens = torch.tensor([list(ids)], device=model.head().device)
                characters: Tensor = model(tokens)[0]
                return characters.float().cpu()
            embedding = model.get_input_embeddings()
            tokens = torch.tensor([list(ids)], device=embedding.weight.device)
            if soft_rows is None:
                output = model(input_ids=tokens, use_cache=False)
            else:
                words = embedding(tokens)
                rows = soft_rows.to(words.device, words.dtype)[None]
                output = model(inputs_embeds=torch.cat([rows, words], dim=1), use_cache=False)
            logits: Tensor = output.logits[0, -len(ids) :]
            return logits.float().cpu()
    finally:
        torch.set_float32_matmul_precision(before)


def logits_of_trained(trained: Trained, texts: list[list[int]]) -> list[Tensor]:
    model = trained.loaded.module if trained.template is None else trained.loaded.causal_lm
    prompts = trained.loaded.soft_prompts
    rows = prompts.rows().detach() if prompts is not None else None
    return [logits_of(model, ids, rows) for ids in texts]


def load_exported(folder: Path, source: ExportRequest) -> Any:
    """Load an export with transformers and PEFT only, except for a quantised base and the character
    model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from expert.model.chargpt import load_char_gpt
    from expert.model.load import DTYPES, load_model

    auto: Any = AutoModelForCausalLM
    plan, device = source.plan, source.device
    if plan.model.name == CHAR_GPT:
        return load_char_gpt(folder, device)[0].eval().requires_grad_(False)
    if source.kind != "adapter":
        placed = {"": str(device)}
        return auto.from_pretrained(folder, dtype=DTYPES[source.dtype], device_map=placed).eval()
    precision = plan.kernels.precision
    if precision == "fp16" and device.type == "cpu":
        precision = "fp32"
    base: Any
    if plan.model.quantization in QUANTISED:
        base = load_model(
            plan.model,
            plan.adapter.model_copy(update={"type": "none", "soft_prompts": []}),
            plan.kernels.model_copy(update={"attention": "sdpa", "precision": precision}),
            vocabulary=None,
            device=device,
            seed=0,
        ).module
        base.set_attn_implementation("sdpa")
    else:  # in the dtype of training, as the model card's code loads it
        copied = folder / BASE_COPY
        place = copied if copied.is_dir() else model_folder(plan.model)
        if inside_of(place):
            auto = AutoModelForImageTextToText
        base = auto.from_pretrained(place, dtype=DTYPES[precision]).to(device)
    if plan.adapter.type == "none":
        return base.eval()
    options: Any = {"autocast_adapter_dtype": False} if keeps_adapter_dtype(plan) else {}
    if plan.model.quantization in QUANTISED:
        options["key_mapping"] = TO_TEXT_ALONE
    return PeftModel.from_pretrained(base, folder, **options).eval()
