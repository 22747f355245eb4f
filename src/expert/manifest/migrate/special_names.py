"""Keys of other trainers that become several keys here, or a key of another kind."""

from __future__ import annotations

from collections.abc import Callable

from expert.manifest.migrate.moving import Migration, first_base_model, name_base_model
from expert.manifest.migrate.names import (
    ADAM_BETAS,
    AMP_NAMES,
    DTYPE_NAMES,
    LOAD_IN_NAMES,
    MODEL_NAMES,
)
from expert.manifest.notices import notice
from expert.manifest.text.document import Item, shown

# Words for the arithmetic, and what they say of bf16 and fp16.
_FLOATS = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-true", "bf16-mixed"), (True, False)),
    **dict.fromkeys(("fp16", "float16", "half", "16-true", "16-mixed"), (False, True)),
    **dict.fromkeys(("fp32", "float32", "float", "no", "32-true"), (False, False)),
}


def _split_dtype(work: Migration, item: Item) -> None:
    word = str(item.plain()).lower().removeprefix("torch.")
    if item.value is None or word == "auto":
        work.notices.append(notice("note", item, "auto: the plan chooses the precision"))
        return
    if not isinstance(item.value, str) or word not in _FLOATS:
        work.refuse(item, "bfloat16, float16, float32 or auto")
        return
    config = work.section("training", "config")
    flags = dict(zip(("bf16", "fp16"), _FLOATS[word], strict=True))
    for key, flag in flags.items():
        present = config.get(key)
        if present is not None and present.value not in (None, "auto", flag):
            work.conflict(item, f"{present.path} contradicts it")
            return
    config.update({key: _moved(item, flag) for key, flag in flags.items()})
    text = ", ".join(f"{key}: {shown(flag)}" for key, flag in flags.items())
    work.notices.append(notice("read as", item, f"training.config.{text}"))


def _moved(item: Item, value: bool | str) -> Item:
    """What a key says in other words, at the place where the user said it."""
    return Item(value, item.path, item.line, from_command_line=item.from_command_line)


def _split_amp(work: Migration, item: Item) -> None:
    if item.value is True:
        text = "mixed precision: the plan chooses bf16 or fp16"
        work.notices.append(notice("read as", item, text))
    else:
        _split_dtype(work, _moved(item, "fp32") if item.value is False else item)


def _load_in(work: Migration, item: Item) -> None:
    bits = "int4" if "4bit" in item.path else "int8"
    if item.value is None:
        return
    if not isinstance(item.value, bool):
        work.refuse(item, "true or false")
        return
    first = first_base_model(work)
    models = work.root["base_models"].value
    for number, entry in enumerate(models if isinstance(models, list) else [Item(first)]):
        home = f"base_models[{number}].quantization"
        given = entry.fields().get("quantization")
        silent = given is None or given.value in (None, "auto")
        if given is not None and not silent and item.value is not (given.value == bits):
            work.conflict(item, f"{given.path} says {shown(given.plain())}")
        elif item.value:
            entry.fields()["quantization"] = _moved(item, bits)
            work.notices.append(notice("read as", item, f"{home}: {bits}"))
        elif silent or (given is not None and given.value == "none"):
            entry.fields()["quantization"] = _moved(item, "none")
            work.notices.append(notice("read as", item, f"{home}: none"))


def _adam_beta(work: Migration, item: Item) -> None:
    config = work.section("training", "config")
    if item.value is None:
        return
    position = 0 if item.path.endswith("beta1") else 1
    betas = config.get("betas")
    if betas is not None and betas.path.endswith("betas"):
        given = betas.below(position)
        if given is None or given.plain() != item.plain():
            work.conflict(item, f"{betas.path} says {shown(betas.plain())}")
        return
    if betas is None:
        betas = config["betas"] = Item([Item(0.9), Item(0.999)], item.path, item.line)
    assert isinstance(betas.value, list)
    betas.value[position] = item
    work.notices.append(notice("read as", item, f"training.config.betas[{position}]"))


def _use_dora(work: Migration, item: Item) -> None:
    config = work.section("training", "config")
    kind = config.get("adapter_type") or Item("lora")
    word = str(kind.value).lower() if kind.value is not None else "lora"
    if item.value is None:
        return
    if not isinstance(item.value, bool):
        work.refuse(item, "true or false")
    elif item.value and word == "lora":
        config["adapter_type"] = _moved(item, "dora")
        work.notices.append(notice("read as", item, "training.config.adapter_type: dora"))
    elif item.value is not (word == "dora"):
        work.conflict(item, f"{kind.path} says {shown(kind.plain())}")


SPECIAL: dict[str, Callable[[Migration, Item], None]] = {
    **dict.fromkeys(DTYPE_NAMES, _split_dtype),
    **dict.fromkeys(AMP_NAMES, _split_amp),
    **dict.fromkeys(LOAD_IN_NAMES, _load_in),
    **dict.fromkeys(MODEL_NAMES, name_base_model),
    **dict.fromkeys(ADAM_BETAS, _adam_beta),
    "use_dora": _use_dora,
}
