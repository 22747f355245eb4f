"""Keeps tokens, keys and passwords out of everything written: by name, by shape, by value.

By name: `hf_token: …`, `api_key=…`. By shape: tokens of known services, and `user:password@` in a
URL. By value: environment variables and manifest entries with such names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

HIDDEN = "***"
MIN_SECRET_LENGTH = 8  # shorter ones would blank common words

_VARIABLE = re.compile(  # but not paths to secrets: their folders would vanish from every path
    r"(?i)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|\d|$)(?!.*(PATH|FILE|DIR|FOLDER|HOME)$)"
)
# `token` alone is a secret; eos_token, max_tokens and a cache key are not.
_NAMES = (
    r"password|passwd|passphrase|secret|credentials?|api_?key|authorization|"
    r"(?:hf|hub|hugging_?face|wandb|api|auth|access|bearer|client|private|refresh|secret|session|"
    r"github|gitlab|openai|anthropic|aws|azure|mlflow|comet|neptune)_(?:\w+_)?(?:token|key)"
)
_NAME = re.compile(rf"(?:(?:.*_)?(?:{_NAMES})(?:s|_id)?|token)")
_WRITTEN_NAME = _NAMES.replace("_", "[_-]")
_ASSIGNED = re.compile(
    rf"(?i)((?<![a-z])(?:(?:{_WRITTEN_NAME})s?|(?<![0-9_-])token)"
    rf"(?:\\?[\"']?\s*:\s*\\?[\"']|\\?[\"']?\s*=\s*\\?[\"']?)|--[\w-]*(?:{_WRITTEN_NAME})[ ])"
    r"(?!\*\*\*)[^\s\"'&,;(){}\[\]\\]{4,}"
)
_SHAPES = re.compile(
    r"""
      \bhf_[A-Za-z0-9]{16,} | \bapi_org_[A-Za-z0-9]{16,}
    | \bsk-(?:[A-Za-z0-9]+[-_])*[A-Za-z0-9]{16,}[\w-]* | \b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}
    | \bgh[pousr]_[A-Za-z0-9]{16,} | \bgithub_pat_\w{16,} | \bglpat-[\w-]{16,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{12,} | \bAIza[\w-]{30,} | \bxox[abeoprs]-[\w-]{10,}
    | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}
    | -----BEGIN[A-Z ]*PRIVATE\ KEY-----.*?(?:-----END[A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?<=://)(?!git@)[^\s/@"'<>]+(?=@)
    | (?i:(?<=\bbearer\ )|(?<=authorization:\ basic\ ))[\w.~+/=-]{8,}
    """,
    re.VERBOSE | re.DOTALL,
)
_MAY_HOLD_ONE = re.compile(
    r"(?i)token|key|secret|passw|passphrase|credential|authorization|bearer|://|hf_|"
    r"api_org|sk[-_]|rk_|gh[pousr]_|github_pat|glpat|akia|asia|aiza|xox|eyj"
)
_manifest_secrets: set[str] = set()  # secrets found in this process's manifests


def redacted(text: str, secrets: Sequence[str] | None = None) -> str:
    """The text with every secret replaced; `secrets`: the known values, if already looked up."""
    for secret in known_secrets() if secrets is None else secrets:
        text = text.replace(secret, HIDDEN)
    if not _MAY_HOLD_ONE.search(text):
        return text
    return _ASSIGNED.sub(rf"\1{HIDDEN}", _SHAPES.sub(HIDDEN, text))


@lru_cache(1000)
def is_secret_name(name: str) -> bool:
    """Whether the value under this key is a secret: `hf_token`, `apiKey`, `db-password`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-|\s|\.", "_", name).lower()
    return _NAME.fullmatch(snake) is not None


def is_secret(name: object, value: object) -> bool:
    """Whether a value is hidden because of its name; a boolean is never a secret."""
    is_text = isinstance(value, str | int | float) and not isinstance(value, bool)
    return is_text and value != "" and is_secret_name(str(name))


def known_secrets(environment: Mapping[str, str] | None = None) -> list[str]:
    """Values of variables and manifest entries that are named like secrets, as they are and
    URL-encoded."""
    variables = os.environ if environment is None else environment
    found = {
        value.strip()
        for name, value in variables.items()
        if len(value.strip()) >= MIN_SECRET_LENGTH and _VARIABLE.search(name)
    } | _manifest_secrets
    found |= {quote(value, safe="") for value in found}
    return sorted(found, key=len, reverse=True)  # longest first: one may contain another


def remember_secrets(data: Any) -> None:
    """Keep the values that `data` names as secrets out of everything this process writes."""
    _manifest_secrets.update(
        value for value in _secrets_in(data) if len(value) >= MIN_SECRET_LENGTH
    )


def _secrets_in(data: Any) -> Iterator[str]:
    if isinstance(data, Mapping):
        for name, value in data.items():
            if is_secret(name, value):
                yield str(value).strip()
            else:
                yield from _secrets_in(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _secrets_in(value)
    elif isinstance(data, str):
        for user in re.findall(r"://([^\s/@\"'<>]+)@", data):
            yield user.partition(":")[2]
