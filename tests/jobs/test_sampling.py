"""A trained expert answers: with its own template, its own weights, and the same for a seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from expert.answer.engine import answer_all
from expert.core.errors import ExpertError
from expert.core.rundir import RunFolder
from expert.data.records import Example, Turn
from expert.data.template.text_tools import text_tools
from expert.jobs.sample.sample import Conversation, load_expert, prompt_text, sample
from expert.model.chargpt import load_char_gpt
from expert.run.stored.choose_checkpoint import choose
from expert.run.stored.load import load_trained, pick_device, read_plan
from tests.each import each
from tests.jobs.trained_runs import finished, finished_characters, with_plan

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def texts(run: Path, *prompts: str, **more: Any) -> list[str]:
    decoding = {"max_new_tokens": 12, **more.pop("decoding", {})}
    return [s.text for s in sample(run, prompts, decoding=decoding, **more).samples]


def greedy_ids(model: Any, ids: list[int], count: int) -> list[int]:
    """The likeliest tokens, one by one, without a cache."""
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        ids = [*ids, int(logits.argmax())]
    return ids[-count:]


def prompt_ids(run: Path, prompt: str) -> list[int]:
    encoder, template = text_tools(run / "final", "chatml")
    text = template.prompt([Turn("user", prompt)])
    return list(encoder.tokenizer.encode(text, add_special_tokens=False).ids)


def said(tokenizer: Any, ids: list[int]) -> str:
    """The text of the tokens up to the one that ends an answer."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text.partition("<|im_end|>")[0].strip()


# --- the text the model is given -----------------------------------------------------------------


def test_a_prompt_ends_where_the_answer_begins_and_plain_text_before_its_end():
    _, template = text_tools(finished("lora") / "final", "chatml")
    turns = (Turn("user", "say cat 2"), Turn("assistant", "cat"))
    asked, learnt = template.segments(Example(turns=turns))
    assert prompt_text(template, "say cat 2") == asked.text
    assert learnt.learn
    whole = "".join(s.text for s in template.segments(Example(text="once upon")))
    assert prompt_text(template, "once upon", plain=True) == "once upon"
    assert whole == "once upon<|im_end|>"


# --- the model that answers ----------------------------------------------------------------------


@each("kind", ["lora", "soft"])
def test_the_answer_is_that_of_the_base_with_the_adapter_in_plain_peft(kind):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = finished(kind)
    base = AutoModelForCausalLM.from_pretrained(read_plan(RunFolder(run)).model.location)
    tokenizer = text_tools(run / "final", "chatml")[0].tokenizer
    ids = prompt_ids(run, "say cat 2")
    without = greedy_ids(base, ids, 6)
    expected = greedy_ids(PeftModel.from_pretrained(base, run / "final").eval(), ids, 6)
    assert expected != without or kind == "soft"  # it was trained on something
    [text] = texts(run, "say cat 2", decoding={"max_new_tokens": 6})
    assert text == said(tokenizer, expected)


def test_a_checkpoint_gives_its_own_weights():
    folder = RunFolder(finished("lora"))
    plan, device = read_plan(folder), pick_device("cpu")
    found = {}
    for name in ("final", "6", "checkpoint-3"):
        loaded = load_trained(folder, plan, choose(folder, name), device=device).loaded
        found[name] = torch.cat([value.flatten() for _, value in loaded.trainable])
    assert torch.equal(found["final"], found["6"])
    assert not torch.equal(found["final"], found["checkpoint-3"])


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    hot = {"temperature": 2.0}
    first = texts(finished("lora"), "say cat 2", "say red 1", seed=7, decoding=hot)
    assert texts(finished("lora"), "say cat 2", "say red 1", seed=7, decoding=hot) == first
    assert texts(finished("lora"), "say red 1", seed=7, decoding=hot) == first[1:]
    assert texts(finished("lora"), "say cat 2", seed=8, decoding=hot) != first[:1]
    # The generator of the caller is left as it was.
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    texts(finished("lora"), "say cat 2", seed=7, decoding={"temperature": 1.0})
    assert torch.equal(torch.rand(1), expected)


def test_an_answer_is_cut_before_a_stop_sequence_and_pieces_add_up_to_it():
    hot = {"temperature": 2.0, "max_new_tokens": 12}
    pieces: list[str] = []
    [whole] = texts(finished("lora"), "say cat 2", seed=1, decoding=hot, tell=pieces.append)
    assert "".join(pieces) == whole
    assert len(whole) > 8
    stop = whole[4:6]
    how = {**hot, "stop_sequences": (stop,)}
    pieces.clear()
    found = sample(finished("lora"), ["say cat 2"], seed=1, decoding=how, tell=pieces.append)
    assert found.samples[0].text == whole[: whole.index(stop)].strip()
    assert found.samples[0].ended
    assert "".join(pieces).strip() == found.samples[0].text


def test_decoding_is_the_manifests_unless_it_is_given(tmp_path):
    own = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4}
    run = with_plan(finished("lora"), tmp_path / "run", decoding=own)
    found = sample(run, ["say cat 2"], seed=1, decoding={"temperature": 0.0, "top_k": None})
    assert (found.decoding.max_new_tokens, found.decoding.temperature) == (3, 0.0)
    assert found.decoding.top_k == 4
    assert found.samples[0].tokens <= 3


# --- characters ----------------------------------------------------------------------------------


def test_a_character_model_that_was_not_finished_can_be_asked_by_its_checkpoint(tmp_path):
    unfinished = tmp_path / "run"
    shutil.copytree(finished_characters(), unfinished)
    asked = sample(finished_characters(), ["the cat"], checkpoint="best", seed=3).samples[0].text
    shutil.rmtree(unfinished / "final")
    assert sample(unfinished, ["the cat"], checkpoint="best", seed=3).samples[0].text == asked
    (unfinished / "vocabulary.json").unlink()
    with pytest.raises(ExpertError, match=r"vocabulary\.json is missing"):
        sample(unfinished, ["the cat"], checkpoint="best", seed=3)


def test_a_character_model_continues_what_it_has_learnt():
    model, characters = load_char_gpt(finished_characters() / "final")
    ids = torch.tensor([[characters.index(c) for c in "the cat"]])
    expected = model.generate(ids, 30, temperature=0.0)[0, ids.shape[1] :].tolist()
    how = {"temperature": 0.0, "max_new_tokens": 30}
    found = sample(finished_characters(), ["the cat"], decoding=how)
    assert found.plain
    assert found.samples[0].text == "".join(characters[token] for token in expected)
    assert "the" in found.samples[0].text
    again = {"temperature": 1.0, "max_new_tokens": 20}
    first = texts(finished_characters(), "the", seed=3, decoding=again)
    assert texts(finished_characters(), "the", seed=3, decoding=again) == first
    assert texts(finished_characters(), "the", seed=4, decoding=again) != first
    assert len(first[0]) == 20


def test_wrong_settings_and_a_missing_card_are_refused_at_once(monkeypatch):
    given = {"temperature": 9.0, "warmth": 1.0, "max_new_tokens": 0}
    with pytest.raises(ExpertError) as reported:
        texts(finished_characters(), "the", decoding=given)
    lines = str(reported.value).splitlines()
    assert [line.partition(":")[0].partition(".")[2] for line in lines] == [
        *("warmth", "temperature", "max_new_tokens"),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Exception, match="--device cuda: torch finds no card it can use"):
        pick_device("cuda")


# --- which state ---------------------------------------------------------------------------------


def test_a_missing_checkpoint_is_reported_with_the_existing_ones():
    folder = RunFolder(finished("lora"))
    offered = r"\(there is --checkpoint final, 3, 6\)"
    with pytest.raises(ExpertError, match=f"no checkpoint of step 4  {offered}"):
        choose(folder, "4")
    with pytest.raises(ExpertError, match=f"neither final nor best nor .*{offered}"):
        choose(folder, "latest")


def test_the_best_is_the_checkpoint_of_the_best_evaluation(tmp_path):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(finished("lora"), run.path)
    events = [
        {"event": "eval", "step": 3, "best": True},
        {"event": "eval", "step": 6, "best": True},
        {"event": "rolled_back", "step": 4},
        {"event": "eval", "step": 6, "best": False},
    ]
    run.events.write_text("\n".join(map(json.dumps, events)) + "\n", encoding="utf-8")
    assert choose(run, "best").step == 3
    shutil.rmtree(run.checkpoints / "step-000003")
    with pytest.raises(ExpertError, match="the best checkpoint, step-000003, is not kept"):
        choose(run, "best")
    with run.events.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"event": "took_best", "step": 3}) + "\n")
    assert choose(run, "best").path == run.final
    run.events.write_text("", encoding="utf-8")
    with pytest.raises(ExpertError, match="no evaluation recorded a best checkpoint"):
        choose(run, "best")


def test_a_run_that_has_not_finished_has_no_final(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished("lora"), run)
    shutil.rmtree(run / "final")
    with pytest.raises(ExpertError, match=r"there is no finished expert: it does not exist  \("):
        texts(run, "say cat 2")
    assert texts(run, "say cat 2", checkpoint="6") == texts(finished("lora"), "say cat 2")


# --- conversations and their length --------------------------------------------------------------


def test_an_answer_in_a_conversation_follows_all_that_was_said():
    run = finished("lora")
    loaded = load_expert(run, decoding={"max_new_tokens": 6}, device="cpu")
    talk = Conversation(loaded, system="be brief")
    first = talk.ask("say cat 2").text
    second = talk.ask("say dog 1").text
    turns = [Turn("system", "be brief"), Turn("user", "say cat 2"), Turn("assistant", first)]
    asked = Example((*turns, Turn("user", "say dog 1")))
    assert second == answer_all(loaded.trained, [asked], loaded.decoding)[0].text
    talk.reset()
    assert talk.ask("say cat 2").text == first


def test_a_prompt_that_is_longer_than_the_context_is_refused_with_both_numbers():
    run = finished("lora")
    loaded = load_expert(run, device="cpu")
    context = loaded.trained.loaded.causal_lm.config.max_position_embeddings
    talk = Conversation(loaded)
    with pytest.raises(ExpertError) as reported:
        talk.ask("cat " * context)
    assert f"the context is {context:,} including the answer" in str(reported.value)
    assert len(talk._turns) == 0  # the failed prompt was not added


def test_an_answer_ends_where_the_context_is_full_and_says_so(monkeypatch):
    loaded = load_expert(finished("lora"), decoding={"max_new_tokens": 50}, device="cpu")
    taken = len(prompt_ids(finished("lora"), "say cat 2"))
    config = loaded.trained.loaded.causal_lm.config
    monkeypatch.setattr(config, "max_position_embeddings", taken + 1)
    said_now = Conversation(loaded).ask("say cat 2")
    assert (said_now.tokens, said_now.ended) == (1, False)
    assert said_now.note == "cut after 1 token: the model's context is full"
