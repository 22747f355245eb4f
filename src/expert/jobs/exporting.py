"""The job behind `expert export`: an adapter or a whole model to take away, checked."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.core.errors import ExpertError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expert.core.rundir import RunFolder
    from expert.jobs.trained import Choice, Trained
    from expert.model.export_check import Difference
    from expert.planning.run_plan import RunPlan

Kind = Literal["adapter", "merged", "model"]


class CannotExport(ExpertError):
    """An export that makes no sense, or that would not say what the trained model says."""


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
    """What is to be said of its validation; "" where it passed the gate or was not validated."""

    def warnings(self) -> list[str]:
        """What is right and yet worth to know."""
        found = [self.validation] if self.validation else []
        if self.adapter_effect is not None and self.share > 0.5 * self.adapter_effect:
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
    from expert.core.publish import publishing
    from expert.jobs.comparing import CHECKED_TEXTS
    from expert.jobs.trained import choose, pick_device, read_plan
    from expert.jobs.watching import find_run
    from expert.model.load import without_progress_bar

    folder = find_run(run)
    plan = read_plan(folder)
    settled = settle_kind(plan, kind, dtype)
    _refuse_taken(to)
    choice = choose(folder, checkpoint or plan.watch.packaging_checkpoint)
    said = gate_remark(folder, choice, allow_failed=allow_failed)
    work = _Export(folder, plan, choice, settled, dtype or plan.kernels.precision)
    work.device = pick_device(device)
    tell(f"loading {plan.model.name} and {choice.name} of {folder.path}")
    work.load()
    with publishing(to) as temporary, without_progress_bar():
        tell("writing")
        work.write(temporary, to)
        tell(f"comparing logits on {len(CHECKED_TEXTS)} texts")
        found = work.check(temporary)
        done = replace(work.report(to, temporary, found), validation=said)
        work.write_card(temporary, done)
    return done


def gate_remark(folder: RunFolder, choice: Choice, *, allow_failed: bool) -> str:
    """What the run's validation makes worth saying; CannotExport where its gate was not passed."""
    if not folder.validation.is_file():
        return ""
    try:
        found = json.loads(folder.validation.read_text(encoding="utf-8"))
        passed, judged = found["gate"]["passed"] is True, str(found.get("checkpoint") or "")
        reasons = "; ".join(map(str, found["gate"].get("reasons") or ())) or "no reason is given"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        passed, judged, reasons = False, "", "the file cannot be read"
    if not passed:
        said = f"{folder.validation}: the gate is not passed: {reasons}"
        if not allow_failed:
            raise CannotExport(
                f"{said}  (train further, judge another state with expert validate --checkpoint, "
                "or export it all the same with --allow-failed)"
            )
        return said
    if judged and judged != choice.name:
        return (
            f"the gate was passed by {judged}, and {choice.name} is exported  (judge it with "
            f"expert validate --expert {folder.path})"
        )
    return ""


def settle_kind(plan: RunPlan, asked: str | None, dtype: str | None) -> Kind:
    """What the export will be; what the run cannot give is refused."""
    from expert.manifest.schema import CHAR_GPT

    if plan.adapter.type == "full":
        if asked is not None:
            flag = f"--{asked}"
            raise CannotExport(
                f"{flag}: the model was trained whole, it has no adapter  (leave {flag} out)"
            )
        if dtype is not None and plan.model.name == CHAR_GPT:
            raise CannotExport(
                "--dtype: the character model is float32, as it was trained  (leave --dtype out)"
            )
        return "model"
    if asked == "merged":
        if plan.adapter.type == "none":
            raise CannotExport(
                "--merged: soft prompts cannot be merged into weights  (export them with --adapter)"
            )
        return "merged"
    if dtype is not None:
        raise CannotExport(
            "--dtype: an adapter is exported as it was trained  (use --dtype with --merged)"
        )
    return "adapter"


def _refuse_taken(to: Path) -> None:
    """Nothing is overwritten; an empty folder is as good as none."""
    if to.is_dir() and not any(to.iterdir()):
        to.rmdir()
    elif to.exists() or to.is_symlink():
        raise CannotExport(f"{to}: is there already  (name a new folder: nothing is overwritten)")


class _Export:
    """One export while it lasts: first the trained model is loaded and asked, then let go."""

    device: torch.device

    def __init__(
        self, folder: RunFolder, plan: RunPlan, choice: Choice, kind: Kind, dtype: str
    ) -> None:
        self.folder, self.plan, self.choice = folder, plan, choice
        self.kind, self.dtype = kind, dtype
        self.ids: list[list[int]] = []
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
        if self.kind == "merged":
            with self.trained.loaded.module.disable_adapter():  # type: ignore[operator]
                self.adapter_effect = compare(self.expected, self._logits()).share

    def _load(self, *, quantised: bool) -> None:
        import torch

        from expert.jobs.comparing import checked_ids
        from expert.jobs.trained import load_trained

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

    def _let_go(self) -> None:
        import torch

        self._trained = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _logits(self) -> list[Tensor]:
        from expert.jobs.comparing import logits_of_trained

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
        else:
            model: Any = trained.loaded.module
            if self.kind == "merged":
                model = model.merge_and_unload()
            model = model.to(DTYPES[self.dtype])
            model.config.dtype = DTYPES[self.dtype]
            model.generation_config = self._generation()
            model.save_pretrained(target)
            self._write_soft_prompts(target, base=str(to.resolve()))
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
        from expert.jobs.sampling import end_tokens, generation_config, settle_decoding

        how, _ = settle_decoding(self.plan, {})
        assert self.trained.template is not None
        ends = end_tokens(self.trained.encoder, self.trained.template)
        return generation_config(how, ends)

    def check(self, target: Path) -> Difference:
        """Load what was written as a stranger would, and hold its logits to the trained ones."""
        from expert.jobs.comparing import character_stranger
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
                f"spread, where {self.tolerance:.1%} are let pass; nothing was written  (try "
                "--dtype fp32, or export the adapter)"
            )
        return difference

    @property
    def tolerance(self) -> float:
        """The coarser of what was trained in and what is written; more where the adapter moves the
        logits by more than four spreads: float16 was off by 3.6 % where it moved them by eight."""
        from expert.model.export_check import TOLERANCE

        own = self.dtype if self.kind == "merged" else self.plan.kernels.precision
        more = max(1.0, (self.adapter_effect or 0.0) / 4)
        return max(TOLERANCE[own], TOLERANCE[self.dtype]) * more

    def _row(self, ids: list[int]) -> Tensor:
        import torch

        return torch.tensor([ids], device=self.device)

    def _stranger_logits(self, target: Path, prompt_names: tuple[str, ...]) -> list[Tensor]:
        import torch

        from expert.jobs.comparing import as_a_stranger
        from expert.jobs.trained import soft_prompt_rows
        from expert.model.export_check import logits_of

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
        from expert.jobs.model_card import model_card

        events = list(read_events(self.folder.events)) if self.folder.events.is_file() else []
        environment: dict[str, Any] = {}
        if self.folder.environment.is_file():
            environment = json.loads(self.folder.environment.read_text(encoding="utf-8"))
        text = model_card(self.plan, events, environment, done)
        (target / "README.md").write_text(text, encoding="utf-8")
