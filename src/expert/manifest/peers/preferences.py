"""Preference training of other trainers: which method, the values of its loss, its rows."""

from __future__ import annotations

from expert.manifest.migrate.migration import Entries, Migration, take, with_value
from expert.manifest.schema.kinds import DPO_LOSSES, PREFERENCES
from expert.manifest.text.item import Item

OTHER_METHODS = ("ppo", "rm", "grpo", "gdpo", "rloo", "bco")
"""Values of `stage` (LLaMA-Factory) and `rl` (Axolotl) that are not built."""
ROW_TYPES = ("bradley_terry", "stepwise_supervised")
"""How values of `type` begin for rows of other methods, in an entry of Axolotl's `datasets`."""
PAIR_TYPES = ("chatml.", "llama3.", "chat_template.", "user_defined.", "passthrough.")
"""The same for rows of pairs, whose columns are found."""
_KEYS = {
    **dict.fromkeys(("pref_beta", "rl_beta", "dpo_beta", "orpo_alpha"), "beta"),
    **dict.fromkeys(("pref_ftx", "rpo_alpha", "cpo_alpha"), "sft_weight"),
    "dpo_label_smoothing": "label_smoothing",
    **dict.fromkeys(("kto_chosen_weight", "kto_desirable_weight"), "desirable_weight"),
    **dict.fromkeys(("kto_rejected_weight", "kto_undesirable_weight"), "undesirable_weight"),
}
_OF_DPO = ("max_prompt_length", "precompute_ref_log_probs", "rpo_alpha", "label_smoothing")
"""Arguments of TRL that only DPO and its family have."""
_OF_KTO = ("desirable_weight", "undesirable_weight")
_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "sequence_len")
_THEIRS = {
    "TRL": {"learning_rate": 1e-6, "max_seq_length": 2048, "simpo_gamma": 0.5},
    "LLaMA-Factory": {"simpo_gamma": 0.5},
    "Axolotl": {"simpo_gamma": 0.5},
}
"""Defaults of trainers, where preference training here would use others."""


def read_preferences(work: Migration, trainer: str) -> None:
    """Set `method` and the values of its loss, if the file trains on preferences."""
    method = _method(work)
    if not method:
        return
    root, none = work.root, Item(None)
    work.seen.add("preferences")
    for key, home in _KEYS.items():
        if (item := take(root, key)).value not in (None, "", [], {}):
            work.place(root, home, item, f"training.config.{home}")
    smoothing = root.get("label_smoothing", none)
    if trainer == "TRL" and smoothing.value and root.get("loss_type", none).value != "robust":
        work.unused(root.pop("label_smoothing"), "only the loss robust uses it there")
    if method == "orpo" and trainer == "TRL":
        text = "there ORPO also trains on the prompt; here on the answers alone"
        work.report("warning", root["method"], text)
    for key in _LENGTHS:
        if length := root.get(key, none).whole:
            root[key] = with_value(root[key], 2 * length)
            text = f"{2 * length}, for a prompt and both answers (there for one of them)"
            work.read_as(root[key], f"training.config.max_seq_length: {text}")
    if method == "simpo" and trainer == "TRL":
        root.setdefault("sft_weight", Item(1.0, "sft_weight"))  # cpo_alpha
    theirs = {"epochs": 3, "beta": 0.1, **_THEIRS.get(trainer, {})}
    if method != "simpo":
        theirs.pop("simpo_gamma", None)
    work.defaults |= theirs


def _method(work: Migration) -> str:
    """The method of the file; "" for supervised fine-tuning."""
    root, none, found = work.root, Item(None), Item(None)
    for key in ("stage", "rl"):
        word = str(root.get(key, none).value).lower()
        if word in OTHER_METHODS:
            known = ", ".join(("sft", *PREFERENCES))
            work.problem(root.pop(key), f"{word} is not supported", f"supported are {known}")
            work.seen.add("preferences")
            return ""
        if word in PREFERENCES:
            found = root.pop(key)
    loss = take(root, "pref_loss") if "pref_loss" in root else take(root, "loss_type")
    its = str(loss.value).lower()
    if found.value is None:  # TRL: one script for each method, so only its arguments tell
        told = ("cpo_alpha", *_OF_KTO, "beta", *_OF_DPO) if not work.is_expert_manifest else ()
        given = [root[key] for key in told if root.get(key, none).value is not None]
        is_loss = its in (*DPO_LOSSES, "simpo")
        if not given and not is_loss:
            if loss.value is not None:
                root["loss_type"] = loss
            return ""
        found = loss if is_loss else given[0]
        word = (
            "cpo"
            if "cpo_alpha" in root
            else "kto"
            if {*_OF_KTO} & root.keys()
            else str(root.get("method", Item("dpo")).value).lower()
        )
    else:
        word = str(found.value).lower()
    if its in PREFERENCES:
        word = its
    elif loss.value is not None and its != "sigmoid":
        root["loss_type"] = loss
    root["method"] = with_value(found, word)
    work.read_as(found, f"training.config.method: {word}")
    return word


def pair_columns(work: Migration, fields: Entries) -> Entries:
    """The columns of preferred and rejected answers that an entry of a data set names."""
    names = {
        "field_chosen": "response",
        "chosen": "response",
        "field_rejected": "rejected",
        "rejected": "rejected",
    }
    found: Entries = {}
    for key, part in names.items():
        item = take(fields, key)
        if item.value not in (None, "chosen", "rejected"):
            found[part] = item
    take(fields, "ranking")
    label = take(fields, "kto_tag")
    return found | ({"label": label} if label.value not in (None, "label", "kto_tag") else {})
