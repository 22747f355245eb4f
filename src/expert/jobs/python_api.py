"""The Python API: `expert.train` on rows or a manifest, and what its result can do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.core.errors import ExpertError
from expert.core.secrets import redacted
from expert.insight.event_text import GAP, Event, lines_of, number, step_parts, whole
from expert.run.session.result import RunResult

if TYPE_CHECKING:
    from expert.core.events import Sink
    from expert.jobs.sample.sample import LoadedExpert
    from expert.jobs.validate.validation import Validation
    from expert.manifest.reader import ReadManifest

ROWS_FOLDER = Path("runs/rows")
"""Below the working directory: rows given from memory, each set of rows once."""


@dataclass(frozen=True, kw_only=True)
class TrainedExpert(RunResult):
    """A run that ended, and its expert; the model is loaded on first use and kept."""

    @cached_property
    def _loaded(self) -> LoadedExpert:
        from expert.jobs.sample.sample import load_expert

        return load_expert(self.folder)

    def sample(
        self, prompt: str, *, system: str = "", seed: int | None = None, **decoding: Any
    ) -> str:
        """The answer to a prompt. `decoding`: temperature, top_p, top_k, max_new_tokens and so
        on; without them the manifest's."""
        from expert.answer.decoding import resolve_decoding
        from expert.core.rundir import RunFolder
        from expert.jobs.sample.sample import Conversation
        from expert.run.stored.load import read_plan

        loaded = self._loaded
        settings, _ = resolve_decoding(read_plan(RunFolder(self.folder)), decoding)
        loaded = replace(loaded, decoding=settings, seed=loaded.seed if seed is None else seed)
        return Conversation(loaded, system=system).ask(prompt).text

    def validate(self, **how: Any) -> Validation:
        """Judge it, as `expert.validate` does."""
        from expert.jobs.validate.validate import validate

        return validate(self.folder, **how)

    def export(self, to: str | Path, **how: Any) -> Path:
        """Write its weights to a new folder, as `expert.export` does."""
        return export(self.folder, to, **how)


def train(
    what: Any,
    *,
    model: str | None = None,
    name: str = "notebook",
    overrides: tuple[str, ...] = (),
    vram: str | None = None,
    resume: str | None = None,
    allow_changed: bool = False,
    allow_remote_code: bool = False,
    sinks: Sequence[Sink] = (),
    show: bool = True,
    **settings: Any,
) -> TrainedExpert:
    """Train on rows, or what a manifest describes.

    `what`: a list of dicts, a pandas DataFrame or a Hugging Face Dataset, trained on with `model`
    as the base and `name` as the expert's name; or a manifest, where `model` chooses one of its
    base models. `settings`: keys of training.config, such as learning_rate or epochs. `show`:
    print the progress. `resume`: "auto", a checkpoint or a folder that means a run.
    """
    from expert.jobs.train import train as train_job
    from expert.manifest.reader import ReadManifest

    if isinstance(what, str | Path):
        given = (f"training.config.{key}={_json(value)}" for key, value in settings.items())
        overrides = (*given, *overrides)
    elif isinstance(what, ReadManifest):
        if settings:
            names = ", ".join(settings)
            raise ExpertError(f"{names}: the manifest is already read  (give its file)")
    else:
        what, model, overrides = _manifest_of(what, model, name, settings, overrides), None, ()
    result = train_job(
        what,
        model=model,
        overrides=overrides,
        vram=vram,
        resume=resume,
        allow_changed=allow_changed,
        allow_remote_code=allow_remote_code,
        sinks=(*sinks, *([_Printed()] if show else [])),
    )
    return TrainedExpert(**vars(result))


def _manifest_of(
    rows: Any, model: str | None, name: str, settings: dict[str, Any], overrides: Sequence[str]
) -> ReadManifest:
    """The manifest for rows from memory, which are stored where later commands find them."""
    from expert.core.files import write_text_atomically
    from expert.manifest.reader import interpret_document
    from expert.manifest.text.document import parse_document

    if model is None:
        raise ExpertError('model: which base model is trained?  (such as model="Qwen/Qwen3-0.6B")')
    text = _lines(rows)
    file = ROWS_FOLDER / f"{sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, text)
    manifest = {
        "name": name,
        "base_model": {"name": model},
        "training": {"dataset": {"path": str(file)}, "config": settings},
    }
    document = parse_document(_json(manifest), "json", source="expert.train")
    return interpret_document(document, overrides=overrides)


def _lines(rows: Any) -> str:
    """Rows as JSON lines."""
    if hasattr(rows, "to_json") and hasattr(rows, "columns"):  # pandas knows its own numbers
        return str(rows.to_json(orient="records", lines=True, force_ascii=False))
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        splits = f", such as rows[{next(iter(rows))!r}]" if isinstance(rows, Mapping) else ""
        kind = type(rows).__name__
        raise ExpertError(f"rows: got {kind}, expected a list of dicts or a table{splits}")
    return "".join(f"{_json(row)}\n" for row in rows)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


class _Printed:
    """Prints the events of a run; in a terminal or a notebook, steps replace one another."""

    def __init__(self) -> None:
        self._started: Event = {}
        self._replaces = sys.stdout.isatty() or "ipykernel" in sys.modules
        self._line_open = False

    def __call__(self, event: Event) -> None:
        if event.get("event") == "started":
            self._started = dict(event)
        epochs = number(self._started, "epochs")
        if event.get("event") == "step":
            parts = step_parts(event, total=whole(self._started, "total_steps"), epochs=epochs)
            line = GAP.join(["step", *parts.values()])
            sys.stdout.write(f"\r{line:<100}" if self._replaces else f"{line}\n")
            sys.stdout.flush()
            self._line_open = self._replaces
        elif lines := lines_of({"epochs": epochs, **event}):
            text = redacted("\n".join(line for line, _ in lines))
            sys.stdout.write("\n" * self._line_open + text + "\n")
            self._line_open = False


def sample(
    run: str | Path,
    prompt: str,
    *,
    system: str = "",
    plain: bool | None = None,
    checkpoint: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    **decoding: Any,
) -> str:
    """The answer of a trained expert. `run`: its run folder, a folder of runs, or its own.

    `decoding` overrides the manifest's settings: temperature, top_p, top_k, max_new_tokens and so
    on; the same `seed` gives the same text. `plain` continues the prompt verbatim. Every call loads
    the model: for several prompts use `expert.jobs.sample.sample.sample`.
    """
    from expert.jobs.sample.sample import sample as sample_job

    how: dict[str, Any] = {"plain": plain, "checkpoint": checkpoint, "seed": seed}
    found = sample_job(Path(run), [prompt], system=system, device=device, decoding=decoding, **how)
    return found.samples[0].text


def export(
    run: str | Path,
    to: str | Path,
    *,
    kind: Literal["adapter", "merged"] | None = None,
    gguf: str | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    checkpoint: str | None = None,
    device: str = "auto",
    allow_failed: bool = False,
) -> Path:
    """Write the trained weights to the new folder `to`, as `expert export` does, and return its
    path. `gguf`: the type of a GGUF file, such as q8_0."""
    from expert.jobs.export.export import export as export_job
    from expert.run.stored.locate import find_trained

    done = export_job(
        find_trained(Path(run), "validated").path,
        Path(to),
        kind=kind,
        gguf=gguf,
        dtype=dtype,
        checkpoint=checkpoint,
        device=device,
        allow_failed=allow_failed,
    )
    return done.folder
