"""Writes an expert or its adapter as a GGUF file, reads it back and checks it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.answer.decoding import end_tokens, resolve_decoding
from expert.core.stored_json import read_object_or_empty
from expert.data.template.templates import NamedTemplate
from expert.jobs.export.card import languages
from expert.jobs.export.chat_format import jinja_of
from expert.jobs.export.checks import CannotExport
from expert.jobs.export.comparison import Difference, Expected, compare, logits_of
from expert.jobs.export.exported import Exported, ExportRequest, Kind
from expert.jobs.export.gguf_file.adapter import refuse_adapter, write_adapter
from expert.jobs.export.gguf_file.architecture import (
    Family,
    family_of,
    stored_tensors,
    tensor_converters,
    window_of,
)
from expert.jobs.export.gguf_file.file import (
    GgufMetadata,
    read_into,
    refuse_type,
    refuse_without_package,
    write_model,
)
from expert.jobs.export.gguf_file.vocabulary import Vocabulary, vocabulary
from expert.jobs.export.modelfile import BASE_FILE, MODELFILE, base_file, context_length, modelfile
from expert.jobs.export.portable_base import portable_base
from expert.jobs.export.quality import Quality, QualityCheck
from expert.manifest.schema.kinds import ADAPTERS, is_jinja
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.plan import folder_name

if TYPE_CHECKING:
    from expert.planning.run_plan import RunPlan
    from expert.run.stored.load import Trained


def settle_gguf(plan: RunPlan, gguf: str | None, *, adapter: bool, dtype: str | None) -> Kind:
    """The kind of the export; CannotExport, before anything is loaded, if GGUF cannot hold it."""
    flag = "--gguf-adapter" if adapter else "--gguf"
    if plan.model.name == CHAR_GPT:
        raise CannotExport(
            f"{flag}: llama.cpp does not support the character model  (export it without {flag})"
        )
    if dtype is not None:
        raise CannotExport(f"--dtype: cannot be combined with {flag}  (leave --dtype out)")
    if adapter:
        refuse_adapter(plan.adapter)
    else:
        refuse_type(str(gguf))
        if plan.adapter.soft_prompts:
            raise CannotExport(
                f"{flag}: llama.cpp does not support soft prompts  (export with --adapter)"
            )
    refuse_without_package(flag)
    return "adapter" if adapter else "model" if plan.adapter.type == "full" else "merged"


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written, and the results of its checks; all but two fields are those of a GGUF
    file."""

    difference: Difference
    """Between the logits of the export and of the trained model."""
    notes: tuple[str, ...]
    file: str = ""
    quality: Quality | None = None
    tensors: Mapping[str, int] = field(default_factory=dict)
    """Number of tensors of each type."""


def write_gguf_model(
    source: ExportRequest,
    expected: Expected,
    trained: Trained,
    target: Path,
    tell: Callable[[str], None],
) -> Written:
    """Write the whole expert; the weights of `trained` become those of the file."""
    from expert.jobs.validate.held_out import Run
    from expert.jobs.validate.test_sets import data_folder

    trained, kind = _merged_model(trained), source.gguf
    model = trained.loaded.causal_lm
    family, words = _described(trained, expected)
    folder, plan = source.folder, source.plan
    run = Run(folder, plan, data_folder(folder, plan, None))
    check = QualityCheck(run, trained, source.judged_rows, tell)
    file = _file_name(source)
    tell(f"writing {file}")
    tensors = write_model(target / file, model, family, words, kind, _about(source))
    tell(f"reading {file} back")
    read_into(target / file, model, family)
    difference = compare(expected.logits, [logits_of(model, ids) for ids in expected.ids])
    quality = check.after(trained, kind)
    note = _write_modelfile(expected, trained, target, file)
    return Written(
        file=file,
        difference=difference,
        quality=quality,
        tensors=tensors,
        notes=(*words.notes, *filter(None, (_window_note(model.config, family), note))),
    )


def write_gguf_adapter(
    source: ExportRequest,
    expected: Expected,
    trained: Trained,
    target: Path,
    save: Callable[[Path], None],
) -> Written:
    """Write the adapter alone; `save` writes it in PEFT's format. A built-in base is written next
    to it, since it is not on the hub."""
    import gguf
    import torch

    model: Any = trained.loaded.module
    family, words = _described(trained, expected)
    file, config, about = _file_name(source), trained.loaded.causal_lm.config, _about(source)
    with tempfile.TemporaryDirectory(prefix="expert-adapter-") as place:
        save(Path(place))
        path = target / file
        changed = write_adapter(path, Path(place), config, family, about)
    base = model.unload()
    base_plan = source.plan.model
    if base_plan.place == "built-in":
        about = replace(about, name=base_plan.name)
        write_model(target / BASE_FILE, base, family, words, "f16", about)
    reader = gguf.GGUFReader(path)
    factors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    alpha = float(reader.fields["adapter.lora.alpha"].contents())
    with torch.no_grad():
        for stored in stored_tensors(base, family):
            if f"{stored.name}.lora_a" in factors:
                a, b = factors[f"{stored.name}.lora_a"], factors[f"{stored.name}.lora_b"]
                b = tensor_converters(stored.name, family, config)[1](b)
                weight = base.state_dict()[stored.source]
                weight += (alpha / a.shape[0] * (b @ a)).to(weight)
    difference = compare(expected.logits, [logits_of(base, ids) for ids in expected.ids])
    note = _write_modelfile(expected, trained, target, base_file(base_plan), adapter=file)
    return Written(
        file=file,
        difference=difference,
        tensors={"F32": 2 * changed},
        notes=(*words.notes, *filter(None, (note,))),
    )


def _file_name(source: ExportRequest) -> str:
    return f"{folder_name(source.plan.expert)}-{source.gguf}.gguf"


def _about(source: ExportRequest) -> GgufMetadata:
    manifest = read_object_or_empty(source.folder.manifest)
    return GgufMetadata(
        name=source.plan.expert,
        license=str(manifest.get("license") or ""),
        base=portable_base(source.plan.model, with_hashes=False).name,
        languages=tuple(languages(manifest.get("capabilities") or ())[0]),
        tags=tuple(str(tag) for tag in manifest.get("tags") or ()),
    )


def _merged_model(trained: Trained) -> Trained:
    """The expert with its adapter merged into the weights."""
    loaded = trained.loaded
    if loaded.adapter.type not in ADAPTERS:
        return trained
    module: Any = loaded.module
    none = loaded.adapter.model_copy(update={"type": "none"})
    return replace(trained, loaded=replace(loaded, module=module.merge_and_unload(), adapter=none))


def _described(trained: Trained, expected: Expected) -> tuple[Family, Vocabulary]:
    from expert.data.tokens.encoder import TextEncoder

    model, encoder, template = trained.loaded.causal_lm, trained.encoder, trained.template
    assert isinstance(encoder, TextEncoder)
    assert template is not None
    assert expected.prompt_format is not None
    family = family_of(model.config)
    # As in training: the tokenizer's, or that of a layout named in the manifest.
    own = trained.plan.model.prompt_template or ""
    chat_template = own if is_jinja(own) else encoder.special.chat_template or ""
    if isinstance(template, NamedTemplate):
        chat_template = jinja_of(template)
    words = vocabulary(
        encoder,
        template,
        rows=model.get_input_embeddings().weight.shape[0],
        ends=end_tokens(encoder, template),
        chat_template="" if expected.prompt_format.plain else chat_template,
    )
    return family, words


def _window_note(config: Any, family: Family) -> str:
    window = window_of(config)
    if family.windows or not window or window >= config.max_position_embeddings:
        return ""
    return (
        f"llama.cpp ignores this model's sliding window of {window:,} tokens: longer conversations "
        "get different answers"
    )


def _write_modelfile(
    expected: Expected, trained: Trained, target: Path, file: str, adapter: str = ""
) -> str:
    plan, config, prompt_format = (
        trained.plan,
        trained.loaded.causal_lm.config,
        expected.prompt_format,
    )
    assert trained.template is not None
    assert prompt_format is not None
    how, _ = resolve_decoding(plan, {})
    family = family_of(config)
    window = None if family.windows else window_of(config)
    stop = [trained.template.stop] if trained.template.stop and not prompt_format.plain else []
    text, note = modelfile(
        file,
        trained.template,
        plain=prompt_format.plain,
        stops=list(dict.fromkeys([*stop, *prompt_format.stops])),
        how=how,
        context=context_length(plan.data.max_seq_length, config.max_position_embeddings, window),
        adapter=adapter,
    )
    (target / MODELFILE).write_text(text, encoding="utf-8")
    return note


def gguf_record(done: Exported, written: Written) -> dict[str, object]:
    """The file and the results of its checks, for export.json."""
    return {
        "file": written.file,
        "type": done.gguf,
        "tensors": dict(written.tensors),
        "logits": {
            "texts": done.texts,
            "largest_difference": done.largest_difference,
            "share_of_spread": done.share,
        },
        "quality": asdict(written.quality) if written.quality is not None else None,
        "notes": list(written.notes),
    }
