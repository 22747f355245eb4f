"""Keys of other trainers that become a key here by a rule: templates, bits, attention, rates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from expert.core.errors import Problem
from expert.manifest.migrate.moving import Entries, Migration, first_base_model
from expert.manifest.notices import notice
from expert.manifest.text.document import Item, shown

OTHER_METHODS = ("dpo", "ppo", "kto", "rm", "orpo", "ipo", "simpo", "grpo", "gdpo", "rloo")
"""Values of `stage` and `rl` that name no supervised fine-tuning."""
MEDIA_TEMPLATE = re.compile(
    r"_vl\b|_vl_|vl$|llava|pixtral|vision|omni|audio|internvl|minicpm_[vo]|paligemma|mllama|glm4v"
    r"|voxtral|idefics|smolvlm|moss_?vl|gemma3n"
)
_FAMILIES = (
    *("llama", "qwen", "gemma", "mistral", "phi", "deepseek", "falcon", "yi", "command"),
    *("cohere", "granite", "olmo", "glm", "exaone", "smollm", "ministral"),
)
_ATTENTIONS = {
    "fa2": "flash",
    "fa3": "flash",
    "flash": "flash",
    "flash_attention_2": "flash",
    "sdpa": "sdpa",
    "disabled": "eager",
    "eager": "eager",
    "flex": "flex",
    "flex_attention": "flex",
    "auto": "auto",
}
_ATTENTION_SWITCHES = {
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex",
    "flash_attention_3": "flash",
}
_QUANTIZE = {
    **dict.fromkeys(("bnb.nf4", "bnb.nf4-dq", "nf4", "nf4-dq"), "int4"),
    **dict.fromkeys(("bnb.int8", "bnb.int8-training", "int8-training"), "int8"),
}
_OVERLONG = {"drop": "drop", "truncate": "cut"}


def read_switches(work: Migration, zone: Entries) -> None:
    """Every such key of a section, each with its notice or its problem."""
    for key in [key for key in zone if key in SWITCHES]:
        if key in _ONLY_OUTSIDE and (zone is not work.root or _is_whole(work)):
            continue
        item = zone.pop(key)
        if item.value is not None:
            SWITCHES[key](work, zone, item)


def _is_whole(work: Migration) -> bool:
    """A manifest of our own layout, whose top level describes the expert."""
    return work.root.get("training", Item(None)).get("config") is not None


def read_methods(work: Migration) -> None:
    """`stage` of LLaMA-Factory and `rl` of Axolotl: only supervised fine-tuning is built."""
    for key in ("stage", "rl"):
        item = work.root.get(key)
        word = str(item.value).lower() if item is not None else ""
        if item is None or isinstance(item.value, dict | list):
            continue
        if word in OTHER_METHODS:
            del work.root[key]
            work.seen.add("another method")
            what = f"{word} is not built: only sft (supervised fine-tuning) is"
            fix = "use rows with answers, and leave the key out"
            work.problems.append(Problem(item.path, what, fix, item.line))
        elif key == "rl" and item.value in (None, False):
            del work.root[key]


def _put(work: Migration, zone: Entries, key: str, value: str | bool | float, item: Item) -> None:
    """A key beside the one it comes from, unless it is there; moved to its home with the others."""
    present = zone.get(key)
    if present is not None and present.value not in (None, "auto", value):
        work.conflict(item, f"{present.path} says {shown(present.plain())}")
        return
    zone[key] = Item(value, item.path, item.line, from_command_line=item.from_command_line)


def _told(work: Migration, item: Item, text: str) -> None:
    work.notices.append(notice("read as", item, text))


def _no(work: Migration, item: Item, what: str, fix: str) -> None:
    work.problems.append(Problem(item.path, what, fix, item.line))


# --- templates -----------------------------------------------------------------------------------


def _template(work: Migration, zone: Entries, item: Item) -> None:
    """`template` and `chat_template`: ours where it has that name, else the tokenizer's own."""
    word = str(item.value).lower()
    if not isinstance(item.value, str):
        work.refuse(item, "the name of a template")
    elif MEDIA_TEMPLATE.search(word):
        what = f"{word} is a template for images or sound"
        _no(work, item, what, "only text is trained: name a model and a template for text")
    elif word in ("alpaca", "chatml"):
        _put(work, zone, "prompt_template", word, item)
        _told(work, item, f"base_models[0].prompt_template: {word}")
    elif word == "jinja":
        return  # chat_template_jinja is refused, and says why
    elif word == "empty":
        what = "empty: rows without any marks"
        _no(work, item, what, "name the column with the whole text: training.dataset.text_field")
    elif word.startswith("tokenizer_default") or any(f in word for f in _FAMILIES):
        _put(work, zone, "prompt_template", "auto", item)
        text = "base_models[0].prompt_template: auto, the tokenizer's own chat template"
        _told(work, item, text)
    else:
        text = f"there is no {shown(word)} template here; the tokenizer's own is used"
        work.notices.append(notice("warning", item, text))


# --- bits ----------------------------------------------------------------------------------------


def _quant_type(work: Migration, _: Entries, item: Item) -> None:
    if item.value == "nf4":
        work.notices.append(notice("note", item, "quantization: int4 is NF4"))
    elif item.value == "fp4":
        what = "fp4 is not built: quantization: int4 is NF4, which is closer to the weights"
        _no(work, item, what, "write nf4, or leave it out")
    else:
        work.refuse(item, "nf4")


def _compute_dtype(work: Migration, zone: Entries, item: Item) -> None:
    """Quantised weights are computed with in the precision of the run."""
    config = work.root.get("training", Item(None)).get("config")
    zones = [zone, work.root, config.fields() if config is not None else {}]
    given = [key for key in ("bf16", "fp16") if any(key in each for each in zones)]
    names = ("dtype", "torch_dtype", "slm_dtype", "precision")
    if given or any(name in each for name in names for each in zones):
        text = "a quantised base is computed with in the precision of the run: bf16 or fp16"
        work.notices.append(notice("superseded", item, text))
    else:
        zone["torch_dtype"] = item


def _double_quant(work: Migration, _: Entries, item: Item) -> None:
    if item.value is True:
        work.notices.append(notice("note", item, "quantization: int4 quantises its scales too"))
    elif item.value is False:
        text = "int4 always quantises its scales too: 0.4 bits a weight less"
        work.notices.append(notice("superseded", item, text))
    else:
        work.refuse(item, "true or false")


def _quant_storage(work: Migration, _: Entries, item: Item) -> None:
    text = "only sharding over several GPUs needs another type to store them in"
    if str(item.value).removeprefix("torch.") != "uint8":
        work.notices.append(notice("superseded", item, text))


def _quantize(work: Migration, zone: Entries, item: Item) -> None:
    """LitGPT's."""
    bits = _QUANTIZE.get(str(item.value))
    if bits is None:
        work.refuse(item, "bnb.nf4, bnb.nf4-dq or bnb.int8-training")
        return
    _put(work, zone, "quantization", bits, item)
    _told(work, item, f"base_models[0].quantization: {bits}")


def _half(work: Migration, zone: Entries, item: Item) -> None:
    """float16: true, bfloat16: true, pure_bf16: true."""
    key = "fp16" if "float16" in item.path.rpartition(".")[2].replace("bfloat16", "") else "bf16"
    if item.value is True:
        other = zone.get(key)
        if other is not None and other.value is False:
            del zone[key]  # Axolotl's `float16` is another switch than its `fp16`
        _put(work, zone, key, True, item)
        _told(work, item, f"training.config.{key}")


# --- attention, targets, adapters ----------------------------------------------------------------


def _attention(work: Migration, zone: Entries, item: Item) -> None:
    """`attn`, `flash_attn`: a name, or true."""
    if isinstance(item.value, bool):
        if item.value:
            _put(work, zone, "attention", "flash", item)
            _told(work, item, "training.config.attention: flash")
        return
    word = str(item.value).lower()
    known = _ATTENTIONS.get(word) or ("flash" if "flash-attn" in word else None)
    if known is None:
        work.refuse(item, "auto, flash, sdpa, flex or eager")
        return
    _put(work, zone, "attention", known, item)
    _told(work, item, f"training.config.attention: {known}")


def _attention_switch(work: Migration, zone: Entries, item: Item) -> None:
    if item.value is not True:
        return
    known = _ATTENTION_SWITCHES[item.path.rpartition(".")[2]]
    _put(work, zone, "attention", known, item)
    _told(work, item, f"training.config.attention: {known}")


def _use_rslora(work: Migration, zone: Entries, item: Item) -> None:
    """alpha / √rank is the scale alpha·√rank would give here."""
    if item.value is not True:
        return
    names = {"rank": ("lora_r", "lora_rank", "r", "rank"), "alpha": ("lora_alpha", "alpha")}
    config = work.root.get("training", Item(None)).get("config")
    zones = [zone, config.fields() if config is not None else {}]
    rank, alpha = (
        next((each[name].value for each in zones for name in aliases if name in each), None)
        for aliases in names.values()
    )
    what = "rank-stabilised scaling (alpha / √rank) is not built: the scale here is alpha / rank"
    fix = "remove it"
    if type(rank) is int and type(alpha) is int and rank > 0:
        fix = f"remove it and write alpha: {round(alpha * math.sqrt(rank))} for the same scale"
    _no(work, item, what, fix)


def _full(work: Migration, zone: Entries, item: Item) -> None:
    """Unsloth's full_finetuning; TRL's use_peft says the opposite."""
    name = item.path.rpartition(".")[2]
    wanted = item.value is True if name == "full_finetuning" else item.value is False
    if isinstance(item.value, bool) and (wanted or name == "use_peft"):
        kind = "full" if wanted else "lora"
        _put(work, zone, "adapter_type", kind, item)
        _told(work, item, f"training.config.adapter_type: {kind}")


def _checkpointing(work: Migration, zone: Entries, item: Item) -> None:
    """Unsloth's use_gradient_checkpointing: "unsloth" saves memory in a way of its own."""
    if item.value == "unsloth":
        _put(work, zone, "gradient_checkpointing", "auto", item)
        _told(work, item, "training.config.gradient_checkpointing: auto, where memory needs it")
    elif item.value in (True, "true", "True", False):
        on = item.value is not False
        _put(work, zone, "gradient_checkpointing", on, item)
        _told(work, item, f"training.config.gradient_checkpointing: {shown(on)}")
    else:
        work.refuse(item, 'true, false or "unsloth"')


# --- rates and rows ------------------------------------------------------------------------------


def _min_rate(work: Migration, zone: Entries, item: Item) -> None:
    """`cosine_min_lr_ratio` of Axolotl is a share of the learning rate; `min_lr` the rate."""
    rate: object = item.value
    if item.path.rpartition(".")[2] != "min_lr":
        peak = zone.get("learning_rate", Item(None)).value
        if isinstance(peak, bool) or not isinstance(peak, int | float):
            _no(work, item, "a share of learning_rate, which is not given", "add learning_rate")
            return
        rate = item.value * peak if isinstance(item.value, int | float) else None
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        work.refuse(item, "a number")
        return
    options = zone.setdefault("lr_scheduler_kwargs", Item({}, item.path, item.line))
    options.fields()["min_lr"] = Item(rate, item.path, item.line)
    _told(work, item, f"training.config.lr_scheduler_kwargs.min_lr: {rate:g}")


def _overlong(work: Migration, zone: Entries, item: Item) -> None:
    known = _OVERLONG.get(str(item.value))
    if known is None:
        what = f"{shown(item.plain())}: no run stops for a long row"
        _no(work, item, what, "write training.config.overlong: cut, split or drop")
        return
    _put(work, zone, "overlong", known, item)
    _told(work, item, f"training.config.overlong: {known}")


def _answers_only(work: Migration, zone: Entries, item: Item) -> None:
    """completion_only_loss and assistant_only_loss of TRL; mask_prompt of LitGPT."""
    if not isinstance(item.value, bool):
        work.refuse(item, "true or false")
        return
    _put(work, zone, "train_on_prompt", not item.value, item)
    _told(work, item, f"training.config.train_on_prompt: {shown(not item.value)}")


def _packing_strategy(work: Migration, zone: Entries, item: Item) -> None:
    """TRL's: how rows are packed, where they are."""
    known = {"bfd": "best-fit", "ffd": "best-fit", "wrapped": "concat"}.get(str(item.value))
    packing = zone.get("packing")
    if known is None:
        work.refuse(item, "bfd or wrapped")
    elif packing is not None and packing.value is True:
        packing.value = known
        _told(work, item, f"training.config.packing: {known}")


def _streaming(work: Migration, zone: Entries, item: Item) -> None:
    _put(work, zone, "streaming", item.value is True, item)


def _on_cpu(work: Migration, zone: Entries, item: Item) -> None:
    if item.value is True:
        _put(work, zone, "device", "cpu", item)
        _told(work, item, "training.config.device: cpu")


def _tokens(work: Migration, _: Entries, item: Item) -> None:
    """A list of new tokens; in old files of Axolotl the special ones by their names."""
    if isinstance(item.value, dict):
        text = "without effect: the tokenizer's own special tokens are used"
        work.notices.append(notice("warning", item, text))
    elif item.value:
        what = "no tokens are added to a vocabulary"
        _no(work, item, what, "use the tokenizer as it is, and remove the key")


def _positions(work: Migration, zone: Entries, item: Item) -> None:
    """LLaMA-Factory has it at the top level."""
    if zone is not work.root or "model_name_or_path" not in zone:
        zone["rope_scaling"] = item  # told where it belongs
    else:
        work.later.append((_put_positions, item))


def _put_positions(work: Migration, item: Item) -> None:
    work.place(first_base_model(work), "rope_scaling", item, "base_models[0].rope_scaling")


def _revision(work: Migration, _: Entries, item: Item) -> None:
    if item.value != "main":
        work.later.append((_put_revision, item))


def _put_revision(work: Migration, item: Item) -> None:
    work.place(first_base_model(work), "revision", item, "base_models[0].revision")


SWITCHES: dict[str, Callable[[Migration, Entries, Item], None]] = {
    **dict.fromkeys(("template", "chat_template"), _template),
    **dict.fromkeys(("bnb_4bit_quant_type", "quantization_type"), _quant_type),
    "bnb_4bit_compute_dtype": _compute_dtype,
    **dict.fromkeys(
        ("bnb_4bit_use_double_quant", "double_quantization", "use_bnb_nested_quant"), _double_quant
    ),
    "bnb_4bit_quant_storage": _quant_storage,
    "quantize": _quantize,
    **dict.fromkeys(("float16", "bfloat16", "pure_bf16"), _half),
    **dict.fromkeys(("attn", "flash_attn"), _attention),
    **dict.fromkeys(_ATTENTION_SWITCHES, _attention_switch),
    **dict.fromkeys(("use_rslora", "peft_use_rslora"), _use_rslora),
    **dict.fromkeys(("full_finetuning", "use_peft"), _full),
    "use_gradient_checkpointing": _checkpointing,
    **dict.fromkeys(("cosine_min_lr_ratio", "min_lr"), _min_rate),
    "excess_length_strategy": _overlong,
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss", "mask_prompt"), _answers_only),
    "model_revision": _revision,
    "packing_strategy": _packing_strategy,
    "dataset_streaming": _streaming,
    **dict.fromkeys(("use_cpu", "no_cuda"), _on_cpu),
    "tokens": _tokens,
    "rope_scaling": _positions,
}
_ONLY_OUTSIDE = (
    "tokens",
    "rope_scaling",
    "template",
    "chat_template",
    "quantize",
    "attn",
    "min_lr",
)
"""Words that may describe an expert at the top level of a whole manifest."""
