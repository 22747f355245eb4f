"""Names in messages: roles, and fields for reasoning and for what is trained on."""

from __future__ import annotations

from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]

ROLES: dict[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields with the reasoning before an answer."""
TOOL_COLUMNS = ("tools", "functions")
"""Columns with the tools offered in a conversation."""
TRAIN_FLAGS = ("train", "trainable", "train_on_turn", "loss")
TRAIN_FIELDS = ("weight", "loss_weight", *TRAIN_FLAGS)
"""Fields for whether an answer is trained on, as used by OpenAI, Axolotl and others."""
TRAIN_DETAIL = "train_detail"
"""Field for which characters of a message are trained on; such rows are refused."""
