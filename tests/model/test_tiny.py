"""The pretrained model that comes with the package."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from expert.planning.models.resolve import BUILT_IN

TINY = BUILT_IN / "tiny"
pytestmark = pytest.mark.skipif(
    not (TINY / "model.safetensors").is_file(), reason="this build comes without tiny"
)


def test_its_weights_take_at_most_eight_megabytes_in_bfloat16():
    assert (TINY / "model.safetensors").stat().st_size <= 8_000_000
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.max_position_embeddings == 1024
    assert model.config.tie_word_embeddings


def test_its_tokenizer_writes_turns_and_gives_every_text_back():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert len(tokenizer) == 4096
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    written = tokenizer.apply_chat_template(turns, tokenize=False)
    assert written == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    text = "naïve  SELECT 1234\n\tß 🙂"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
    assert [tokenizer(name).input_ids for name in names] == [[0], [1], [2], [3]]


def test_its_readme_names_the_sources_and_their_licences():
    readme = (TINY / "README.md").read_text(encoding="utf-8")
    for words in ("BSD 3-Clause", "CC BY 4.0", "CC0 1.0", "PSF License", "Salesforce Research"):
        assert words in readme
