"""The job behind `expert export`: writes an adapter or a whole model, and checks it."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from expert import __version__
from expert.answer.decoding import (
    DecodingSettings,
    end_tokens,
    generation_config,
    resolve_decoding,
)
from expert.core.errors import ExpertError
from expert.core.events import read_events
from expert.core.publish import publishing, weights_hash
from expert.core.resources import disk_full_error, disk_full_message, reporting_disk_full
from expert.core.rundir import RunFolder
from expert.core.secrets import redacted
from expert.core.stored_json import read_object, read_object_or_empty
from expert.core.text import shell_quoted
from expert.jobs.export.as_gguf import (
    save_adapter,
    settle_gguf,
    write_gguf_adapter,
    write_gguf_model,
)
from expert.jobs.export.card import model_card, prompt_format_of
from expert.jobs.export.chat_format import jinja_of
from expert.jobs.export.comparison import (
    CHECKED_TEXTS,
    LARGEST,
    TOLERANCE,
    Expected,
    Written,
    checked_ids,
    compare,
    load_exported,
    logits_of,
    logits_of_trained,
)
from expert.jobs.export.exported import ROWS, Exported, ExportRequest, Kind
from expert.jobs.export.gguf_file.file import UNQUANTISED
from expert.jobs.export.portable_base import copy_base, hub_reference, portable_base
from expert.jobs.export.push import EXPORT_RECORD
from expert.jobs.validate.saved_verdict import SavedVerdict, read_verdict
from expert.manifest.schema.kinds import ADAPTERS, QUANTISED, is_jinja
from expert.manifest.schema.manifest import CHAR_GPT
from expert.model.base_folder import copy_tokenizer, inside_of, model_folder
from expert.model.device_memory import release_memory
from expert.planning.run_plan import RunPlan
from expert.run.stored.choose_checkpoint import Choice, choose
from expert.run.stored.load import (
    Trained,
    base_warning,
    load_trained,
    loading,
    manifest_of_run,
    pick_device,
    read_plan,
    soft_prompt_rows,
    weights_trained_on,
)
from expert.run.stored.locate import find_run

CHAT_TEMPLATE = "chat_template.jinja"


def export(
    run: Path | None,
    to: Path,
    *,
    kind: Literal["adapter", "merged"] | None = None,
    gguf: str | None = None,
    gguf_adapter: bool = False,
    judged_rows: int = ROWS,
    dtype: str | None = None,
    checkpoint: str | None = None,
    device: str = "auto",
    allow_failed: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> Exported:
    """Write the trained model of a run to a new folder, completely or not at all.

    `gguf`: as a GGUF file of this type, judged on at most `judged_rows` held-out rows;
    `gguf_adapter`: the adapter alone as GGUF. Runs that failed the quality gate are refused unless
    `allow_failed`.
    """
    # All checks of the request come before importing torch, which takes seconds.
    folder = find_run(run)
    plan = read_plan(folder)
    as_gguf = gguf is not None or gguf_adapter
    if as_gguf:
        settled = settle_gguf(plan, gguf, adapter=gguf_adapter, dtype=dtype)
    else:
        settled = settle_kind(plan, kind, dtype)
    check_target_folder(to)
    choice = choose(folder, checkpoint or plan.watch.packaging_checkpoint)
    warnings = gate_warning(folder, choice, allow_failed=allow_failed), base_warning(folder, plan)
    source = ExportRequest(
        folder=folder,
        plan=plan,
        choice=choice,
        kind=settled,
        dtype="fp32" if as_gguf else dtype or plan.kernels.precision,
        device=pick_device(device),
        to=to,
        gguf="lora" if gguf_adapter else gguf or "",
        judged_rows=judged_rows,
        warnings=warnings,
    )
    from expert.model.load import without_progress_bar

    tell(f"loading {plan.model.name} and {choice.name} of {folder.path}")
    trained, expected = _load(source)
    if to.is_dir():
        to.rmdir()  # it is empty
    with (
        reporting_disk_full(to, "the export", None),
        publishing(to) as temporary,
        without_progress_bar(),
    ):
        if gguf_adapter:
            written = write_gguf_adapter(source, expected, trained, temporary)
        elif source.gguf:
            written = write_gguf_model(source, expected, trained, temporary, tell)
        else:
            tell("writing")
            _write(source, trained, temporary)
            del trained
            release_memory(source.device)
            tell(f"comparing logits on {len(CHECKED_TEXTS)} texts")
            written = _read_back(source, expected, temporary)
        return _described(source, expected, written, temporary)


# --- checks before anything is loaded: the quality gate, the options, the target folder ----------


def export_refusal(found: SavedVerdict) -> str:
    """Why a verdict forbids to export; "" if it does not."""
    if found.passed is False:
        return f"the quality gate failed: {found.reasons}"
    if found.undecided:
        return f"not enough to tell whether the quality gate passes: {found.reasons}"
    return ""


def gate_warning(folder: RunFolder, choice: Choice, *, allow_failed: bool) -> str:
    """A warning about the run's validation, or ""; ExpertError if its gate failed, or
    there was not enough to tell. A verdict on earlier weights only gives a warning."""
    found, file, run = read_verdict(folder), folder.validation, shell_quoted(folder.path)
    if found is None:
        return ""
    if found.outdated:
        return f"{file} {found.outdated}  (expert validate {run})"
    if refusal := export_refusal(found):
        if allow_failed:
            return f"{file}: {refusal}"
        fix = f"score more rows with expert validate {run} --test-set FILE, or lower --min-accuracy"
        if found.passed is False:
            fix = "train longer, validate another checkpoint with expert validate --checkpoint"
        raise ExpertError(f"{file}: {refusal}  ({fix}, or export it anyway with --allow-failed)")
    if found.checkpoint not in ("", choice.name):
        done = "passed the quality gate" if found.passed else "was validated"
        return f"{found.checkpoint} {done}, but {choice.name} is exported  (expert validate {run})"
    return ""


def settle_kind(plan: RunPlan, asked: str | None, dtype: str | None) -> Kind:
    """The kind of the export; ExpertError if the run has no such thing."""
    kinds, dtypes = ("adapter", "merged"), ("bf16", "fp16", "fp32")
    for name, value, known in (("kind", asked, kinds), ("dtype", dtype, dtypes)):
        if value is not None and value not in known:
            raise ExpertError(f"{name} {value!r}: is not known  (known: {', '.join(known)})")
    full, why = plan.adapter.type == "full", ""
    if full and asked is not None:
        why = f"--{asked}: all weights were trained, there is no adapter  (leave --{asked} out)"
    elif full and dtype is not None and plan.model.name == CHAR_GPT:
        why = "--dtype: the character model is float32, as it was trained  (leave --dtype out)"
    elif asked == "merged" and plan.adapter.type == "none":
        why = "--merged: soft prompts cannot be merged into weights  (export them with --adapter)"
    elif not full and asked != "merged" and dtype is not None:
        why = "--dtype: an adapter is exported as it was trained  (use --dtype with --merged)"
    if why:
        raise ExpertError(why)
    return "model" if full else "merged" if asked == "merged" else "adapter"


def check_target_folder(to: Path) -> None:
    """ExpertError unless the target is missing or an empty folder, and can be written."""
    if to.is_symlink():  # publishing would replace the link itself
        raise ExpertError(f"{to}: is a link to {to.readlink()}  (name that folder, or a new one)")
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise ExpertError(f"{to}: exists already  (name a new folder: nothing is overwritten)")
    # The finished export is renamed to `to`, replacing an empty folder.
    if to.resolve() == Path.cwd():
        what = "is the folder you are in, which cannot be replaced"
        raise ExpertError(f"{to}: {what}  (name a new folder in it)")
    above = next(place for place in to.absolute().parents if place.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=above):
            pass
    except OSError as error:
        if said := disk_full_message(error):
            raise disk_full_error(to, said) from error
        why = f"cannot be written: {error.strerror}"
        raise ExpertError(f"{to}: {why}  (fix that, or name another folder)") from error


# --- writing and checking ------------------------------------------------------------------------


def _read_back(source: ExportRequest, expected: Expected, target: Path) -> Written:
    """Load what was written as any user would, and compare its logits."""
    import torch

    names = tuple(prompt["name"] for prompt in source.plan.adapter.soft_prompts)
    with loading(source.choice.path):
        model = load_exported(target, source)
        rows = torch.cat(soft_prompt_rows(target, names)) if names else None
    logits = [logits_of(model, ids, rows) for ids in expected.ids]
    return Written(difference=compare(expected.logits, logits), notes=())


def _described(source: ExportRequest, expected: Expected, written: Written, into: Path) -> Exported:
    """The result, with its model card and record; ExpertError if it differs from the trained."""
    plan, folder, difference = source.plan, source.folder, written.difference
    # That of the coarser dtype of training and export; None for quantised GGUF files.
    loaded = source.dtype if source.kind == "merged" else plan.kernels.precision
    tolerance: float | None = max(TOLERANCE[loaded], TOLERANCE[source.dtype])
    if source.gguf:
        rounded = "fp32" if source.gguf == "lora" else UNQUANTISED.get(source.gguf)
        tolerance = TOLERANCE[rounded] if rounded is not None else None
    if not difference.within(float("inf") if tolerance is None else tolerance):
        fix = "--dtype fp32" if source.kind != "adapter" else "--merged --dtype fp32"
        off = "are not numbers"
        if tolerance is not None:
            one = f"{difference.largest_share:.0%} (tolerance {LARGEST * tolerance:.0%})"
            off = f"differ by {difference.share:.1%} of their spread (tolerance "
            off += f"{tolerance:.1%}), one of them by {one}"
        raise ExpertError(
            f"{folder.path}: the export differs from the trained model: its logits {off}; "
            f"nothing was written  (try {'--gguf f32' if source.gguf else fix})"
        )
    verdict = read_verdict(folder)
    done = Exported(
        run=folder.path,
        folder=source.to,
        kind=source.kind,
        checkpoint=source.choice.name,
        dtype=source.dtype,
        bytes=sum(path.stat().st_size for path in into.rglob("*") if path.is_file()),
        texts=len(expected.ids),
        largest_difference=difference.largest,
        share=difference.share,
        tolerance=tolerance,
        adapter_effect=expected.adapter_effect,
        unquantised=source.kind == "merged" and plan.model.quantization in QUANTISED,
        validation=source.warnings[0],
        base=source.warnings[1],
        judged=verdict.words if verdict is not None and not verdict.outdated else "",
        gguf=source.gguf,
        file=written.file,
        quality=written.quality,
        notes=written.notes,
    )
    card = model_card(
        plan,
        done,
        events=list(read_events(folder.events)),
        environment=read_object_or_empty(folder.environment),
        manifest=read_object_or_empty(folder.manifest),
        verdict=verdict,
        prompt=expected.prompt_format,
        of_images=source.kind == "adapter" and bool(inside_of(model_folder(plan.model))),
    )
    (into / "README.md").write_text(card, encoding="utf-8")
    _write_record(source, done, into, verdict)
    return done


def _write_record(
    source: ExportRequest, done: Exported, target: Path, verdict: SavedVerdict | None
) -> None:
    """Write the origin of an export, without any local path, for `--push` and `expert serve`."""
    plan = source.plan
    judged = verdict if verdict is not None and not verdict.outdated else None
    record: dict[str, Any] = {
        "expert": __version__,
        "run": source.folder.path.name,
        "checkpoint": done.checkpoint,
        "weights": weights_hash(source.choice.path),
        "kind": done.kind,
        "dtype": done.dtype,
        "gate": {
            "passed": judged.passed if judged is not None else None,
            "refused": export_refusal(judged) if judged is not None else "",
        },
        "name": plan.expert,
        "capabilities": manifest_of_run(source.folder).capabilities,
        "decoding": {
            key: plan.decoding[key]
            for key in DecodingSettings.__annotations__
            if key in plan.decoding
        },
    }
    if source.kind == "adapter":
        record["base"] = {
            "quantization": plan.model.quantization,
            "revision": hub_reference(plan.model)[1],
            "weights": weights_trained_on(source.folder),
        }
    if source.gguf:
        quality = asdict(done.quality) if done.quality is not None else None
        record |= {"file": done.file, "type": done.gguf, "quality": quality}
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (target / EXPORT_RECORD).write_text(redacted(text) + "\n", encoding="utf-8")


def _load(source: ExportRequest) -> tuple[Trained, Expected]:
    """The trained model, and its logits on the checked texts."""
    import torch

    from expert.model.load import DTYPES

    merged = source.kind == "merged" or bool(source.gguf)
    trained = load_trained(
        source.folder,
        source.plan,
        source.choice,
        device=source.device,
        quantised=not merged,
        precision=source.dtype if merged else None,
        # Merged in float32 and rounded once.
        adapter_dtype=torch.float32 if merged else None,
        fused=False,
    )
    if source.gguf and source.kind == "model":
        # As the run computed with them: whole weights are saved in float32, and rounding those of
        # SmolLM2 after 60 steps moved the logits by 18 % of their spread.
        rounded = DTYPES[source.plan.kernels.precision]
        for parameter in trained.loaded.module.parameters():
            parameter.data = parameter.data.to(rounded).to(parameter.dtype)
    ids = checked_ids(trained)
    logits, effect = logits_of_trained(trained, ids), None
    if trained.loaded.adapter.type in ADAPTERS:
        with trained.loaded.module.disable_adapter():  # type: ignore[operator]
            effect = compare(logits, logits_of_trained(trained, ids)).share
    return trained, Expected(
        ids=ids,
        prompt_format=prompt_format_of(trained),
        logits=logits,
        adapter_effect=effect,
    )


def _write(source: ExportRequest, trained: Trained, target: Path) -> None:
    """Write weights, tokenizer and generation config."""
    from expert.model.load import DTYPES
    from expert.model.saving import save_trained
    from expert.model.soft_prompts import save_soft_prompt

    if trained.template is None:
        save_trained(trained.loaded, target)
        return
    how, _ = resolve_decoding(source.plan, {})
    generation = generation_config(how, end_tokens(trained.encoder, trained.template))
    if source.kind == "adapter":
        save_adapter(source, trained, target)
        name = portable_base(source.plan.model).name
        for file in target.rglob("adapter_config.json"):  # PEFT wrote the local path of the base
            settings = {**read_object(file), "base_model_name_or_path": name}
            text = json.dumps(settings, indent=2, sort_keys=True)
            file.write_text(text + "\n", encoding="utf-8")
        if inside := inside_of(model_folder(source.plan.model)):
            name_for_whole_model(target, inside)
        copy_base(source.plan.model, target)
    else:
        model: Any = trained.loaded.module
        if source.kind == "merged":
            model = model.merge_and_unload()
        model = model.to(DTYPES[source.dtype])
        model.config.dtype = DTYPES[source.dtype]
        model.generation_config = generation
        model.save_pretrained(target)
        if (prompts := trained.loaded.soft_prompts) is not None:
            for name, prompt in zip(prompts.names, prompts.prompts, strict=True):
                place, config = target / "soft_prompts" / name, trained.loaded.decoder.config
                save_soft_prompt(prompt, place, base=source.to.name, config=config)
    assert trained.tokenizer_folder is not None
    copy_tokenizer(trained.tokenizer_folder, target)
    _write_chat_template(trained, target)
    generation.save_pretrained(target)


def name_for_whole_model(target: Path, inside: str) -> None:
    """Rename an adapter of a language model for the model that it was taken out of, which also
    reads images and may have layers of the same names there."""
    from safetensors.torch import load_file, save_file

    from expert.model.adapters import ADAPTER_FILE, IN_PEFT

    file, settings_file = target / ADAPTER_FILE, target / "adapter_config.json"
    if not file.is_file():
        return  # soft prompts alone
    tensors = load_file(file)
    named = {
        name.replace(f"{IN_PEFT}model.", f"{IN_PEFT}{inside}", 1): each
        for name, each in tensors.items()
    }
    save_file(named, file, metadata={"format": "pt"})
    settings = read_object(settings_file)
    for key in ("target_modules", "feedforward_modules"):
        if isinstance(settings.get(key), list):
            last = "|".join(re.escape(name) for name in settings[key])
            settings[key] = rf"model\.(?:language_model\.)?(?:layers\.(?:.*\.)?)?(?:{last})"
    settings_file.write_text(
        json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def _write_chat_template(trained: Trained, target: Path) -> None:
    """Write the chat template of the manifest, which the tokenizer's files do not have."""
    from expert.data.template.templates import NamedTemplate

    encoder: Any = trained.encoder
    text = trained.plan.model.prompt_template or ""
    if isinstance(trained.template, NamedTemplate):
        text = jinja_of(trained.template, encoder.decode(encoder.prefix) if encoder.prefix else "")
    elif not is_jinja(text):
        return
    (target / CHAT_TEMPLATE).write_text(text, encoding="utf-8")
    file = target / "tokenizer_config.json"
    if file.is_file():
        settings = read_object(file)
        if settings.pop("chat_template", None) is not None:
            file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
