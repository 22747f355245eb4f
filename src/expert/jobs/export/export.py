"""The job behind `expert export`: an adapter or a whole model to take away, checked."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.jobs.export.checks import (
    CannotExport,
    Kind,
    gate_remark,
    naming,
    refuse_place,
    settle_kind,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expert.core.rundir import RunFolder
    from expert.jobs.export.card_snippet import Asking
    from expert.model.export_check import Difference
    from expert.planning.run_plan import RunPlan
    from expert.run.stored.choose_checkpoint import Choice
    from expert.run.stored.load import Trained

UNHARMED_SPREADS = 4
"""How far an adapter may move the logits before its rounding is let pass more, in their spreads."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how far it lies from what was trained."""

    run: Path
    folder: Path
    kind: Kind
    checkpoint: str
    dtype: str
    bytes: int
    texts: int
    """Texts on which the logits were compared."""
    largest_difference: float
    """Of the logits of the export and of the trained model."""
    share: float
    """The same, as a share of the logits' spread."""
    tolerance: float
    """The largest share that is let pass."""
    adapter_effect: float | None
    """How far the adapter itself moves the logits, as a share of their spread."""
    quantised_share: float | None
    """How far the base as it was quantised in training lies from the full one, as a share."""
    validation: str = ""
    """What is to be said of its validation; "" where it passed the gate or never was validated."""
    judged: str = ""
    """What the validation found, in words; "" where there was none."""
    base: str = ""
    """What is to be said of its base; "" where it is known to be the one that was trained upon."""

    def warnings(self) -> list[str]:
        """What is right and yet worth to know."""
        found = [said for said in (self.validation, self.base) if said]
        lost = self.adapter_effect is not None and self.share > 0.5 * self.adapter_effect
        if lost and self.kind == "merged":
            found.append(
                f"rounding to {self.dtype} moves the logits by {self.share:.1%} of their spread, "
                f"the adapter by {self.adapter_effect:.1%}  (merge with --dtype fp32, or export "
                "the adapter)"
            )
        if self.quantised_share is not None:
            found.append(
                "the base was quantised in training and is not in the export: its logits differ "
                f"by up to {self.quantised_share:.1%} of their spread"
            )
        return found


def export(
    run: Path | None,
    to: Path,
    *,
    kind: Literal["adapter", "merged"] | None = None,
    dtype: str | None = None,
    checkpoint: str | None = None,
    device: str = "auto",
    allow_failed: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> Exported:
    """Write what a run has learnt to a new folder, whole or not at all.

    A run that was validated and did not pass the gate is refused, unless `allow_failed`.
    """
    from expert.run.stored.choose_checkpoint import choose
    from expert.run.stored.load import base_remark, read_plan
    from expert.run.stored.locate import find_run

    # All that may be refused is asked before torch is imported, which takes seconds.
    folder = find_run(run)
    plan = read_plan(folder)
    settled = settle_kind(plan, kind, dtype)
    refuse_place(to)
    choice = choose(folder, checkpoint or plan.watch.packaging_checkpoint)
    remarks = gate_remark(folder, choice, allow_failed=allow_failed), base_remark(folder, plan)
    work = _Export(folder, plan, choice, settled, dtype or plan.kernels.precision)
    return _carry_out(work, to, remarks, device=device, tell=tell)


def _carry_out(
    work: _Export,
    to: Path,
    remarks: tuple[str, str],
    *,
    device: str,
    tell: Callable[[str], None],
) -> Exported:
    """Load, write and compare; `remarks` are on its validation and on its base."""
    from expert.core.publish import publishing
    from expert.jobs.export.comparison import CHECKED_TEXTS
    from expert.jobs.validate.standing_verdict import read_verdict
    from expert.model.load import without_progress_bar
    from expert.run.stored.load import pick_device

    work.device = pick_device(device)
    tell(f"loading {work.plan.model.name} and {work.choice.name} of {work.folder.path}")
    work.load()
    if to.is_dir():
        to.rmdir()  # it is empty
    with naming(to), publishing(to) as temporary, without_progress_bar():
        tell("writing")
        work.write(temporary, to)
        tell(f"comparing logits on {len(CHECKED_TEXTS)} texts")
        found = work.check(temporary)
        validation, base = remarks
        done = replace(work.report(to, temporary, found), validation=validation, base=base)
        verdict = read_verdict(work.folder)
        if verdict is not None and not verdict.outdated:
            done = replace(done, judged=verdict.in_words())
        work.write_card(temporary, done)
    return done


class _Export:
    """One export while it lasts: first the trained model is loaded and asked, then let go."""

    device: torch.device

    def __init__(
        self, folder: RunFolder, plan: RunPlan, choice: Choice, kind: Kind, dtype: str
    ) -> None:
        self.folder, self.plan, self.choice = folder, plan, choice
        self.kind, self.dtype = kind, dtype
        self.ids: list[list[int]] = []
        self.asking: Asking | None = None
        self.expected: list[Tensor] = []
        self.adapter_effect: float | None = None
        self.quantised_share: float | None = None
        self._trained: Trained | None = None

    @property
    def trained(self) -> Trained:
        assert self._trained is not None, "it was let go"
        return self._trained

    def load(self) -> None:
        """Load the trained model and keep what it says to the texts."""
        from expert.model.adapters import ADAPTERS
        from expert.model.export_check import compare
        from expert.model.quantised import QUANTISED

        quantised: list[Tensor] = []
        if self.kind == "merged" and self.plan.model.quantization in QUANTISED:
            self._load(quantised=True)
            quantised = self._logits()
        self._load(quantised=self.kind != "merged")
        self.expected = self._logits()
        if quantised:
            self.quantised_share = compare(self.expected, quantised).share
        if self.trained.loaded.adapter.type in ADAPTERS:
            with self.trained.loaded.module.disable_adapter():  # type: ignore[operator]
                self.adapter_effect = compare(self.expected, self._logits()).share

    def _load(self, *, quantised: bool) -> None:
        import torch

        from expert.jobs.export.comparison import asked_as, checked_ids
        from expert.run.stored.load import load_trained

        self._let_go()
        self._trained = load_trained(
            self.folder,
            self.plan,
            self.choice,
            device=self.device,
            quantised=quantised,
            precision=self.dtype if self.kind == "merged" else None,
            # The sum of a weight and the adapter's part is rounded once.
            adapter_dtype=torch.float32 if self.kind == "merged" else None,
        )
        if not self.ids:
            self.ids = checked_ids(self.trained)
            self.asking = asked_as(self.trained)

    def _let_go(self) -> None:
        import torch

        self._trained = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _logits(self) -> list[Tensor]:
        from expert.jobs.export.comparison import logits_of_trained

        return logits_of_trained(self.trained, self.ids)

    def write(self, target: Path, to: Path) -> None:
        """Weights, tokenizer and generation config; `to` is the place the folder will have."""
        from expert.model.load import DTYPES
        from expert.model.tokens import copy_tokenizer

        trained = self.trained
        if trained.template is None:
            trained.loaded.save(target)
            return
        if self.kind == "adapter":
            self._write_adapter(target)
            self._name_base(target)
        else:
            model: Any = trained.loaded.module
            if self.kind == "merged":
                model = model.merge_and_unload()
            model = model.to(DTYPES[self.dtype])
            model.config.dtype = DTYPES[self.dtype]
            model.generation_config = self._generation()
            model.save_pretrained(target)
            self._write_soft_prompts(target, base=to.name)
        assert trained.tokenizer_folder is not None
        copy_tokenizer(trained.tokenizer_folder, target)
        self._generation().save_pretrained(target)

    def _write_adapter(self, target: Path) -> None:
        if not self.choice.is_final:
            self.trained.loaded.save(target)
            return
        from expert.core.publish import damage

        fault = damage(self.choice.path)  # a link, a stranger's file or other bytes
        if fault:
            raise CannotExport(
                f"{self.choice.path}: it is not as the run left it: {fault}  (take a checkpoint "
                "with --checkpoint)"
            )
        for path in sorted(self.choice.path.rglob("*")):
            name = path.relative_to(self.choice.path)
            if path.is_file() and name.name not in ("DONE", "README.md"):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / name, follow_symlinks=False)

    def _name_base(self, target: Path) -> None:
        """The base by the name that others know: PEFT writes the folder it lay in on this machine.
        One that is on no hub, and comes with Expert, lies beside its adapter."""
        from expert.jobs.export.portable_base import copy_base, portable_base

        for file in target.rglob("adapter_config.json"):
            settings = json.loads(file.read_text(encoding="utf-8"))
            settings["base_model_name_or_path"] = portable_base(self.plan.model, needed=False).name
            text = json.dumps(settings, indent=2, sort_keys=True)
            file.write_text(text + "\n", encoding="utf-8")
        copy_base(self.plan.model, target)

    def _write_soft_prompts(self, target: Path, *, base: str) -> None:
        """The prompts beside the weights they were learnt with, which are those of the export."""
        from expert.model.soft_prompts import save_soft_prompt

        loaded = self.trained.loaded
        if loaded.soft_prompts is None:
            return
        for name, prompt in zip(
            loaded.soft_prompts.names, loaded.soft_prompts.prompts, strict=True
        ):
            place = target / "soft_prompts" / name
            config = loaded.decoder.config
            save_soft_prompt(prompt, place, base=base, config=config)

    def _generation(self) -> Any:
        """The manifest's decoding, as transformers' generate reads it."""
        from expert.jobs.sample.sample import end_tokens, generation_config, settle_decoding

        how, _ = settle_decoding(self.plan, {})
        assert self.trained.template is not None
        ends = end_tokens(self.trained.encoder, self.trained.template)
        return generation_config(how, ends)

    def check(self, target: Path) -> Difference:
        """Load what was written as a stranger would, and hold its logits to the trained ones."""
        from expert.jobs.export.comparison import character_stranger
        from expert.model.export_check import compare

        names = self.trained.loaded.soft_prompts
        prompt_names = names.names if names is not None else ()
        characters = self.trained.template is None
        self._let_go()
        if characters:
            model = character_stranger(target, self.device)
            found = [model(self._row(ids))[0].float().cpu() for ids in self.ids]
        else:
            found = self._stranger_logits(target, prompt_names)
        difference = compare(self.expected, found)
        if not difference.share <= self.tolerance:
            raise CannotExport(
                f"{self.folder.path}: the export does not say what the trained model says: its "
                f"logits differ by up to {difference.largest:.3g}, {difference.share:.1%} of their "
                f"spread (tolerance {self.tolerance:.1%}); nothing was written  "
                f"({self._instead})"
            )
        return difference

    @property
    def _instead(self) -> str:
        if self.kind == "adapter":
            return "try --merged --dtype fp32"
        return "try --dtype fp32, or export the adapter"

    @property
    def tolerance(self) -> float:
        """The coarser of what was trained in and what is written; in proportion more where an
        adapter moves the logits by more than four spreads, since what is rounded is larger: float16
        was off by 3.6 % where it moved them by eight, bfloat16 in 32 layers by 26 % at 6.6."""
        from expert.model.export_check import TOLERANCE

        own = self.dtype if self.kind == "merged" else self.plan.kernels.precision
        more = max(1.0, (self.adapter_effect or 0.0) / UNHARMED_SPREADS)
        return max(TOLERANCE[own], TOLERANCE[self.dtype]) * more

    def _row(self, ids: list[int]) -> Tensor:
        import torch

        return torch.tensor([ids], device=self.device)

    def _stranger_logits(self, target: Path, prompt_names: tuple[str, ...]) -> list[Tensor]:
        import torch

        from expert.jobs.export.comparison import as_a_stranger
        from expert.model.export_check import logits_of
        from expert.run.stored.load import soft_prompt_rows

        adapter = self.kind == "adapter"
        model = as_a_stranger(
            target, self.plan, adapter=adapter, dtype=self.dtype, device=self.device
        )
        rows = torch.cat(soft_prompt_rows(target, prompt_names)) if prompt_names else None
        return [logits_of(model, ids, rows) for ids in self.ids]

    def report(self, to: Path, written: Path, found: Difference) -> Exported:
        return Exported(
            run=self.folder.path,
            folder=to,
            kind=self.kind,
            checkpoint=self.choice.name,
            dtype=self.dtype,
            bytes=sum(path.stat().st_size for path in written.rglob("*") if path.is_file()),
            texts=len(self.ids),
            largest_difference=found.largest,
            share=found.share,
            tolerance=self.tolerance,
            adapter_effect=self.adapter_effect,
            quantised_share=self.quantised_share,
        )

    def write_card(self, target: Path, done: Exported) -> None:
        from expert.core.events import read_events
        from expert.jobs.export.model_card import Known, model_card
        from expert.jobs.validate.standing_verdict import read_verdict

        events = list(read_events(self.folder.events)) if self.folder.events.is_file() else []
        environment: dict[str, Any] = {}
        if self.folder.environment.is_file():
            environment = json.loads(self.folder.environment.read_text(encoding="utf-8"))
        manifest: dict[str, Any] = {}
        if self.folder.manifest.is_file():
            manifest = json.loads(self.folder.manifest.read_text(encoding="utf-8"))
        known = Known(events, environment, manifest, read_verdict(self.folder), self.asking)
        text = model_card(self.plan, done, known)
        (target / "README.md").write_text(text, encoding="utf-8")
