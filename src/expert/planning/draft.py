"""A plan in the making: the inputs of every choice, and the decisions so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.dataset import DatasetSpec
from expert.manifest.schema.kinds import PREFERENCES
from expert.manifest.schema.manifest import CHAR_GPT, BaseModelSpec, Manifest
from expert.planning.decisions import Decision, Remark, Source
from expert.planning.machine.target import Cluster, Target
from expert.planning.models.resolve import ResolvedModel
from expert.planning.survey import PackedRows, Survey

SET = "set in the manifest"
SET_HERE = "set on the command line"
KEYS = {
    "model.revision": "revision",
    "data.cache": "pretokenized_cache",
    "parallel.engine": "distributed",
    "loader.workers": "dataloader_num_workers",
    "loader.prefetch": "dataloader_prefetch_factor",
    "loader.pin_memory": "dataloader_pin_memory",
    "batch.examples_per_update": "batch_size",
    "batch.micro_batch": "micro_batch_size",
    "optim.optimizer": "optim",
    "kernels.tf32": "use_tf32",
    "kernels.compile": "torch_compile",
    "kernels.cuda_graphs": "use_cuda_graphs",
    "kernels.checkpointing": "gradient_checkpointing",
    "kernels.recomputed_blocks": "gradient_checkpointing",
}
"""The manifest's keys of paths that end in another name."""
KEPT = "kept from the run being resumed"


@dataclass(frozen=True, kw_only=True)
class ResumedChoices:
    """Choices that a resumed run keeps on any machine: they were made for the machine it started on
    but change the results. None: chosen again."""

    examples_per_update: int | None = None
    quantization: str | None = None
    fused_blocks: bool | None = None
    precision: str | None = None
    tf32: bool | None = None
    attention: str | None = None


@dataclass(kw_only=True)
class PlanDraft:
    """The manifest, model, data and card, and the decisions so far."""

    manifest: Manifest
    folder: Path
    model: BaseModelSpec
    resolved: ResolvedModel
    target: Target
    cluster: Cluster
    survey: Survey
    plain_text: bool | None
    """Whether the rows are texts without answers; None if not known yet."""
    kept: ResumedChoices
    on_command_line: frozenset[str] = frozenset()
    """Keys whose values come from there rather than from the file."""
    decisions: dict[str, Decision] = field(default_factory=dict)
    """By path, in the order they were made; each path is settled once."""
    remarks: list[Remark] = field(default_factory=list)

    # --- decisions ---------------------------------------------------------------------------

    def settle(
        self, path: str, value: Any, because: str, source: Source = "machine", key: str = ""
    ) -> Any:
        """Record a value and return it. `key`: of the manifest, if it set the value."""
        leaf = path.rpartition(".")[2]
        if because == SET and (key or KEYS.get(path, leaf)) in self.on_command_line:
            because, source = SET_HERE, "--set"
        assert path not in self.decisions, f"{path} is settled twice"
        value = list(value) if isinstance(value, tuple) else value  # as in JSON
        self.decisions[path] = Decision(path=path, value=value, because=because, source=source)
        return value

    def choose(
        self, path: str, key: str, value: Any, because: str, source: Source = "machine"
    ) -> Any:
        """Settle a key of training.config: the manifest's value, or this one for "auto"."""
        asked = getattr(self.config, key)
        if asked != "auto":
            return self.settle(path, asked, SET, "manifest", key)
        return self.settle(path, value, because, source)

    def settle_from_config(self, path: str, key: str, value: object = ...) -> None:
        """Settle a key of training.config that leaves no choice."""
        is_set = key in self.config.model_fields_set
        settled = getattr(self.config, key) if value is ... else value
        because = SET if is_set else "the default"
        self.settle(path, settled, because, "manifest" if is_set else "preset", key)

    def unknown(self, reason: str, *paths: str) -> None:
        """Record that values are unknown, and why."""
        for path in paths:
            self.settle(path, None, f"unknown: {reason}")

    def __getitem__(self, path: str) -> Any:
        """A value that is already settled."""
        return self.decisions[path].value

    def warn(self, path: str, text: str) -> None:
        self.remarks.append(Remark(kind="warning", path=path, text=text))

    def supersede(self, path: str, text: str) -> None:
        self.remarks.append(Remark(kind="superseded", path=path, text=text))

    def advise(self, path: str, text: str) -> None:
        self.remarks.append(Remark(kind="advice", path=path, text=text))

    # --- the manifest ------------------------------------------------------------------------

    @property
    def config(self) -> TrainingConfig:
        return self.manifest.training.config

    @property
    def dataset(self) -> DatasetSpec:
        return self.manifest.training.dataset

    @property
    def is_char_model(self) -> bool:
        return self.model.name == CHAR_GPT

    @property
    def has_validation_file(self) -> bool:
        tasks = (self.dataset.tasks or {}).values()
        return bool(self.dataset.validation_path) or any(task.valid for task in tasks)

    @property
    def has_validation_rows(self) -> bool:
        splits = self.dataset.validation_split > 0 and not self.dataset.streaming
        return self.has_validation_file or splits

    @property
    def evaluates(self) -> bool:
        """Whether any rows are evaluated, while training or at its end."""
        tests = (task.test for task in (self.dataset.tasks or {}).values())
        return self.has_validation_rows or bool(self.dataset.test_path) or any(tests)

    @property
    def keeps_every_checkpoint(self) -> bool:
        """True if one is saved every few epochs and no limit is set: the user wants them all."""
        asked = self.config.model_fields_set
        every = "save_every_epochs" in asked and self.config.save_every_epochs > 1
        return every and "save_total_limit" not in asked

    @property
    def soft_tokens(self) -> int:
        return sum(prompt.tokens for prompt in self.manifest.soft_prompts)

    @property
    def packed(self) -> bool:
        return bool(self["data.packing"] != "none")

    @property
    def packed_rows(self) -> PackedRows | None:
        """What the rows were packed into; None if they are not prepared yet, or never packed."""
        return self.survey.packed if self.packed else None

    @property
    def overlong(self) -> tuple[Literal["cut", "split", "drop"], str, Source]:
        """What happens to overlong rows, why, and the source of that choice."""
        asked = self.config.overlong
        if asked != "auto":
            return asked, SET, "manifest"
        if self.config.method in PREFERENCES:
            return "drop", "an answer that is cut is another answer", "preset"
        if self.is_char_model:
            return "split", "a corpus is cut into blocks", "preset"
        if self.config.tokenize == "late":
            return "cut", "row lengths are unknown with tokenize: late", "preset"
        if self.plain_text is None:
            return "cut", "the kind of rows is not known yet", "preset"
        if self.plain_text:
            return "split", "plain text: every part is trained on", "preset"
        return "cut", "rows with answers: a part without its prompt has another meaning", "preset"

    def parts_per_row(self, length: int) -> int:
        """Into how many parts a row is split on average."""
        splits = self.overlong[0] == "split" or self.config.packing == "concat"
        mean = self.survey.mean_tokens
        return math.ceil(mean / length) if splits and mean and not self.is_char_model else 1

    def mean_document(self, length: float) -> float:
        """Mean tokens of a document in sequences of this length."""
        return min(self.survey.mean_tokens or length, length)

    # --- the card ----------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        return self.target.device == "cuda"

    @property
    def card_label(self) -> str:
        """`NVIDIA T4 (7.5)`, for use in reasons."""
        capability = self.target.capability
        if capability is None:
            return self.target.name
        return f"{self.target.name} ({capability[0]}.{capability[1]})"

    def has_capability(self, least: tuple[int, int]) -> bool:
        """True on a card of at least this capability, and on an unnamed card."""
        return self.on_gpu and (self.target.capability is None or self.target.capability >= least)
