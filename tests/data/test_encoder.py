"""Segments to ids: what is trained on, no second bos, the same ids as in generation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.data.records import DataError, Segment
from expert.data.tokens.encoder import (
    CharacterEncoder,
    TextEncoder,
    load_tokenizer,
    read_special_tokens,
)
from expert.planning.models.model_files import InvalidModelFolder
from tests.data.tokenizers import model_folder, small_encoder, small_tokenizer, tokenizer_json

texts = st.text(alphabet=st.sampled_from('abc \n{}":,é漢<|im_end|>'), min_size=1, max_size=30)
documents = st.lists(st.builds(Segment, texts, st.booleans()), min_size=1, max_size=4)


def one_by_one(encoder: TextEncoder, segments: list[Segment]) -> tuple[list[int], list[bool]]:
    """The slow, obvious way: every segment alone, every token with its flag."""
    ids = list(encoder.prefix)
    learnt = [False] * len(ids)
    for segment in segments:
        part = encoder.tokenizer.encode(segment.text, add_special_tokens=False).ids
        ids += part
        learnt += [segment.learn] * len(part)
    return ids, learnt


def flags(length: int, spans: np.ndarray) -> list[bool]:
    mask = np.zeros(length, bool)
    for start, stop in spans.reshape(-1, 2):
        mask[start:stop] = True
    return mask.tolist()


@given(st.lists(documents, min_size=1, max_size=5))
def test_trained_tokens_are_those_of_the_trained_segments(batch):
    """Together or one by one: where no token straddles two segments both give the same text, and
    exactly the trained text is always trained on."""
    encoder = small_encoder()
    made = encoder.encode(batch)
    ids = np.split(made.ids, np.cumsum(made.lengths)[:-1])
    spans = np.split(made.spans, np.cumsum(made.span_counts)[:-1])
    for segments, tokens, learnt in zip(batch, ids, spans, strict=True):
        decoded = encoder.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        assert decoded == "".join(segment.text for segment in segments)
        mask = flags(len(tokens), learnt)
        kept = [token for token, flag in zip(tokens.tolist(), mask, strict=True) if flag]
        text = encoder.tokenizer.decode(kept, skip_special_tokens=False)
        assert text == "".join(segment.text for segment in segments if segment.learn)


CHAT = "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "answer"), [("The qui", "ck brown fox"), (CHAT, "SELECT 1;<|im_end|>")]
)
def test_an_answer_is_encoded_after_its_prompt_alone(prompt, answer):
    """No token straddles the two."""
    encoder = small_encoder()
    segments = [Segment(prompt, False), Segment(answer, True)]
    made = encoder.encode([segments])
    ids, learnt = one_by_one(encoder, segments)
    assert made.ids.tolist() == ids
    assert flags(len(ids), made.spans) == learnt
    assert made.spans[-1] == len(ids)  # the end token is trained on


def test_a_bos_begins_every_document_once_whoever_writes_it():
    bos = small_tokenizer().token_to_id("<s>")
    made = small_encoder(adds_bos=True).encode([[Segment("fox", True)], [Segment("dog", True)]])
    first, second = np.split(made.ids, [made.lengths[0]])
    assert first[0] == second[0] == bos
    assert made.spans.reshape(-1, 2)[:, 0].tolist() == [1, 1]  # and is not trained on
    encoder = small_encoder(adds_bos=True, template_adds_bos=True)
    made = encoder.encode([[Segment("<s>fox", True)]])
    assert made.ids.tolist().count(bos) == 1


def test_the_fingerprint_follows_the_files_and_the_bos_and_loads_no_tokenizer(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "expert.data.tokens.encoder.load_tokenizer", lambda _: pytest.fail("loaded")
    )

    def fingerprint(adds_bos: bool = False) -> str:
        return TextEncoder.of_folder(tmp_path, template_adds_bos=adds_bos).fingerprint

    model_folder(tmp_path)
    prints = [fingerprint(), fingerprint()]
    model_folder(tmp_path, eos_token="<|endoftext|>")
    prints.append(fingerprint())
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(True), encoding="utf-8")
    prints += [fingerprint(), fingerprint(True)]
    assert len(set(prints)) == 4


def test_characters_are_tokens_in_the_order_of_their_code_points():
    encoder = CharacterEncoder("hello\nwörld")
    assert encoder.characters == "\ndehlorwö"
    made = encoder.encode([[Segment("hell", True)], [Segment("ö", True)]])
    assert encoder.decode(made.ids[:4].tolist()) == "hell"
    assert made.lengths.tolist() == [4, 1]
    assert made.spans.tolist() == [0, 4, 0, 1]
    with pytest.raises(DataError, match="the character 'z' is not in the model's training text"):
        encoder.encode([[Segment("hz", True)]])


def test_special_tokens_are_read_from_the_model_folder(tmp_path):
    folder = model_folder(tmp_path, bos_token={"content": "<s>"}, chat_template="{{ x }}")
    special = read_special_tokens(folder)
    assert (special.bos, special.eos, special.chat_template) == ("<s>", "<|im_end|>", "{{ x }}")
    # Of several templates the default one, unless there is a file of it; ends in another file.
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    model_folder(tmp_path, chat_template=named, eos_token=None)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    special = read_special_tokens(folder)
    assert (special.eos, special.chat_template) == ("<|endoftext|>", "b")
    (folder / "chat_template.jinja").write_text("c", encoding="utf-8")
    assert read_special_tokens(folder).chat_template == "c"


def test_broken_tokenizer_files_and_a_missing_folder_are_told(tmp_path):
    folder = model_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InvalidModelFolder, match=r"tokenizer.json: not a tokenizer"):
        load_tokenizer(folder)
    with pytest.raises(DataError, match=r"tokenizer_config.json: cannot be read"):
        read_special_tokens(folder)
    with pytest.raises(DataError, match="no such model folder"):
        load_tokenizer(tmp_path / "absent")
