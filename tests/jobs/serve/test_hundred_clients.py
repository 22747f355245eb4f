"""100 clients at once on `tiny`: every answer is that of `expert sample`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from expert.jobs.sample.sample import Conversation, load_expert
from tests.jobs.runs import WORDS, run, write_expert
from tests.jobs.serve.served import served

CLIENTS = 100
PROMPTS = [f"say {WORDS[n % 8]} {n} {'please ' * (n % 7)}" for n in range(CLIENTS)]


@pytest.mark.slow
def test_a_hundred_clients_at_once_get_the_answers_of_expert_sample(tmp_path):
    config = {"max_steps": 30, "learning_rate": 2e-3, "rank": 8}
    folder = run(write_expert(tmp_path, "tiny", config, decoding={"max_new_tokens": 40})).folder
    loaded = load_expert(folder, device="cpu")
    expected = [Conversation(loaded).ask(prompt).text for prompt in PROMPTS]
    assert len(set(expected)) > CLIENTS / 2, "all alike would prove nothing"
    with served(f"demo={folder}") as here:

        def ask(number: int) -> str:
            client: Any = openai.OpenAI(base_url=f"{here.address}/v1", api_key="-", timeout=300)
            asked = [{"role": "user", "content": PROMPTS[number]}]
            if number % 2:
                found = client.chat.completions.create(model="demo", messages=asked)
                return found.choices[0].message.content or ""
            stream = client.chat.completions.create(model="demo", messages=asked, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        with ThreadPoolExecutor(CLIENTS) as clients:
            for _ in range(2):
                assert list(clients.map(ask, range(CLIENTS))) == expected
        assert here.notes == []
        assert {entry.status for entry in here.entries} == {200}
