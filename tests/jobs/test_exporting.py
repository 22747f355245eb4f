"""Exports load elsewhere, equal the trained model, and are complete or not written at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from expert.core.errors import Damaged
from expert.core.links import LinkRefused
from expert.core.publish import damage
from expert.core.resources import DiskFull
from expert.core.rundir import RunFolder
from expert.jobs.export.card import PromptFormat, model_card
from expert.jobs.export.checks import CannotExport
from expert.jobs.export.comparison import (
    TOLERANCE,
    checked_ids,
    compare,
    logits_of,
    logits_of_trained,
)
from expert.jobs.export.export import export
from expert.jobs.export.exported import Exported
from expert.run.stored.choose_checkpoint import choose
from expert.run.stored.load import Trained, load_trained, pick_device, read_plan
from tests.each import each
from tests.jobs.trained_runs import exported, finished, finished_characters, with_plan

FULL = os.strerror(errno.ENOSPC)


def trained(run: Path, **more: Any) -> Trained:
    folder = RunFolder(run)
    plan = read_plan(folder)
    return load_trained(folder, plan, choose(folder, "final"), device=pick_device("cpu"), **more)


def plain_base(run: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(read_plan(RunFolder(run)).model.location)


def exported_to(to: Path, run: Path | None = None, **more: Any) -> Exported:
    return export(run or finished("lora"), to, device="cpu", **more)


def json_in(*parts: Path | str) -> Any:
    return json.loads(Path(*parts).read_text(encoding="utf-8"))


def copied(to: Path) -> Path:
    return Path(shutil.copytree(finished("lora"), to))


def test_an_exported_adapter_loads_in_plain_peft_with_equal_logits():
    from peft import PeftModel

    run, done = finished("lora"), exported("lora")
    assert (done.kind, done.checkpoint, done.dtype) == ("adapter", "final", "fp32")
    ours = trained(run)
    ids = checked_ids(ours)
    stranger = PeftModel.from_pretrained(plain_base(run), done.folder).eval()
    found = [logits_of(stranger, each) for each in ids]
    # The same weights; some CPUs add float32 numbers in another order there (2e-6 was seen).
    assert compare(logits_of_trained(ours, ids), found).share < 1e-4
    without = [logits_of(plain_base(run).eval(), each) for each in ids]
    assert compare(found, without).share > 0.5  # the adapter has an effect


@pytest.mark.parametrize("kind", ["lora", "dora", "lora+soft"])
def test_merged_weights_equal_the_adapter(kind):
    """Float32 sums in another order: up to 5e-6 of the logits' spread was seen."""
    from transformers import AutoModelForCausalLM

    ours, done = trained(finished(kind)), exported(kind, "merged")
    ids = checked_ids(ours)
    stranger = AutoModelForCausalLM.from_pretrained(done.folder).eval()
    prompts = ours.loaded.soft_prompts
    rows = prompts.rows() if prompts is not None else None
    found = [logits_of(stranger, each, rows) for each in ids]
    assert compare(logits_of_trained(ours, ids), found).share < 1e-4
    assert done.share < 1e-4
    assert done.adapter_effect > 0.5
    prompt = done.folder / "soft_prompts" / "lead" / "adapter_config.json"
    assert prompt.is_file() == (prompts is not None)
    if prompts is not None:  # its base is two folders above
        assert json_in(prompt)["base_model_name_or_path"] == done.folder.name


@each(("dtype", "kind"), [("bf16", "lora"), ("fp16", "lora"), ("bf16", "full")])
def test_full_weights_are_rounded_once(dtype, kind, tmp_path):
    how = "merged" if kind == "lora" else None
    done = exported_to(tmp_path / "out", finished(kind), kind=how, dtype=dtype)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    assert {tensor.dtype for tensor in tensors.values()} == {types[dtype]}
    assert json_in(tmp_path, "out", "config.json")["dtype"].endswith("16")
    assert (done.adapter_effect is None) == (kind == "full")
    assert 1e-4 < done.share <= done.tolerance == TOLERANCE[dtype]


def test_a_checkpoint_is_exported_as_it_was_saved(tmp_path):
    exported_to(tmp_path / "three", checkpoint="3")
    exported_to(tmp_path / "six", checkpoint="6")
    files = ["three", "six"]
    three, six = (load_file(tmp_path / name / "adapter_model.safetensors") for name in files)
    final = load_file(finished("lora") / "final" / "adapter_model.safetensors")
    assert all(torch.equal(six[name], final[name]) for name in final)
    assert not all(torch.equal(three[name], final[name]) for name in final)


def test_the_text_of_a_template_in_the_manifest_is_exported_with_the_tokenizer(tmp_path):
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    run = with_plan(finished("lora"), tmp_path / "run", model={"prompt_template": text})
    exported_to(tmp_path / "out", run)
    assert (tmp_path / "out" / "chat_template.jinja").read_text("utf-8") == text
    assert "the chat template of the manifest" in (tmp_path / "out" / "README.md").read_text(
        "utf-8"
    )


def test_whole_models_soft_prompts_and_character_models_are_exported_to_the_bit(tmp_path):
    assert exported_to(tmp_path / "same", finished("full")).largest_difference == 0
    assert exported_to(tmp_path / "soft", finished("soft")).largest_difference == 0
    assert json_in(tmp_path, "soft", "adapter_config.json")["peft_type"] == "PROMPT_TUNING"
    done = exported_to(tmp_path / "out", finished_characters())
    assert (done.kind, done.largest_difference) == ("model", 0)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    own = {"DONE", "README.md", "export.json", "config.json", "model.safetensors"}
    assert names == own | {"vocabulary.json"}


def test_a_quantised_base_is_merged_unquantised_which_is_a_warning(tmp_path):
    done = exported_to(tmp_path / "out", finished("int8"), kind="merged")
    assert done.share < 1e-4
    assert "the base was quantised in training and is not in the export" in done.warnings()[0]


def test_rounding_that_outweighs_the_adapter_is_a_warning():
    done = exported("lora", "merged")
    [warning] = replace(done, dtype="bf16", share=0.08, adapter_effect=0.1, notes=()).warnings()
    assert warning.startswith("rounding to bf16 moves the logits by 8.0% of their spread, the ")


# --- what lies in it -----------------------------------------------------------------------------


def test_an_export_is_sealed_and_has_tokenizer_generation_config_and_card():
    out = exported("lora", "merged").folder
    assert damage(out) == ""
    assert (out / "tokenizer.json").is_file()
    generation = json_in(out, "generation_config.json")
    assert (generation["do_sample"], generation["max_new_tokens"]) == (False, 12)
    assert generation["eos_token_id"] == [2]
    assert json_in(out, "config.json")["use_cache"] is True


def test_the_card_tells_base_data_settings_losses_and_how_to_load():
    run, done = finished("lora"), exported("lora")
    card = (done.folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: peft\n")
    assert "AutoModelForCausalLM.from_pretrained(base, dtype=dtype)" in card
    assert "| data | train.jsonl, " in card
    assert "| trained | lora, rank 4, alpha 8, dropout 0 |" in card
    finish = json.loads((run / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert "| training loss | {loss:.4f} |".format(loss=finish["smoothed_loss"]) in card
    assert (
        "| validation loss, best | {eval_loss:.4f} |".format(eval_loss=finish["eval_loss"]) in card
    )
    assert f"on {done.texts} texts: their root mean square difference is " in card
    assert " 0.00% of their spread" in card


# --- what is refused -----------------------------------------------------------------------------


def test_an_export_that_forgets_the_adapter_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    from peft import PeftModel

    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda model: model.unload(), raising=False)
    monkeypatch.setattr(PeftModel, "from_pretrained", lambda base, *_, **__: base)
    for kind, fix in (("merged", "--dtype fp32"), ("adapter", "--merged --dtype fp32")):
        words = rf"differs from the trained model: its logits .*  \(try {fix}"
        with pytest.raises(CannotExport, match=words):
            exported_to(tmp_path / "out", kind=kind)
    assert list(tmp_path.iterdir()) == []


def test_nan_logits_are_refused():
    good, bad = torch.zeros(2, 3), torch.full((2, 3), torch.nan)
    found = compare([good, good], [good, bad])
    assert not found.within(torch.inf)
    assert not compare([good, good], [bad, good]).within(torch.inf)


def test_logits_are_computed_without_tf32_that_a_run_has_allowed():
    allowed = []

    class Model:
        def head(self) -> torch.Tensor:
            return torch.zeros(1)

        def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
            allowed.append(torch.get_float32_matmul_precision())
            return torch.zeros(1, tokens.shape[1], 3)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        logits_of(Model(), [1, 2])
        assert (allowed, torch.get_float32_matmul_precision()) == (["highest"], "high")
    finally:
        torch.set_float32_matmul_precision(before)


def test_rounding_everywhere_passes_and_one_wrong_row_of_the_head_does_not():
    generator = torch.Generator().manual_seed(1)
    logits = [torch.randn(40, 5000, generator=generator) for _ in range(3)]
    rounded = [one + 0.03 * torch.randn(one.shape, generator=generator) for one in logits]
    assert compare(logits, rounded).within(TOLERANCE["bf16"])
    assert not compare(logits, rounded).within(TOLERANCE["fp16"])
    for one in rounded:
        one[:, 7] = 0
    found = compare(logits, rounded)
    assert found.share < TOLERANCE["bf16"]
    assert not found.within(TOLERANCE["bf16"])


def test_nothing_is_overwritten_but_an_empty_folder_will_do(tmp_path):
    (tmp_path / "empty").mkdir()
    exported_to(tmp_path / "empty")
    with pytest.raises(CannotExport, match=r"empty: exists already  \(name a new folder"):
        exported_to(tmp_path / "empty")


@each(
    ("error", "where"),
    [
        (OSError(errno.ENOSPC, FULL, "model.safetensors"), "jobs.export.export._write"),
        (ValueError(f"I/O error: {FULL} (os error 28)"), "jobs.export.export._write"),
        (OSError(errno.ENOSPC, FULL), "core.publish._seal"),  # names no file
        (OSError(errno.ENOSPC, FULL, ".tmp-1"), "jobs.export.checks.tempfile.TemporaryDirectory"),
    ],
)
def test_a_disk_that_fills_while_writing_is_told_by_the_name_the_user_gave(
    error, where, tmp_path, monkeypatch
):
    def full(*given: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(f"expert.{where}", full)
    with pytest.raises(DiskFull) as told:
        exported_to(tmp_path / "out")
    assert str(told.value).startswith(f"{tmp_path / 'out'}: ")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_that_one_is_in_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr("expert.jobs.export.export.load_trained", None)
    for place in (Path(), Path.cwd()):
        with pytest.raises(CannotExport, match="is the folder you are in, which cannot be repl"):
            exported_to(place)
    assert (tmp_path / "empty").is_dir()


@each(
    ("kind", "flags", "text"),
    [
        ("full", {"kind": "merged"}, "--merged: all weights were trained, there is no adapter"),
        ("full", {"kind": "adapter"}, "--adapter: all weights were trained"),
        ("soft", {"kind": "merged"}, "--merged: soft prompts cannot be merged into weights"),
        ("lora", {"dtype": "bf16"}, "--dtype: an adapter is exported as it was trained"),
        ("characters", {"dtype": "bf16"}, "--dtype: the character model is float32"),
    ],
)
def test_impossible_exports_are_refused(kind, flags, text, tmp_path):
    run = finished_characters() if kind == "characters" else finished(kind)
    with pytest.raises(CannotExport, match=text):
        exported_to(tmp_path / "out", run, **flags)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_expert_with_other_bytes_or_a_link_is_not_exported(tmp_path):
    run = copied(tmp_path / "run")
    settings = run / "final" / "adapter_config.json"
    whole = settings.read_bytes()
    settings.write_bytes(whole.replace(b"  ", b" \n", 1))
    with pytest.raises(Damaged, match=r"adapter_config\.json does not match its hash in DONE"):
        exported_to(tmp_path / "out", run)
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(whole)
    settings.unlink()
    settings.symlink_to(elsewhere)
    with pytest.raises(LinkRefused, match=r"adapter_config\.json: is a link"):
        exported_to(tmp_path / "out", run)
    assert not (tmp_path / "out").exists()


def test_an_expert_on_fp8_answers_alike_and_its_card_says_what_it_was_trained_on(tmp_path):
    run = finished("fp8")
    assert read_plan(RunFolder(run)).model.quantization == "fp8"
    done = exported_to(tmp_path / "out", run, kind="adapter")
    assert done.share < 1e-4
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "In training the base's weights were in FP8" in card
    assert exported_to(tmp_path / "merged", run, kind="merged").unquantised


def test_cards_name_their_library_and_a_cached_base_its_hub_id_and_commit():
    plan, prompt = read_plan(RunFolder(finished("lora"))), PromptFormat("{question}", True)

    def card(how: Any, **changes: str) -> str:
        model = plan.model.model_copy(update=changes)
        own = plan.model_copy(update={"model": model})
        return model_card(own, exported("lora", how), prompt=prompt)

    for how, library in (("adapter", "peft"), ("merged", "transformers")):
        assert f"library_name: {library}\n" in card(how, name="tiny", place="built-in")
    location = "/home/me/hub/models--Qwen--Qwen3-0.6B/snapshots/abc"
    cached = card("adapter", name="Qwen3-0.6B", place="hf cache", location=location)
    assert cached.startswith('---\nbase_model: "Qwen/Qwen3-0.6B"\nlibrary_name: peft\n')
    assert 'base = "Qwen/Qwen3-0.6B"' in cached
    assert 'from_pretrained(base, revision="abc", dtype=dtype)' in cached
    assert "/home/me" not in cached
