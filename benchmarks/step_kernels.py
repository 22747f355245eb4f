"""Where the GPU time of a step goes, kernel by kernel, in a run through `expert.train`.

    python benchmarks/step_kernels.py --data FOLDER --out FILE --shape SHAPE --rows N [KEY=VALUE]…

FOLDER as for training_speed.py; KEY=VALUE: settings of training.config in JSON. Three steps are
profiled after seven; the rate is that of the steps after them.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from surroundings import environment
from torch.profiler import ProfilerActivity, profile
from training_speed import LORA, Case, run_case

from expert.parallel.engine import Engine

FIRST, STEPS = 7, 3
KINDS = {
    "attention": ("flex", "flash", "sdpa", "fmha"),
    "matmul": ("nvjet", "gemm", "cutlass", "xmma", "cublas", "splitk"),
    "loss": ("_row_kernel",),
    "copy": ("memcpy", "memset", "copy"),
}


class Profiled:
    """Profiles some steps of an engine from outside."""

    def __init__(self) -> None:
        self._step, self._count = Engine.step, 0
        self._profile: Any = None
        self.kernels: list[tuple[float, int, str]] = []
        """Milliseconds and launches a step, and the name."""

    def step(self, engine: Engine, **given: Any) -> Any:
        done = self._step(engine, **given)
        self._count += 1
        if self._count == FIRST:
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.__enter__()
        elif self._count == FIRST + STEPS:
            torch.cuda.synchronize()
            self._profile.__exit__(None, None, None)
            found = [
                (each.device_time_total / STEPS / 1e3, each.count // STEPS, each.key)
                for each in self._profile.key_averages()
                if each.device_time_total
            ]
            self.kernels = sorted(found, reverse=True)
        return done


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "elementwise"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, help="where the models are kept for other runs")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    args.work = Path(tempfile.mkdtemp(prefix="kernels-"))
    args.steps = args.planned = 24
    settings = {**LORA, "bf16": True}
    settings |= {key: json.loads(value) for key, value in (s.split("=", 1) for s in args.settings)}
    profiled = Profiled()
    engine: Any = Engine
    engine.step = lambda self, **given: profiled.step(self, **given)
    base = settings.pop("base", "none")
    result = run_case(Case("kernels", args.shape, args.rows, settings, base=base), args)
    kinds: dict[str, float] = {}
    for milliseconds, _, kernel in profiled.kernels:
        kinds[kind_of(kernel)] = kinds.get(kind_of(kernel), 0.0) + milliseconds
    record = {
        "environment": environment(),
        "result": result,
        "milliseconds": kinds,
        "kernels": profiled.kernels[:60],
    }
    args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"{result['tokens_per_second']:,.0f} tokens/s", kinds)


if __name__ == "__main__":
    main()
