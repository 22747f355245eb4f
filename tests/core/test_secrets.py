"""Secrets are recognised by name, by shape and by value."""

from __future__ import annotations

import pytest

from expert.core import secrets
from expert.core.events import plain
from expert.core.secrets import HIDDEN, is_secret_name, redacted, remember_secrets
from tests.each import each

SHAPES = {
    "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwX": "hf_",
    "sk-" + "proj-a1b2c3d4e5f6g7h8i9j0": "sk-",
    "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2": "ghp_",
    "github_pat_" + "11ABCDEFG0123456789_abc": "github_pat_",
    "AKIA" + "IOSFODNN7EXAMPLE": "AKIA",
    "glpat-" + "a1b2c3d4e5f6g7h8i9j0": "glpat-",
    "xoxb-" + "123456789012-abcdef": "xoxb-",
    "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl": "eyJ",
}


@each("secret", SHAPES)
def test_tokens_of_known_services_are_known_by_their_shape(secret: str):
    assert redacted(f"not loaded with {secret}, sorry") == f"not loaded with {HIDDEN}, sorry"


@each(
    ("text", "shown"),
    [
        ("GET https://me:pass@host/rows", "GET https://***@host/rows"),
        ("Authorization: Bearer abcdefghijk", "Authorization: Bearer ***"),
        ("expert train --set hf_token=abcdef -m x", "expert train --set hf_token=*** -m x"),
        ('{"api_key": "abcdefgh"}', '{"api_key": "***"}'),
        ("{'db_password': 'abcdefgh'}", "{'db_password': '***'}"),
        ("https://host/rows?token=abcdefgh&n=1", "https://host/rows?token=***&n=1"),
        ("WANDB_API_KEY=abcdefgh", "WANDB_API_KEY=***"),
        ("expert --api-key abcdefgh", "expert --api-key ***"),
        *(
            (text, text)
            for text in (
                *("eos_token: <|im_end|>", "max_tokens=4096", "tokens=123456"),
                *("training.api_key: unknown key", "a token for the hub is read from HF_TOKEN"),
                *("git+ssh://git@github.com/me/expert", "the key=value form"),
                *("sk_customers_by_region_and_date", "step 40  loss 1.2345  1,234 tok/s"),
            )
        ),
    ],
)
def test_values_under_secret_names_are_redacted_and_other_text_stays(text: str, shown: str):
    assert redacted(text) == shown


@each("name", ["hf_token", "api_key", "apiKey", "db-password", "token", "AWS_SECRET_ACCESS_KEY"])
def test_names_of_secrets_are_known_in_every_spelling(name: str):
    assert is_secret_name(name)
    assert plain({name: "abc", "more": [{name: 12}]}) == {name: HIDDEN, "more": [{name: HIDDEN}]}


def test_other_names_are_no_secrets_nor_is_a_switch_under_the_name_of_one():
    for name in ("eos_token", "max_tokens", "key", "tokens", "tokenizer", "monkey", "secretary"):
        assert not is_secret_name(name)
    switches = {"use_auth_token": True, "api_key": None}
    assert plain(switches) == switches


def test_what_a_manifest_names_as_a_secret_is_known_by_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secrets, "_manifest_secrets", set())
    remember_secrets({"a": [{"password": "open sesame!"}], "data": "s3://me:swordfish9@host/x"})
    assert redacted("open sesame! swordfish9 open%20sesame%21") == "*** *** ***"
