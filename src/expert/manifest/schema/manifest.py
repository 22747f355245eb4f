"""The manifest as read, in the 2.0 layout; values may still be "auto"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.dataset import DatasetSpec, Decoding
from expert.manifest.schema.kinds import PromptTemplate, Quantization, ReleasedAdapter
from expert.manifest.schema.types import (
    AUTO,
    Auto,
    Blocks,
    Flag,
    JinjaText,
    NonNegativeInt,
    PositiveNumber,
    PromptLength,
    Rank,
    Section,
    Share,
    StrictSection,
    Text,
    Width,
)

CHAR_GPT = "char-gpt"


class CharGptShape(StrictSection):
    """Size of the built-in character model, trained from scratch."""

    layers: Blocks = 6
    """Transformer blocks."""
    heads: Blocks = 6
    """Attention heads; must divide width."""
    width: Width = 384
    """Size of the hidden state."""
    block_size: Width = 256
    """Context length, in characters."""
    dropout: Share = 0.0
    """Dropout in attention and feed-forward."""


class Adapter(Section):
    """A released adapter. training.config decides what is trained and falls back to this."""

    type: ReleasedAdapter | None = None
    """Kind of adapter."""
    target_modules: list[Text] | None = None
    """Adapted layers."""
    feedforward_modules: list[Text] | None = None
    """IA3: layers whose input is scaled."""
    r: Rank | None = None
    """Rank."""
    alpha: PositiveNumber | None = None
    """Scale, applied as alpha / r."""
    dropout: Share | None = None
    """Dropout before the adapter."""
    scaling: Text | None = None
    """Name of the scaling rule."""
    use_dora: Flag | None = None
    """Weight decomposition; the same as type dora."""
    path: str | None = None
    """Where the released weights are."""
    checkpoint_step: NonNegativeInt | None = None
    """Step the release was taken from."""
    size_bytes: NonNegativeInt | None = None
    """Size of the released file; 0: not filled in."""
    sha256: str | None = None
    """Hash of the released file; empty: not filled in."""


class BaseModelSpec(Section):
    """A model the expert is trained on."""

    name: Text
    """Folder, name, or hub id; missing absolute paths are looked up by their last part."""
    sha256: str | None = None
    """Hash of the base weights; empty: not checked."""
    quantization: Quantization | Auto = AUTO
    """Base weights: int4 (NF4, double quantisation), int8, fp8; bf16, fp16, none: as they are."""
    rope_scaling: Text | dict[str, Any] | None = None
    """Descriptive only: positions follow the model's config.json."""
    prompt_template: PromptTemplate | JinjaText | Auto = AUTO
    """Prompt format: a name, or the text of a chat template (Jinja); auto: the tokenizer's chat
    template, else by the model's name."""
    revision: Text | None = None
    """Hub commit to use."""
    architecture: CharGptShape | None = None
    """Size of the built-in char-gpt; only for that model."""
    adapters: list[Adapter] = []
    """Released adapters."""


class SoftPrompt(Section):
    """Virtual tokens trained in front of every example."""

    name: Text
    """Name of the prompt."""
    tokens: PromptLength = 32
    """Number of virtual tokens."""
    path: Text | None = None
    """Where the released embedding is."""
    init_method: Literal["random", "text", "vocab_sample"] = "random"
    """Initialise from noise, from the embedding of init_text, or from random vocabulary tokens."""
    init_text: str = ""
    """Text for init_method text."""
    purpose: str | None = None
    """What it is for."""


class Training(Section):
    """Data, settings and decoding of the expert."""

    dataset: DatasetSpec
    """Where the rows come from."""
    config: TrainingConfig = TrainingConfig()
    """How the expert is trained."""
    decoding: Decoding = Decoding()
    """How answers are generated."""
    packaging_checkpoint: Text = "final"
    """Checkpoint that is exported: final, best or checkpoint-N."""
    checkpoint: str | NonNegativeInt | None = None
    """Descriptive: checkpoint of the last release."""
    alternative_checkpoints: dict[str, Any] | list[Any] | None = None
    """Descriptive: other checkpoints worth trying."""


class Manifest(Section):
    """One expert: what it is, what it is built on, how it is trained."""

    schema_version: Literal["2.0"] = "2.0"
    """Layout of the file; 1.0 is read too."""
    name: Text
    """Name of the expert; where absent, the name of the folder or file."""
    version: Text = "0.1.0"
    """Version of the expert, x.y.z."""
    description: str = ""
    """What the expert is good at."""
    author: str | dict[str, Any] | None = None
    """Author."""
    base_models: Annotated[list[BaseModelSpec], Field(min_length=1)]
    """Models it can be trained on; the first is used unless --model is given."""
    soft_prompts: list[SoftPrompt] = []
    """Virtual tokens trained in front of every example."""
    training: Training
    """Data, settings and decoding."""
    capabilities: list[str] = []
    """Tags for routing."""
    constraints: dict[str, Any] | None = None
    """load_order, incompatible_with, requires, max_chain; for the runtime."""
    limitations: list[str | dict[str, Any]] = []
    """Known weaknesses."""
    routing: dict[str, Any] | None = None
    """Hints for a router."""
    runtime: dict[str, Any] | None = None
    """Hints for a runtime."""
    perf: dict[str, Any] | None = None
    """Cost at inference, as released."""
    quality_metrics: dict[str, Any] | None = None
    """Scores, as released."""
    evaluation: dict[str, Any] | None = None
    """How it was evaluated, as released."""
    integrity: dict[str, Any] | None = None
    """Signatures, as released."""
    license: str | None = None
    """Licence of the expert."""
    repository: str | dict[str, Any] | None = None
    """Source repository."""
    homepage: str | None = None
    """Web page."""
    tags: list[str] = []
    """Search keywords."""
