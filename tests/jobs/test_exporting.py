"""Exports load elsewhere, equal the trained model, are complete or not written at all, and pushed
only where allowed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from expert.core.errors import (
    EXIT_DAMAGED,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    Damaged,
    ExpertError,
)
from expert.core.hashed import write_hashed
from expert.core.interrupts import Interrupted
from expert.core.links import LinkRefused
from expert.core.publish import damage, weights_hash
from expert.core.resources import DiskFull
from expert.core.rundir import RunFolder
from expert.jobs.export.card import PromptFormat, model_card
from expert.jobs.export.comparison import (
    TOLERANCE,
    checked_ids,
    compare,
    logits_of,
    logits_of_trained,
)
from expert.jobs.export.export import export
from expert.jobs.export.exported import Exported
from expert.jobs.export.push import EXPORT_RECORD, CannotPush, HubUnavailable, check_push, push
from expert.jobs.serve.models import load_models
from expert.run.stored.choose_checkpoint import choose
from expert.run.stored.load import Trained, load_trained, pick_device, read_plan
from tests.cli.running import Runner
from tests.each import each
from tests.jobs.runs import plan_of, write_expert
from tests.jobs.runs import run as run_job
from tests.jobs.trained_runs import exported, finished, finished_characters, with_plan
from tests.model.models import model_of_images, tiny_model

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


@each("family", ["gemma3_text", "gemma4_text", "qwen3_5_text", "qwen3_5_moe_text"])
def test_an_adapter_of_a_language_model_fits_the_model_of_images_it_was_taken_from(
    tmp_path, family
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    base = model_of_images(tmp_path / "models" / "base", family)
    manifest = write_expert(tmp_path, base, {"max_steps": 2, "learning_rate": 1e-2})
    ran = run_job(manifest).folder
    assert any("reads images" in each["text"] for each in plan_of(ran)["remarks"])
    done = exported_to(tmp_path / "out", ran)
    whole: Any = AutoModelForImageTextToText.from_pretrained(base)
    ours, ids = trained(ran), [[5, 6, 7, 8, 9, 3, 2, 11]]
    stranger = PeftModel.from_pretrained(whole, done.folder).eval()
    found = [logits_of(stranger, each) for each in ids]
    assert compare(logits_of_trained(ours, ids), found).share < 1e-4
    adapted = [name for name, _ in stranger.named_modules() if name.endswith("lora_A")]
    assert adapted
    assert not any("vision" in name for name in adapted)
    assert "AutoModelForImageTextToText" in (done.folder / "README.md").read_text("utf-8")
    merged = exported_to(tmp_path / "merged", ran, kind="merged").folder
    for of_ours in (done.folder, merged):
        (served,) = load_models([str(of_ours)], device="cpu")
        assert compare(logits_of_trained(served.trained, ids), found).share < 1e-4
    if family in ("gemma4_text", "qwen3_5_text"):  # the rest is the same for all
        return
    again = write_expert(
        tmp_path / "again",
        base,
        {"max_steps": 1, "learning_rate": 1e-9, "start_from": str(done.folder)},
    )
    one, other = (
        load_file(folder / "final" / "adapter_model.safetensors")
        for folder in (ran, run_job(again).folder)
    )
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6)
    full = {"adapter_type": "full", "max_steps": 1}
    every = run_job(write_expert(tmp_path / "full", base, full)).folder
    model = AutoModelForCausalLM.from_pretrained(every / "final").eval()
    found = [logits_of(model, each) for each in ids]
    assert compare(logits_of_trained(trained(every), ids), found).share < 1e-4


MIXTURES = [
    ("gpt_oss", {"adapter_type": "lora"}),
    ("qwen3_moe", {"adapter_type": "lora"}),
    ("qwen3_moe", {"adapter_type": "lora", "adapter_init": "pissa"}),
]


@each(("family", "settings"), MIXTURES)
def test_a_mixture_of_experts_answers_and_is_exported_as_it_was_trained(tmp_path, family, settings):
    from transformers import AutoModelForCausalLM

    base = tiny_model(tmp_path / "models" / "base", family)
    manifest = write_expert(tmp_path, base, {"max_steps": 2, "learning_rate": 1e-2, **settings})
    ran = run_job(manifest).folder
    ours, ids = trained(ran), [[5, 6, 7, 8, 9, 3, 2, 11]]
    expected = logits_of_trained(ours, ids)
    assert exported_to(tmp_path / "out", ran).share < 1e-4
    merged = exported_to(tmp_path / "merged", ran, kind="merged").folder
    stranger = AutoModelForCausalLM.from_pretrained(merged).eval()
    assert compare(expected, [logits_of(stranger, each) for each in ids]).share < 1e-4


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
        with pytest.raises(ExpertError, match=words):
            exported_to(tmp_path / "out", kind=kind)
    assert list(tmp_path.iterdir()) == []


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


def test_rounding_everywhere_passes_and_one_wrong_row_of_the_head_or_nan_does_not():
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
    good, bad = torch.zeros(2, 3), torch.full((2, 3), torch.nan)
    assert not compare([good, good], [good, bad]).within(torch.inf)
    assert not compare([good, good], [bad, good]).within(torch.inf)


def test_nothing_is_overwritten_but_an_empty_folder_will_do(tmp_path):
    (tmp_path / "empty").mkdir()
    exported_to(tmp_path / "empty")
    with pytest.raises(ExpertError, match=r"empty: exists already  \(name a new folder"):
        exported_to(tmp_path / "empty")


@each(
    ("error", "where"),
    [
        (OSError(errno.ENOSPC, FULL, "model.safetensors"), "jobs.export.export._write"),
        (ValueError(f"I/O error: {FULL} (os error 28)"), "jobs.export.export._write"),
        (OSError(errno.ENOSPC, FULL), "core.publish._seal"),  # names no file
        (OSError(errno.ENOSPC, FULL, ".tmp-1"), "jobs.export.export.tempfile.TemporaryDirectory"),
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
        with pytest.raises(ExpertError, match="is the folder you are in, which cannot be repl"):
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
    with pytest.raises(ExpertError, match=text):
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


# --- pushing; the client of the hub is a stand-in ------------------------------------------------


NAME, TOKEN = "anna/colours", "hf_standin0123456789abcdef"
URL = f"https://hub/{NAME}/commit/1"


@dataclass
class Hub:
    """Stands in for `huggingface_hub.HfApi`; `faults` are raised by the methods they name."""

    asked: list[str] = field(default_factory=list)
    repositories: dict[str, bool] = field(default_factory=dict)
    """Whether each is private."""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, BaseException] = field(default_factory=dict)

    def _begin(self, what: str) -> None:
        self.asked.append(what)
        if what in self.faults:
            raise self.faults[what]

    def whoami(self) -> None:
        self._begin("whoami")

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        self._begin("create_repo")
        assert exist_ok
        self.repositories.setdefault(name, private)

    def model_info(self, name: str) -> Any:
        self._begin("model_info")
        return SimpleNamespace(private=self.repositories[name])

    def upload_folder(self, *, folder_path: Path, **asked: Any) -> Any:
        self._begin("upload_folder")
        assert (asked["repo_id"], asked["ignore_patterns"]) == (NAME, [])
        for path in (path for path in folder_path.rglob("*") if path.is_file()):
            self.files[path.relative_to(folder_path).as_posix()] = path.read_bytes()
        return SimpleNamespace(commit_url=URL)


@pytest.fixture
def hub(monkeypatch) -> Hub:
    from huggingface_hub import constants

    made = Hub()
    client = type("HfApi", (), {"__new__": lambda cls, **_: made})
    monkeypatch.setattr("huggingface_hub.HfApi", client)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return made


@pytest.fixture
def out(tmp_path) -> Path:
    """A copy of an export without a verdict of the gate."""
    return Path(shutil.copytree(exported("lora").folder, tmp_path / "out"))


def test_every_file_is_listed_and_uploaded_and_no_file_names_a_folder_of_this_machine(hub, out):
    told: list[str] = []
    done = push(out, NAME, tell=told.append)
    assert (done["url"], done["private"], hub.repositories) == (URL, True, {NAME: True})
    own = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert own == hub.files
    assert done["files"] == {name: len(data) for name, data in own.items()}
    assert all(any(name in line for line in told[:-1]) for name in own)
    assert told[-1].endswith(f"to {NAME} (private) …")
    place = str(finished("lora").parent).encode()
    assert [name for name, data in own.items() if name.endswith("json") and place in data] == []


@each("public, words", [(True, "is private on the hub"), (False, r"is public .* \(add --public")])
def test_a_repository_is_made_and_stays_as_visible_as_asked(hub, out, public, words):
    assert push(out, NAME, public=not public)["private"] is public
    assert hub.repositories.pop(NAME) is public
    hub.repositories[NAME] = public
    with pytest.raises(CannotPush, match=words):
        push(out, NAME, public=public)
    hub.repositories.clear()


def test_an_export_that_failed_its_gate_is_not_pushed_unless_allowed(hub, tmp_path):
    run = Path(shutil.copytree(finished("lora"), tmp_path / "run"))
    gate = {"passed": False, "reasons": ["accuracy 12 %, at least 95 % asked"]}
    failed = {"weights": weights_hash(run / "final"), "checkpoint": "final", "gate": gate}
    write_hashed(run / "validation.json", json.dumps(failed))
    export(run, tmp_path / "out", device="cpu", allow_failed=True)
    with pytest.raises(ExpertError, match="the quality gate failed: accuracy 12 %"):
        push(tmp_path / "out", NAME)
    assert hub.asked == []
    push(tmp_path / "out", NAME, allow_failed=True)
    assert hub.files


def test_changed_exports_other_folders_and_other_names_are_refused_before_the_hub_is_asked(
    hub, out, monkeypatch, tmp_path
):
    from huggingface_hub import constants

    for missing in (EXPORT_RECORD, "DONE"):
        (out / missing).rename(tmp_path / "aside")
        with pytest.raises(CannotPush, match="is not an export: "):
            push(out, NAME)
        (tmp_path / "aside").rename(out / missing)
    for name in ("colours", "anna/", "anna/a/b", "../x", "anna/colours now"):
        with pytest.raises(CannotPush, match="is not the name of a repository"):
            check_push(name)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(CannotPush, match=r"there is no token for the hub  \(set HF_TOKEN"):
        push(out, NAME)
    card = out / "README.md"
    card.write_text(card.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    with pytest.raises(Damaged, match="README"):
        push(out, NAME)
    assert hub.asked == []


def http_error(status: int) -> Exception:
    from huggingface_hub.errors import HfHubHTTPError

    request = httpx.Request("POST", "https://hub")
    response = httpx.Response(status, request=request)
    return HfHubHTTPError("", response=response, server_message=f"told to fail {TOKEN}")


def wrapped(error: Exception) -> Exception:
    """As the client wraps errors of an upload."""
    outer = RuntimeError("Error while uploading 'x' to the Hub.")
    outer.__cause__ = error
    return outer


@each(
    ("where", "error", "kind", "words"),
    [
        ("whoami", http_error(401), CannotPush, "refused the push: 401, told to fail"),
        ("create_repo", http_error(403), CannotPush, "refused the push: 403, told to fail"),
        ("upload_folder", http_error(404), CannotPush, "refused the push: 404"),
        ("upload_folder", http_error(409), HubUnavailable, "unavailable: 409"),
        ("upload_folder", http_error(429), HubUnavailable, "unavailable: 429"),
        ("create_repo", http_error(503), HubUnavailable, r"unavailable: 503.*repeat the command"),
        ("upload_folder", wrapped(http_error(400)), CannotPush, "refused the push: 400"),
        ("upload_folder", wrapped(http_error(500)), HubUnavailable, "unavailable: 500"),
        ("upload_folder", RuntimeError("xet broke"), HubUnavailable, "unavailable: xet broke"),
        ("upload_folder", ValueError("invalid YAML"), CannotPush, "invalid YAML"),
        ("model_info", httpx.ConnectError("no route"), HubUnavailable, "unavailable: no route"),
    ],
)
def test_hub_errors_are_readable_and_show_no_token(hub, out, where, error, kind, words):
    hub.faults = {where: error}
    with pytest.raises(kind, match=words) as raised:
        push(out, NAME)
    assert TOKEN not in str(raised.value)
    assert hub.files == {}


def test_an_interrupted_push_says_how_to_continue(hub, out):
    hub.faults = {"upload_folder": Interrupted(2)}
    with pytest.raises(Interrupted) as ended:
        push(out, NAME)
    assert ended.value.left.startswith("nothing was pushed; expert export ")


def test_the_command_lists_the_files_pushes_them_and_prints_the_commit(
    hub, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "400")
    run, to = Runner(capsys, monkeypatch), tmp_path / "out"
    words = ("export", str(finished("lora")), "--to", str(to), "--device", "cpu", "--push", NAME)
    ran = run(*words)
    assert (ran.code, ran.err) == (EXIT_OK, "")
    assert URL in ran.out
    assert all(name in ran.out for name in hub.files)
    assert TOKEN not in ran.out
    again = run("export", str(to), "--push", NAME, "--json")
    assert json.loads(again.out)["pushed"]["repository"] == NAME
    hub.faults = {"whoami": http_error(503)}
    assert run("export", str(to), "--push", NAME).code == EXIT_UNAVAILABLE
    hub.faults = {"whoami": http_error(403)}
    assert run(*words[:3], str(tmp_path / "more"), "--push", "carol/x").code == EXIT_USAGE
    (to / "README.md").write_text("other", encoding="utf-8")
    assert run("export", str(to), "--push", NAME).code == EXIT_DAMAGED
