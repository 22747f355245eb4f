"""Soft prompts: first values, places in packed rows, and PEFT's own reading of what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from expert.model.saving import save_trained
from expert.model.soft_prompts import SoftPrompts, make_soft_prompts
from tests.each import each
from tests.model.models import (
    documents,
    load,
    make_batch,
    plain_base,
    refusal,
)

# Float32 keeps 24 bits; packed rows and single documents sum in other orders: some roundings.
FLOAT_ERROR = 200 * 2**-24


def made(*prompts: dict[str, Any], seed: int = 0, **options: Any) -> SoftPrompts:
    embedding = options.pop("embedding", nn.Embedding.from_pretrained(EMBEDDING))
    options.setdefault("encode", lambda text: [ord(character) - 97 for character in text])
    found = make_soft_prompts(prompts, embedding, seed=seed, dtype=torch.float32, **options)
    assert found is not None
    return found


EMBEDDING = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)) * 0.3


def test_first_values_depend_on_the_seed_alone():
    wanted = [{"name": "a", "tokens": 4}, {"name": "b", "tokens": 3, "init_method": "vocab_sample"}]
    torch.manual_seed(1)
    first = made(*wanted).rows()
    torch.manual_seed(2)
    assert torch.equal(first, made(*wanted).rows())
    assert not torch.equal(first, made(*wanted, seed=1).rows())


def test_several_prompts_lie_one_after_the_other():
    prompts = made({"name": "a", "tokens": 2}, {"name": "b", "tokens": 3})
    rows = prompts.rows()
    embedding = torch.nn.Embedding.from_pretrained(EMBEDDING)
    tokens = torch.tensor([[0, 0, 0, 0, 0, 7, 8, 0, 0, 0, 0, 0, 9]], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]], dtype=torch.int32)
    mask = (positions < 5) & (tokens == 0)
    found = prompts.embed(embedding, tokens, positions, mask)[0]
    assert torch.equal(found[:5], rows)
    assert torch.equal(found[7:12], rows)
    assert torch.equal(found[[5, 6, 12]], EMBEDDING[[7, 8, 9]])
    found.sum().backward()
    assert torch.equal(prompts.prompts[0].grad, torch.full((2, 8), 2.0))
    assert torch.equal(prompts.prompts[1].grad, torch.full((3, 8), 2.0))


def test_plain_peft_gives_the_logits_of_our_packed_rows(qwen: Path, tmp_path: Path):
    from peft import PeftModel

    loaded = load(qwen, "none", soft_prompts=[{"name": "style", "tokens": 3}])
    found = documents(7, 5)
    batch = make_batch([found], soft_tokens=3)
    with torch.no_grad():
        logits = loaded.hidden(batch) @ loaded.head().T
    save_trained(loaded, tmp_path)
    plain = PeftModel.from_pretrained(plain_base(qwen), tmp_path).eval()
    for document, ours in zip(found, [logits[:10], logits[10:18]], strict=True):
        with torch.no_grad():
            theirs = plain(input_ids=torch.tensor([document])).logits[0]
        largest = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=FLOAT_ERROR, atol=FLOAT_ERROR * largest)


def test_prompts_beside_an_adapter_have_folders_of_their_own(qwen: Path, tmp_path: Path):
    prompts = [{"name": "style", "tokens": 3}, {"name": "task", "tokens": 2}]
    loaded = load(qwen, soft_prompts=prompts)
    save_trained(loaded, tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("adapter_*")}
    parts = ("", "soft_prompts/style/", "soft_prompts/task/")
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert files == {part + name for part in parts for name in names}


@each(
    ("prompts", "told"),
    [
        (
            [{"name": "a", "tokens": 2, "init_method": "text"}],
            "soft_prompts: a: init_method text needs an init_text and a tokenizer  (add",
        ),
        ([{"name": "a"}, {"name": "a"}], "two prompts have the same name: a, a"),
        *(([{"name": name}], "cannot be the name of a folder") for name in ("../up", "a/b", "..")),
    ],
)
def test_prompts_that_cannot_be_made_are_refused(prompts, told):
    assert told in refusal(lambda: made(*prompts))


def test_first_values_are_as_large_as_what_a_scaling_embedding_gives():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    scaled = Gemma3TextScaledWordEmbedding(50, 8, padding_idx=0, embed_scale=8**0.5)
    with torch.no_grad():
        scaled.weight.copy_(EMBEDDING)
    rows = made(
        {"name": "a", "tokens": 3, "init_method": "text", "init_text": "bcd"}, embedding=scaled
    )
    torch.testing.assert_close(rows.rows(), EMBEDDING[[1, 2, 3]] * 8**0.5)
    noise = {"name": "a", "tokens": 500}
    plain, large = made(noise).rows(), made(noise, embedding=scaled).rows()
    torch.testing.assert_close(large, plain * 8**0.5)
