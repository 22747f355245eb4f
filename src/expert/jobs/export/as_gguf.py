"""Writes an expert or its adapter as a GGUF file, reads it back and checks it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from expert.answer.decoding import end_tokens, resolve_decoding
from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.core.stored_json import read_object, read_object_or_empty
from expert.data.template.templates import NamedTemplate
from expert.jobs.export.card import languages
from expert.jobs.export.chat_format import (
    MODELFILE,
    SMALLEST_CONTEXT,
    jinja_of,
    modelfile,
)
from expert.jobs.export.comparison import Expected, Written, compare, logits_of
from expert.jobs.export.exported import ExportRequest, Kind, Quality
from expert.jobs.export.gguf_file.architecture import (
    family_of,
    file_name,
    stored_tensors,
    tensor_converters,
    window_of,
)
from expert.jobs.export.gguf_file.file import (
    FILE_TYPES,
    GgufMetadata,
    new_writer,
    read_into,
    write_model,
    write_tensors,
)
from expert.jobs.export.gguf_file.vocabulary import Vocabulary, vocabulary
from expert.jobs.export.portable_base import portable_base
from expert.jobs.validate.held_out import Run
from expert.jobs.validate.row_losses import row_losses
from expert.jobs.validate.test_sets import data_folder, find_test_set
from expert.manifest.schema.kinds import ADAPTERS, is_jinja
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.models.architectures import Gguf
from expert.planning.plan import folder_name
from expert.planning.run_plan import RunPlan
from expert.run.stored.load import Trained

_WEIGHT = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")


def settle_gguf(plan: RunPlan, gguf: str | None, *, adapter: bool, dtype: str | None) -> Kind:
    """The kind of the export; ExpertError, before anything is loaded, if GGUF cannot hold it."""
    flag, kind, why = "--gguf-adapter" if adapter else f"--gguf {gguf}", plan.adapter.type, ""
    if plan.model.name == CHAR_GPT:
        why = "llama.cpp does not support the character model  (export it without --gguf)"
    elif dtype is not None:
        why = "--dtype cannot be combined with it  (leave --dtype out)"
    elif plan.adapter.soft_prompts:
        why = "llama.cpp does not support soft prompts  (export with --adapter)"
    elif adapter and kind == "full":
        why = "all weights were trained, there is no adapter  (write the model with --gguf q8_0)"
    elif adapter and kind != "lora":
        why = f"llama.cpp supports LoRA only, not {kind}  (write the model with --gguf q8_0)"
    elif adapter and plan.adapter.modules_to_save:
        why = "embedding and head are trained whole, which it cannot hold  (use --gguf q8_0)"
    elif not adapter and gguf not in FILE_TYPES:
        fix = "for others, export f16 and run llama-quantize of llama.cpp"
        why = f"this type is not supported  (use {', '.join(FILE_TYPES)}; {fix})"
    elif importlib.util.find_spec("gguf") is None:
        why = f"the gguf package is not installed  ({pip_install('gguf')})"
    if why:
        raise ExpertError(f"{flag}: {why}")
    return "adapter" if adapter else "model" if kind == "full" else "merged"


def write_gguf_model(
    source: ExportRequest,
    expected: Expected,
    trained: Trained,
    target: Path,
    tell: Callable[[str], None],
) -> Written:
    """Write the whole expert; the weights of `trained` become those of the file."""
    kind, loaded = source.gguf, trained.loaded
    if loaded.adapter.type in ADAPTERS:  # merge it into the weights
        module: Any = loaded.module
        none = loaded.adapter.model_copy(update={"type": "none"})
        loaded = replace(loaded, module=module.merge_and_unload(), adapter=none)
        trained = replace(trained, loaded=loaded)
    model = loaded.causal_lm
    family, words = _described(trained, expected)
    folder, plan = source.folder, source.plan
    run = Run(folder, plan, data_folder(folder, plan, None))
    before, quality, unknown = None, None, "--judged-rows 0"
    if source.judged_rows:
        try:
            test = find_test_set(run, named=None).limited(source.judged_rows)
            tell("loss on held-out rows, before")
            before = row_losses(trained, test.examples)
        except (ExpertError, OSError, ValueError) as error:
            unknown = str(error).strip().partition("\n")[0]
    file = f"{folder_name(plan.expert)}-{kind}.gguf"
    tell(f"writing {file}")
    write_model(target / file, model, family, words, kind, _about(source))
    tell(f"reading {file} back")
    read_into(target / file, model, family)
    difference = compare(expected.logits, [logits_of(model, ids) for ids in expected.ids])
    notes = [*words.notes]
    if before is not None:
        tell(f"loss on held-out rows, as {kind}")
        after = row_losses(trained, test.examples)
        quality = Quality(
            test_set=test.name,
            rows=len(test.examples),
            loss=(before.loss, after.loss),
            token_accuracy=(before.token_accuracy, after.token_accuracy),
        )
    else:
        notes.append(f"the quality lost by quantising is unknown: {unknown}")
    window = window_of(model.config)
    if window and not family.windows and window < model.config.max_position_embeddings:
        what = f"llama.cpp ignores this model's sliding window of {window:,} tokens"
        notes.append(f"{what}: longer conversations get different answers")
    notes += _write_modelfile(expected, trained, target, file)
    return Written(file=file, difference=difference, quality=quality, notes=tuple(notes))


def save_adapter(source: ExportRequest, trained: Trained, target: Path) -> None:
    """Write the adapter in PEFT's format, as it was saved."""
    from expert.model.saving import save_trained

    place = source.choice.path
    if not source.choice.is_final:
        save_trained(trained.loaded, target)
        return
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place)
        if path.is_file() and name.name not in ("DONE", "README.md"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name, follow_symlinks=False)


def write_adapter(path: Path, folder: Path, config: Any, family: Gguf, about: GgufMetadata) -> None:
    """Write the adapter of a PEFT folder; llama.cpp scales by alpha / rank, and no other way."""
    from safetensors.torch import load_file

    settings = read_object(folder / "adapter_config.json")
    pairs: dict[str, dict[str, Any]] = {}
    unsupported = []
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        match = _WEIGHT.fullmatch(key)
        name = file_name(f"{match[1]}.weight", family, config) if match else None
        if match is None or name is None or name == "token_embd.weight":
            unsupported.append(key)
            continue
        values = tensor.float()
        if match[2] == "B":
            values = tensor_converters(name, family, config)[0](values)
        pairs.setdefault(name, {})[f"{name}.lora_{match[2].lower()}"] = values
    odd = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern")
    unsupported += [name for name in odd if settings.get(name)]
    if unsupported:
        shown = ", ".join(sorted(unsupported)[:3])
        fix = "write the merged model with --gguf q8_0"
        raise ExpertError(f"--gguf-adapter: llama.cpp cannot load {shown}  ({fix})")
    tensors = {key: value for pair in pairs.values() for key, value in sorted(pair.items())}
    writer = new_writer(path, family, about, None)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(settings["lora_alpha"]))
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    write_tensors(writer, shapes, dict.fromkeys(tensors, "F32"), iter(tensors.values()))


def write_gguf_adapter(
    source: ExportRequest, expected: Expected, trained: Trained, target: Path
) -> Written:
    """Write the adapter alone."""
    import gguf
    import torch

    model: Any = trained.loaded.module
    family, words = _described(trained, expected)
    config = trained.loaded.causal_lm.config
    file = f"{folder_name(source.plan.expert)}-lora.gguf"
    with tempfile.TemporaryDirectory(prefix="expert-adapter-") as place:
        save_adapter(source, trained, Path(place))
        path = target / file
        write_adapter(path, Path(place), config, family, _about(source))
    base = model.unload()
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
    notes = _write_modelfile(expected, trained, target, "BASE.gguf", adapter=file)
    return Written(file=file, difference=difference, notes=(*words.notes, *notes))


def _about(source: ExportRequest) -> GgufMetadata:
    manifest = read_object_or_empty(source.folder.manifest)
    return GgufMetadata(
        name=source.plan.expert,
        license=str(manifest.get("license") or ""),
        base=portable_base(source.plan.model).name,
        languages=tuple(languages(manifest.get("capabilities") or ())[0]),
        tags=tuple(str(tag) for tag in manifest.get("tags") or ()),
    )


def _described(trained: Trained, expected: Expected) -> tuple[Gguf, Vocabulary]:
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


def _write_modelfile(
    expected: Expected, trained: Trained, target: Path, file: str, adapter: str = ""
) -> list[str]:
    """Write the Modelfile; returns notes for the user."""
    template, asked = trained.template, expected.prompt_format
    assert template is not None
    assert asked is not None
    config = trained.loaded.causal_lm.config
    # Tokens of prompt and answer: as in training, but for what the model or llama.cpp cannot see.
    length = max(trained.plan.data.max_seq_length, SMALLEST_CONTEXT)
    window = None if family_of(config).windows else window_of(config)
    length = min(length, config.max_position_embeddings, window or length)
    own_stops = [template.stop] if template.stop and not asked.plain else []
    text, note = modelfile(
        file,
        template,
        plain=asked.plain,
        stops=list(dict.fromkeys([*own_stops, *asked.stops])),
        how=resolve_decoding(trained.plan, {})[0],
        context=length,
        adapter=adapter,
    )
    (target / MODELFILE).write_text(text, encoding="utf-8")
    return [note] if note else []
