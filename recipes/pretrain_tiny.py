"""Pretrain `tiny`, the small model that comes with the package, from text to weights.

    PYTHONPATH=src python3 recipes/pretrain_tiny.py --data FOLDER --out src/expert/model/tiny

FOLDER holds sql/, cypher/, json/, typescript/ and shakespeare/. The mixture, the tokenizer, the
first weights, the order of the rows and the number of updates follow from FOLDER, the running
Python's standard library and --epochs alone. With --minutes the card is measured first, and a slow
one gets fewer epochs; the number is printed. --smoke runs all of it on a CPU in under a minute,
with few rows and updates.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_mixture import Mixture, Row, make_mixture
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import expert
from expert.core.events import read_events
from expert.core.files import write_text_atomically
from expert.data.examples.column_survey import ColumnSurvey
from expert.data.examples.columns import detect_columns
from expert.data.examples.formats import example_of
from expert.data.records import Example
from expert.data.records import Row as DataRow
from expert.data.template.chat_template import ChatTemplate
from expert.data.template.templates import Template

SEED = 1337
CONTEXT = 1024
VOCABULARY = 4096
# 3,836,672 weights. Of two shapes of this size it learnt faster: after 0.33 million tokens the loss
# on held-out text was 5.25, against 5.37 of 8 layers 192 wide with 6 heads (3,935,424 weights). It
# took 6 % less time on a CPU, and has fewer kernels to launch on a GPU.
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MOST_WEIGHT_BYTES = 8_000_000

END_OF_TEXT, TURN, END_OF_TURN, PAD = SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
)
# Words take the space before them along, digits stand alone: so numbers are copied digit by digit.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SEQUENCES_PER_UPDATE = 64
"""65,536 tokens: enough to fill a large card, and still some 120 updates an epoch."""
PEAK_RATE = 3e-3
DEFAULT_EPOCHS = 40
"""320 million tokens, 80 for each weight; the best of the evaluations is kept."""
PROBE_UPDATES = 80
NOT_TRAINING_SECONDS = 75
"""Of --minutes: tokenizer, tokens, compiling, evaluating, judging."""


def train_tokenizer(mixture: Mixture, vocabulary: int) -> Tokenizer:
    """A byte-level BPE that has seen every text of the mixture that is learnt from."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(mixture.texts(), trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, its settings and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "additional_special_tokens": [TURN, END_OF_TURN],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    write_text_atomically(folder / "tokenizer_config.json", text)
    write_text_atomically(folder / "chat_template.jinja", CHAT_TEMPLATE)


def make_config(tokenizer: Tokenizer) -> LlamaConfig:
    """The shape of the model, with the tokens it ends and pads by."""
    return LlamaConfig(
        **SHAPE,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def write_base(tokenizer: Tokenizer, folder: Path) -> int:
    """A model folder with random weights; returns how many there are."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(make_config(tokenizer))
    # As in GPT-2: what every block adds to the stream is scaled by how many blocks add to it.
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= (2 * SHAPE["num_hidden_layers"]) ** -0.5
    model.save_pretrained(folder)
    write_tokenizer(tokenizer, folder)
    return int(model.num_parameters())


def write_manifest(folder: Path, tasks: dict[str, dict[str, str]], *, smoke: bool) -> Path:
    """What `expert train` is asked for: every weight, every token of every row, packed."""
    on_gpu = torch.cuda.is_available() and not smoke
    manifest = {
        "name": "tiny",
        "base_model": {"name": "base"},
        "training": {
            "dataset": {"type": "multi_task", "tasks": tasks},
            "config": {
                "adapter_type": "full",
                "train_on_prompt": True,
                "max_seq_length": CONTEXT,
                "packing": True,
                "overlong": "split",
                "learning_rate": PEAK_RATE,
                "lr_scheduler": "cosine",
                "lr_scheduler_kwargs": {"min_lr": PEAK_RATE / 20},
                "warmup_ratio": 0.02,
                "weight_decay": 0.1,
                "betas": [0.9, 0.95],
                "seed": SEED,
                "device": "cuda" if on_gpu else "cpu",
                "bf16": on_gpu,
                # A plan for so few weights expects seconds, and would not compile.
                "torch_compile": on_gpu,
                # The loss of a model without any skill falls in leaps and depends on the rows.
                "on_loss_spike": "ignore",
                "logging_steps": 1 if smoke else 20,
                "eval_every_epochs": 2,
                "save_every_epochs": 2,
                "save_total_limit": 1,
                "trackers": [],
            },
        },
    }
    path = folder / "manifest.json"
    write_text_atomically(path, json.dumps(manifest, indent=2))
    return path


def train(manifest: Path, args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Run `expert train`; returns the folder of the trained model and facts for its README."""
    index = expert.prepare(manifest).train.index
    sequences = 2 if args.smoke else SEQUENCES_PER_UPDATE
    rows = max(1, round(sequences * index.examples / index.bins))
    settings = [f"training.config.batch_size={rows}"]
    tokens = int(index.bin_lengths().sum())
    print(f"{index.examples:,} rows, {tokens:,} tokens in {index.bins:,} sequences", flush=True)
    epochs = args.epochs
    if args.minutes is not None:
        rate = probed_rate(manifest, settings)
        budget = max(30.0, 60 * args.minutes - NOT_TRAINING_SECONDS)
        epochs = min(epochs, max(1, int(budget * rate / tokens)))
        print(f"{rate:,.0f} tokens/s measured: --epochs {epochs}", flush=True)
    settings.append(f"training.config.epochs={epochs}")
    if args.smoke:
        settings += ["training.config.max_steps=3", "training.config.micro_batch_size=1"]
    began = time.perf_counter()
    done = expert.train(manifest, overrides=tuple(settings), sinks=(Told(),))
    if done.exit_code or done.final is None:
        sys.exit(f"the run in {done.folder} did not end well: exit code {done.exit_code}")
    facts = {
        "rows": index.examples,
        "tokens_per_epoch": tokens,
        "epochs": epochs,
        "updates": done.steps,
        "seconds": round(time.perf_counter() - began),
    }
    return done.final, facts


def probed_rate(manifest: Path, settings: list[str]) -> float:
    """Tokens a second of a short run, without its first updates, which compile."""
    short = [f"training.config.max_steps={PROBE_UPDATES}", "training.config.logging_steps=10"]
    quiet = ["training.config.evaluation_strategy=no", "training.config.save_strategy=no"]
    done = expert.train(manifest, overrides=(*settings, *short, *quiet))
    found = read_events(done.folder / "events.jsonl")
    rates = [event["tokens_per_second"] for event in found if event["event"] == "step"]
    shutil.rmtree(done.folder)
    return float(statistics.median(rates[len(rates) // 2 :]))


class Told:
    """Prints what is worth seeing while the run goes on."""

    def __call__(self, event: dict[str, Any]) -> None:
        names = ("step", "loss", "rate", "tokens_per_second", "token_accuracy", "reason", "text")
        shown = {name: event[name] for name in names if event.get(name) is not None}
        words = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
        print(event["event"], *words, sep="  ", flush=True)


def write_model(trained: Path, tokenizer: Tokenizer, out: Path) -> LlamaForCausalLM:
    """The weights in bfloat16 with all that is needed to load them; returns them as written."""
    model = LlamaForCausalLM(make_config(tokenizer)).bfloat16()
    missing, unexpected = model.load_state_dict(load_file(trained / "model.safetensors"), False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    model.tie_weights()
    ends = [tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)]
    pad = tokenizer.token_to_id(PAD)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)
    model.save_pretrained(out)
    write_tokenizer(tokenizer, out)
    size = (out / "model.safetensors").stat().st_size
    assert size <= MOST_WEIGHT_BYTES, f"{size:,} bytes of weights"
    (out / "model.safetensors").chmod(0o644)
    return model


@torch.no_grad()
def validation_losses(
    model: LlamaForCausalLM, tokenizer: Tokenizer, mixture: Mixture
) -> dict[str, dict[str, float]]:
    """Loss by token and bits by byte of the held-out rows of each kind, as plain transformers
    computes them from the weights as written."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.float().eval().to(device)
    found: dict[str, dict[str, float]] = {}
    for kind, rows in mixture.validation.items():
        loss, tokens, size = 0.0, 0, 0
        for text in map(written, rows):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            size += len(text.encode("utf-8"))
            for part in parts_of(ids):
                inputs = torch.tensor([part], device=device)
                logits = model(inputs).logits[0, :-1]
                loss += torch.nn.functional.cross_entropy(
                    logits, inputs[0, 1:], reduction="sum"
                ).item()
                tokens += len(part) - 1
        found[kind] = {
            "loss": loss / max(1, tokens),
            "bits_per_byte": loss / 0.6931471805599453 / max(1, size),
            "tokens": tokens,
        }
    return found


def written(row: Row) -> str:
    """A row as the product writes it in training."""
    example = example_of(DataRow(dict(row), "held out", 1), detect_columns(ColumnSurvey.of([row])))
    assert isinstance(example, Example), example
    return "".join(segment.text for segment in template().segments(example))


@cache
def template() -> Template:
    """The chat template, which takes a while to be understood."""
    return ChatTemplate(CHAT_TEMPLATE, eos=END_OF_TEXT)


def parts_of(ids: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(ids), CONTEXT):
        part = ids[start : start + CONTEXT]
        if len(part) > 1:
            yield part


def write_readme(out: Path, facts: dict[str, Any], losses: dict[str, dict[str, float]]) -> None:
    """What the model is, what it learnt from, by whose leave, and how well."""
    text = (Path(__file__).parent / "tiny_readme.md").read_text(encoding="utf-8")
    rows = (
        f"| {kind} | {v['loss']:.3f} | {v['bits_per_byte']:.3f} | {v['tokens']:,.0f} |"
        for kind, v in losses.items()
    )
    facts = {name: f"{v:,}" if isinstance(v, int) else str(v) for name, v in facts.items()}
    for name, value in {**facts, "losses": "\n".join(rows)}.items():
        text = text.replace("{" + name + "}", value)
    write_text_atomically(out / "README.md", text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain the built-in model tiny.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=DEFAULT_EPOCHS)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tiny-") as name:
        work = Path(name)
        mixture = make_mixture(args.data, rows=25 if args.smoke else None)
        tokenizer = train_tokenizer(mixture, 1024 if args.smoke else VOCABULARY)
        parameters = write_base(tokenizer, work / "base")
        manifest = write_manifest(work, mixture.write(work), smoke=args.smoke)
        print(f"{parameters:,} weights, {time.perf_counter() - began:.0f} s so far", flush=True)
        trained, facts = train(manifest, args)
        args.out.mkdir(parents=True, exist_ok=True)
        model = write_model(trained, tokenizer, args.out)
    losses = validation_losses(model, tokenizer, mixture)
    for kind, values in losses.items():
        print(f"{kind:14}  loss {values['loss']:.3f}  bits/byte {values['bits_per_byte']:.3f}")
    facts |= {"parameters": parameters, "python": platform.python_version()}
    facts |= {"torch": torch.__version__, "vocabulary": tokenizer.get_vocab_size()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    write_readme(args.out, {**facts, "device": device}, losses)
    size = (args.out / "model.safetensors").stat().st_size
    print(f"{args.out}: {size:,} bytes of weights, {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
