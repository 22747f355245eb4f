"""GGUF files in the real llama.cpp: the same tokens, the same logits, the same answers.

llama_cpp may live in an environment of its own, whose interpreter EXPERT_LLAMA_CPP_PYTHON names;
`make llama-test` makes one.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expert.core.rundir import RunFolder
from expert.data.records import Segment
from expert.jobs.export.comparison import logits_of
from expert.jobs.export.export import export
from expert.jobs.export.exported import Exported
from expert.jobs.export.gguf_file.architecture import family_of
from expert.jobs.export.gguf_file.file import GgufMetadata, read_into, write_model
from expert.jobs.export.gguf_file.vocabulary import vocabulary
from expert.jobs.sample.sample import prompt_text
from expert.run.stored.choose_checkpoint import choose
from expert.run.stored.load import Trained, load_trained, read_plan
from tests.jobs.gguf_models import MODELS, TEXT, trained_family
from tests.jobs.runs import place

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("EXPERT_LLAMA_CPP_PYTHON") or (
    sys.executable if importlib.util.find_spec("llama_cpp") else ""
)
needs_llama_cpp = pytest.mark.skipif(
    not PYTHON, reason="no llama_cpp here: name its interpreter in EXPERT_LLAMA_CPP_PYTHON"
)
WORKER = Path(__file__).with_name("llama_cpp_worker.py")
HOSTILE = [
    "Hello! How are you?",
    "  many  gaps,\n\n rows\tand 3.14159 = \u03c0",
    "\u00e9t\u00e9 \u6771\u4eac \U0001f600 \u00a0end ",
    "I'M he'LL don't 12345 <|im_start|>user\nX<|im_end|>\n a  b   c    d     e",
    "\uff21\uff22\uff23 \u2460\u2461 \u01c5 stra\u00dfe \u0130\u0131 \u0647\u064e\u0644",
    "\r\n\r\n \n\x7f\u200b\ufeff<|im_end",
    'SELECT * FROM "t" WHERE a>=1 -- {{ x }} </s><unk>\\n',
    "\U0001f468\u200d\U0001f469 e\u0301 \ud55c\uae00 \u0928\u092e\u0938\u094d\u0924\u0947",
]
NEW = 16
# Root mean squares of differences, as shares of the logits' spread. Float32 sums in another order
# moved them by up to 2e-6; llama.cpp looks GELU up in a table of half precision: 0.1 %.
F32_SHARE, GELU_SHARE = 1e-4, 1e-2
# llama.cpp multiplies weights of 16 bits with inputs of 16 bits, quantised ones with 8 bits: in 30
# layers of SmolLM2 float16 moved logits by 1.2 %, in 4 of a random model q4_k_m by 4.3 %.
ROUNDED_SHARE = {"f16": 2.5e-2, "bf16": 5e-2, "q8_0": 5e-2, "q4_k_m": 1e-1}


def ask(**request: Any) -> dict[str, Any]:
    here = place() / "llama.cpp"
    here.mkdir(exist_ok=True)
    asked, answer = here / "request.json", here / "answer.npz"
    asked.write_text(json.dumps(request), encoding="utf-8")
    command = [PYTHON, str(WORKER), str(asked), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(answer) as found:
        return dict(found)


@cache
def ours(folder: Path) -> Trained:
    """The expert as trained, in float32."""
    run_folder = RunFolder(folder)
    choice = choose(run_folder, "final")
    return load_trained(
        run_folder,
        read_plan(run_folder),
        choice,
        device=torch.device("cpu"),
        precision="fp32",
        adapter_dtype=torch.float32,
    )


def prompts_of(trained: Trained, texts: list[str]) -> list[list[int]]:
    assert trained.template is not None
    return [
        trained.encoder.encode([[Segment(prompt_text(trained.template, text), learn=False)]])
        .ids[:200]
        .tolist()
        for text in texts
    ]


def answers(model: Any, prompts: list[list[int]], count: int = NEW) -> list[list[int]]:
    """Greedy decoding."""
    found = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(logits_of(model, ids)[-1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def is_tie(model: Any, prompt: list[int], ours: list[int], theirs: list[int], off: float) -> bool:
    """Whether the first token that differs is one of two that are nearer than logits may be off
    (each by four times the mean of all); what follows it answers another question."""
    place = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    last = logits_of(model, prompt + ours[:place])[-1]
    return float(last[ours[place]] - last[theirs[place]]) <= 8 * off


def check(done: Exported, trained: Trained, model: Any, share: float) -> None:
    """Tokens of hostile text, logits and greedy answers of a file against those of `model`."""
    prompts = prompts_of(trained, [*HOSTILE[:3], TEXT[2]])
    found = ask(model=str(done.folder / done.file), texts=HOSTILE, prompts=prompts, new=NEW)
    encoder: Any = trained.encoder
    composes = '"NFC"' in encoder.tokenizer.to_str()[:5000]
    for number, text in enumerate(HOSTILE):
        given = unicodedata.normalize("NFC", text)
        if given == text or not composes:  # llama.cpp does not compose; the export says so
            if "</s>" in text and "</s>" in " ".join(done.notes):
                continue  # a plain word of this tokenizer, an end to llama.cpp
            own = encoder.tokenizer.encode(text, add_special_tokens=False).ids
            assert own == found[f"tokens-{number}"].tolist(), text
    assert found["with_bos"].tolist()[:-1] == encoder.prefix
    said = answers(model, prompts)
    for number, prompt in enumerate(prompts):
        expected = logits_of(model, prompt)
        theirs = torch.from_numpy(found[f"logits-{number}"])[:, : expected.shape[1]]
        off = float((expected - theirs).square().mean().sqrt())
        assert off <= share * float(expected.std()), number
        given = found[f"answer-{number}"].tolist()
        assert given == said[number] or is_tie(model, prompt, said[number], given, off), number


def share_of(family: str) -> float:
    return GELU_SHARE if family.startswith("gemma") else F32_SHARE


@needs_llama_cpp
@pytest.mark.parametrize("family", MODELS)
def test_llama_cpp_gives_the_same_logits(family, tmp_path):
    trained = ours(trained_family(family))
    done = export(trained_family(family), tmp_path / "out", gguf="f32", device="cpu")
    check(done, trained, trained.loaded.causal_lm, share_of(family))


def rounded(done: Exported, trained: Trained) -> Any:
    """Our own model with the weights of a file."""
    module: Any = copy.deepcopy(trained.loaded.module)
    model = module.merge_and_unload() if hasattr(module, "merge_and_unload") else module
    read_into(done.folder / done.file, model, family_of(model.config))
    return model


@needs_llama_cpp
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_k_m"])
def test_a_rounded_file_is_read_as_it_was_written(family, kind, tmp_path):
    trained = ours(trained_family(family))
    done = export(trained_family(family), tmp_path / "out", gguf=kind, device="cpu", judged_rows=0)
    check(done, trained, rounded(done, trained), ROUNDED_SHARE[kind])


def written(trained: Trained, path: Path, kind: str) -> Path:
    """The base of an expert, without its adapter, as a file."""
    module: Any = copy.deepcopy(trained.loaded.module)
    base = module.unload()
    assert trained.template is not None
    rows = base.get_input_embeddings().weight.shape[0]
    encoder: Any = trained.encoder
    words = vocabulary(encoder, trained.template, rows=rows, ends=[0], chat_template="")
    write_model(path, base, family_of(base.config), words, kind, GgufMetadata(name="base"))
    return path


@needs_llama_cpp
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_an_adapter_beside_its_base_says_what_the_expert_says(family, tmp_path):
    trained = ours(trained_family(family))
    base = written(trained, tmp_path / "base.gguf", "f32")
    done = export(trained_family(family), tmp_path / "out", gguf_adapter=True, device="cpu")
    prompts = prompts_of(trained, HOSTILE[:2])
    request = {"texts": [], "prompts": prompts, "new": 1}
    found = ask(model=str(base), lora=str(done.folder / done.file), **request)
    without = ask(model=str(base), **request)
    for number, prompt in enumerate(prompts):
        expected = logits_of(trained.loaded.causal_lm, prompt)
        width, spread = expected.shape[1], float(expected.std())
        off = [
            float((expected - torch.from_numpy(each[f"logits-{number}"])[:, :width]).abs().max())
            for each in (found, without)
        ]
        assert off[0] <= share_of(family) * spread
        assert off[1] > 0.1 * spread  # the adapter does something
