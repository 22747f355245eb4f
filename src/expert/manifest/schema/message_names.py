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
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields with the reasoning before an answer."""
TOOL_COLUMNS = ("tools", "functions")
"""Columns with the tools offered in a conversation."""
YES_OR_NO = ("train", "trainable", "train_on_turn", "loss")
TRAINED = ("weight", "loss_weight", *YES_OR_NO)
"""Fields for whether an answer is trained on, as used by OpenAI, Axolotl and others."""
TRAINED_IN_PARTS = "train_detail"
"""Field for which characters of a message are trained on; such rows are refused."""
