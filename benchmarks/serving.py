"""Requests per second of `expert serve`, next to llama.cpp and `transformers serve`.

    expert export RUN --to FOLDER --gguf f16       (for llama.cpp)
    expert export RUN --to FOLDER --merged         (for transformers)
    python benchmarks/serving.py --run RUN --rows FILE --out FILE --device cpu|cuda \\
        [--gguf FOLDER/*.gguf --llama-python PYTHON] [--merged FOLDER] \\
        [--clients 1 100] [--count 100]

Each client sends its next request as soon as the last one is answered, greedily, until every prompt
was sent. The servers take turns, several times each; medians are reported, and the CPU time of the
servers, which says more if other programs use the machine as well. llama.cpp is served by
llama-cpp-python (`python -m llama_cpp.server`), which answers one request after the other;
`transformers serve` uses continuous batching. Rows are JSONL with `instruction` and `input`. All
answers are compared with those of `expert sample`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from surroundings import environment

from expert.core.files import write_text_atomically
from expert.jobs.sample.sample import Conversation, load_expert

PORTS = {"expert": 18431, "llama.cpp": 18432, "transformers": 18433}
ROUNDS = 3
PATIENCE_SECONDS = 180


def prompts(file: Path, count: int) -> list[str]:
    """The first rows of a file, as they are asked."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    asked = ["\n\n".join(filter(None, (row["instruction"], row.get("input")))) for row in rows]
    return asked[:count]


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """What starts each server."""
    expert = [sys.executable, "-m", "expert", "serve", f"demo={args.run}", "--quiet"]
    found = {"expert": [*expert, "--device", args.device, "--port", str(PORTS["expert"])]}
    if args.gguf:
        llama = [str(args.llama_python), "-m", "llama_cpp.server", "--model", str(args.gguf)]
        options = {"model_alias": "demo", "n_ctx": 1024, "port": PORTS["llama.cpp"]}
        options |= {"interrupt_requests": False, "n_threads": args.threads}
        more = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        found["llama.cpp"] = [*llama, *more]
    if args.merged:
        port = str(PORTS["transformers"])
        words = ["serve", str(args.merged), "--device", args.device, "--port", port]
        if args.device == "cuda":  # paged attention needs a GPU
            words += ["--continuous-batching", "--cb-max-memory-percent", "0.4"]  # others need some
        found["transformers"] = [sys.executable, "-m", "transformers.cli.transformers", *words]
    return found


@contextmanager
def started(command: list[str], port: int) -> Iterator[psutil.Process]:
    """A server, once it answers."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (
        tempfile.TemporaryDirectory() as hub,  # transformers lists its models, and fails without it
        subprocess.Popen(  # type: ignore[call-overload]
            command, env={**os.environ, "HF_HUB_CACHE": hub}, **quiet
        ) as process,
    ):
        try:
            until = time.monotonic() + PATIENCE_SECONDS
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        raise SystemExit(f"it did not start: {' '.join(command)}") from None
                    time.sleep(0.2)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def asked(port: int, model: str, prompt: str, most: int) -> dict[str, Any]:
    """One request: its answer, its tokens and how long it took."""
    body = {"model": model, "temperature": 0, "max_tokens": most}
    body |= {"messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        found = json.load(reply)
    return {
        "text": (found["choices"][0]["message"]["content"] or "").strip(),
        "tokens": found["usage"]["completion_tokens"],
        "seconds": time.perf_counter() - began,
    }


def round_of(
    server: psutil.Process, port: int, model: str, texts: list[str], clients: int, most: int
) -> dict[str, Any]:
    """Every prompt once, sent by this many concurrent clients."""
    with ThreadPoolExecutor(clients) as pool:
        began, used = time.perf_counter(), server.cpu_times()
        found = list(pool.map(lambda text: asked(port, model, text, most), texts))
        seconds, now = time.perf_counter() - began, server.cpu_times()
    cpu = now.user + now.system - used.user - used.system
    return {"seconds": seconds, "cpu_seconds": cpu, "found": found}


def summary(rounds: list[dict[str, Any]], expected: list[str]) -> dict[str, Any]:
    waits = sorted(each["seconds"] for one in rounds for each in one["found"])
    tokens = sum(each["tokens"] for each in rounds[0]["found"])
    seconds = statistics.median(one["seconds"] for one in rounds)
    same = [
        sum(each["text"] == text for each, text in zip(one["found"], expected, strict=False))
        for one in rounds
    ]
    count = len(rounds[0]["found"])
    return {
        "seconds": [one["seconds"] for one in rounds],
        "requests_per_second": count / seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "cpu_seconds": [one["cpu_seconds"] for one in rounds],
        "tokens_per_cpu_second": tokens / statistics.median(one["cpu_seconds"] for one in rounds),
        "wait_seconds": {"median": waits[len(waits) // 2], "p95": waits[int(0.95 * len(waits))]},
        "answers_of_expert_sample": min(same),
        "answers_compared": min(count, len(expected)),
    }


def main() -> None:
    reader = argparse.ArgumentParser()
    reader.add_argument("--run", type=Path, required=True)
    reader.add_argument("--rows", type=Path, required=True)
    reader.add_argument("--out", type=Path, required=True)
    reader.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    reader.add_argument("--gguf", type=Path)
    reader.add_argument("--merged", type=Path)
    reader.add_argument("--llama-python", type=Path, default=Path(sys.executable))
    reader.add_argument("--clients", type=int, nargs="+", default=[1, 100])
    reader.add_argument("--count", type=int, default=100)
    reader.add_argument("--compared", type=int, default=100, help="answers of expert sample")
    reader.add_argument("--tokens", type=int, default=128)
    reader.add_argument("--threads", type=int, default=os.cpu_count())
    args = reader.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of the server that is started
    texts = prompts(args.rows, args.count)
    loaded = load_expert(args.run, device=args.device, decoding={"max_new_tokens": args.tokens})
    expected = [Conversation(loaded).ask(text).text for text in texts[: args.compared]]
    results: dict[str, Any] = {}
    with ExitStack() as servers:
        processes = {
            name: servers.enter_context(started(command, PORTS[name]))
            for name, command in commands(args).items()
        }
        for clients in args.clients:
            some = texts if clients > 1 else texts[: max(10, args.count // 5)]
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
            for number in range(ROUNDS + 1):
                for name, own in rounds.items():
                    model = str(args.merged) if name == "transformers" else "demo"
                    given = (model, some, clients, args.tokens)
                    done = round_of(processes[name], PORTS[name], *given)
                    own += [done] if number else []  # the first one warms up
            for name, own in rounds.items():
                found = summary(own, expected)
                results.setdefault(f"{clients} clients", {})[name] = {"prompts": len(some), **found}
                print(name, clients, json.dumps({**found, "seconds": None, "cpu_seconds": None}))
        memory = {name: process.memory_info().rss for name, process in processes.items()}
    record = {
        "environment": environment(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "model": loaded.trained.plan.model.name,
        "device": args.device,
        "precision": loaded.trained.plan.kernels.precision,
        "not_measured": [name for name in PORTS if name not in processes],
        "load_of_the_machine": os.getloadavg(),
        "memory_bytes": memory,
        "results": results,
    }
    write_text_atomically(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
