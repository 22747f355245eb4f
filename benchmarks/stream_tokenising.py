"""How fast one core makes the steps of a stream: rows read, tokenised and packed as in training.

Every rank of a run makes all steps of its stream. CPU seconds are counted, not those of the clock:
other processes on the machine change little. The best of several passes counts.

    python benchmarks/stream_tokenising.py --tokenizer FOLDER --out FILE rows.jsonl [rows.jsonl …]
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["RAYON_NUM_THREADS"] = os.environ["TOKENIZERS_PARALLELISM"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
LENGTH = 2048


def stream_over(file: Path, tokenizer: Path, folder: Path) -> Any:
    """The stream of a run over these rows, in this process."""
    from expert.run.open import open_run

    manifest = {
        "name": "bench",
        "base_model": {"name": str(tokenizer.resolve()), "prompt_template": "chatml"},
        "training": {
            "dataset": {"path": str(file.resolve()), "streaming": True, "max_bad_rows": 100},
            "config": {"max_seq_length": LENGTH, "max_steps": 1000, "dataloader_num_workers": 0},
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return open_run(folder / "manifest.json").data.stream


def one_pass(stream: Any) -> tuple[int, float]:
    """Tokens of all steps of an epoch, and the CPU seconds of this process that they took."""
    from expert.data.feed.streaming import StreamPosition

    tokens, began = 0, time.process_time()
    for work in stream.works(done=0, place=StreamPosition(), epochs=1, total=None):
        tokens += int(work.index.bin_lengths()[work.step.bins].sum())
    return tokens, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("files", type=Path, nargs="+")
    asked = parser.parse_args()

    from surroundings import environment

    results = []
    for file in asked.files:
        with tempfile.TemporaryDirectory(prefix="expert-bench-") as folder:
            stream = stream_over(file, asked.tokenizer, Path(folder))
            passes = [one_pass(stream) for _ in range(asked.repeats)]
        tokens, seconds = min(passes, key=lambda each: each[1])
        name = f"{file.parent.name}/{file.name}"
        results.append(
            {
                "rows": name,
                "tokens": tokens,
                "cpu_seconds": seconds,
                "tokens_per_core_second": tokens / seconds,
                "passes": [each for _, each in passes],
            }
        )
    made = {"environment": environment(), "results": results}
    asked.out.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
