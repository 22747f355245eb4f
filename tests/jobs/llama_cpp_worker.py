"""Asks a GGUF file in the real llama.cpp; it runs under an interpreter that has llama_cpp, alone.

usage: python llama_cpp_worker.py REQUEST.json ANSWER.npz
"""

import json
import sys
from typing import Any

import llama_cpp
import numpy as np

_F32 = 0  # ggml's number for float32: keys and values are kept as they are


def main(request_file: str, answer_file: str) -> None:
    with open(request_file, encoding="utf-8") as stream:
        asked = json.load(stream)
    model = llama_cpp.Llama(
        asked["model"],
        lora_path=asked.get("lora"),
        n_ctx=asked.get("context", 256),
        logits_all=True,
        n_threads=2,
        n_threads_batch=2,
        type_k=_F32,
        type_v=_F32,
        verbose=False,
    )
    found: dict[str, Any] = {}
    for number, text in enumerate(asked["texts"]):
        tokens = model.tokenize(text.encode("utf-8"), add_bos=False, special=True)
        found[f"tokens-{number}"] = np.array(tokens, dtype=np.int64)
    with_bos = model.tokenize(b"a", add_bos=True, special=True)
    found["with_bos"] = np.array(with_bos, dtype=np.int64)
    for number, prompt in enumerate(asked["prompts"]):
        model.reset()
        model.eval(prompt)
        found[f"logits-{number}"] = model.scores[: len(prompt)].copy()
        said = []
        for _ in range(asked["new"]):
            said.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(said[-1:])
        found[f"answer-{number}"] = np.array(said, dtype=np.int64)
    np.savez(answer_file, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
