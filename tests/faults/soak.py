"""`make soak-test`: runs of `tiny` that meet a fault drawn at random every few seconds, and resume.

    python -m tests.faults.soak --minutes 120 --folder build/soak --out build/soak.json

One run is left alone. Then one after the other is trained by the command line, killed, stopped,
starved of disk and so on, and started again with --resume until it has finished; each must end
equal to the first to the last bit. The result records every fault, how each process ended, and
what the processes and folders held over time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from expert.core.events import read_events
from expert.core.publish import damage as damage_of
from tests.data.damaging import KINDS, damage, files_in

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "adapter_type": "lora",
    "rank": 4,
    "dropout": 0.1,
    "max_seq_length": 64,
    "packing": False,  # packed tokens need no workers
    "batch_size": 4,
    "micro_batch_size": 1,  # out of memory is then answered by recomputing, which is equal
    "epochs": 3,
    "learning_rate": 1e-3,
    "save_steps": 10,
    "save_total_limit": 3,
    "eval_steps": 60,
    "logging_steps": 1,
    "dataloader_num_workers": 2,
    "hang_timeout": 60,
    "device": "cpu",
}
ROWS = 340
NAN_AT = 100
"""In every other run this step is not finite: the rule skips its rows, so such runs are compared
with one that nothing else happens to."""
SAMPLE_SECONDS = 5.0
START_SECONDS = 15.0
"""Before that a process may not listen for signals yet."""
GONE_SECONDS = 15.0
"""For workers whose run was killed to notice it."""
LIMIT_BYTES = 4096
SHOWN_SAMPLES = 240
GO_ON = 0


@dataclass
class Trainer:
    """One process that trains, and what it may end with by now."""

    process: subprocess.Popen[bytes]
    codes: set[int]
    began: float = field(default_factory=time.monotonic)
    children: set[psutil.Process] = field(default_factory=set)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, number: int, code: int) -> None:
        self.process.send_signal(number)
        self.codes.add(code)
        if time.monotonic() - self.began < START_SECONDS:
            self.codes.add(-number)


Fault = Callable[["Soak", Trainer], str]
"""Makes one fault; what was done, in words."""


def _kill(soak: Soak, trainer: Trainer) -> str:
    trainer.send(signal.SIGKILL, -signal.SIGKILL)
    return "killed"


def _stop(soak: Soak, trainer: Trainer) -> str:
    seconds = soak.chance.uniform(1.0, 5.0)
    trainer.process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    trainer.process.send_signal(signal.SIGCONT)
    return f"stopped for {seconds:.1f} s"


def _signalled(number: int, code: int) -> Fault:
    def send(soak: Soak, trainer: Trainer) -> str:
        trainer.send(number, code)
        return signal.Signals(number).name

    return send


def _twice(soak: Soak, trainer: Trainer) -> str:
    trainer.send(signal.SIGINT, 130)
    time.sleep(soak.chance.uniform(0.0, 0.5))
    trainer.send(signal.SIGINT, 130)
    trainer.codes.add(-signal.SIGINT)  # where Python listens no more as it ends: 130 to a shell
    return "Ctrl-C, and once more"


def _full_disk(soak: Soak, trainer: Trainer) -> str:
    """The limit of the system on the size of a file, which no writer can get around."""
    resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))
    trainer.codes.add(75)
    return f"no file beyond {LIMIT_BYTES} bytes from now on"


def _from_inside(what: str, code: int) -> Fault:
    def ask(soak: Soak, trainer: Trainer) -> str:
        (soak.asked / what).write_text(str(soak.chance.choice((-86400, -3600, 86400))))
        trainer.codes.add(code)
        return what

    return ask


def _worker(soak: Soak, trainer: Trainer) -> str:
    workers = [each for each in trainer.children if each.is_running()]
    if not workers:
        return "no worker was there"
    soak.chance.choice(sorted(workers, key=lambda each: each.pid)).kill()
    trainer.codes.add(4)  # a second one in the same process: saved and ended
    return f"a worker of {len(workers)} was killed"


def _rename(soak: Soak, trainer: Trainer) -> str:
    run = soak.run_folder()
    if run is None:
        return "no run folder was there"
    run.rename(run.with_name(f"moved-{soak.faults}"))
    trainer.codes |= {4, 2}  # 2: while it starts, by what it was about to write
    return f"{run.name} renamed"


def _cache(soak: Soak, trainer: Trainer) -> str:
    soak.end(trainer, signal.SIGKILL)
    files = files_in(soak.expert / "datasets_optimized")
    if not files:
        return "killed; nothing was prepared yet"
    done = damage(soak.chance.choice(files), soak.chance.choice(KINDS), soak.chance)
    return f"killed; cache: {done}"


def _checkpoint(soak: Soak, trainer: Trainer) -> str:
    soak.end(trainer, signal.SIGKILL)
    run = soak.run_folder()
    saved = sorted(run.glob("checkpoints/step-*")) if run is not None else []
    if len(saved) < 2:  # a run whose every checkpoint is damaged is not started over by itself
        return "killed; nothing was saved before the last one"
    done = damage(soak.chance.choice(files_in(saved[-1])), soak.chance.choice(KINDS), soak.chance)
    return f"killed; {saved[-1].name}: {done}"


FAULTS: dict[str, Fault] = {
    "kill": _kill,
    "stop": _stop,
    "sigterm": _signalled(signal.SIGTERM, 143),
    "sighup": _signalled(signal.SIGHUP, 129),
    "sigusr1": _signalled(signal.SIGUSR1, GO_ON),
    "ctrl-c": _signalled(signal.SIGINT, 130),
    "ctrl-c twice": _twice,
    "disk full": _full_disk,
    "out of memory": _from_inside("oom", 4),
    "clock": _from_inside("clock", GO_ON),
    "worker": _worker,
    "rename": _rename,
    "cache": _cache,
    "checkpoint": _checkpoint,
}


class Soak:
    """What is drawn, made, seen and found."""

    def __init__(self, folder: Path, *, seconds: float, every: float, seed: int) -> None:
        self.folder, self.seconds, self.every, self.seed = folder, seconds, every, seed
        self.chance = random.Random(seed)
        self.began, self.faults, self.starts, self.rounds = time.monotonic(), 0, 0, 0
        self.made: Counter[str] = Counter()
        self.ended: dict[str, Counter[str]] = {name: Counter() for name in FAULTS}
        self.findings: list[str] = []
        self.samples: list[dict[str, float]] = []
        self.log: list[dict[str, Any]] = []
        self.asked, self.temporary = folder / "asked", folder / "tmp"
        self.whole: list[dict[str, Any]] = []
        self.expert, self.has_nan = folder, False

    def begin(self) -> None:
        """The runs that nothing happens to, the second one with a step that is not finite."""
        for place in (self.asked, self.temporary):
            place.mkdir(parents=True)
        for self.has_nan in (False, True):
            began = time.monotonic()
            self.expert = self.folder / ("with-nan" if self.has_nan else "whole")
            _write_expert(self.expert)
            for code in (4, 0) if self.has_nan else (0,):
                ended = self.start().process.wait()
                text = (self.folder / f"start-{self.starts}.log").read_text()
                assert ended == code, f"{ended} instead of {code}: {text}"
            self.whole.append(_outcome(self.run_folder()))
            self.log.append({"undisturbed_seconds": time.monotonic() - began})
        self.starts, self.began = 0, time.monotonic()

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def run_folder(self) -> Path | None:
        """The newest run of this round that has begun, under whatever name."""
        found = [path.parent for path in self.expert.glob("runs/*/plan.json")]
        return max(found, key=lambda path: path.stat().st_ctime, default=None)

    def start(self) -> Trainer:
        run = self.run_folder()
        self.starts += 1
        for path in self.asked.iterdir():
            path.unlink()
        command = [sys.executable, "-m", "tests.faults.soak_child", str(self.asked), "train"]
        command += ["-m", str(self.expert / "manifest.json")]
        command += ["--resume", str(run)] if run is not None else []
        with (self.folder / f"start-{self.starts}.log").open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(self.temporary),
                    "NAN_AT": str(NAN_AT) if self.has_nan else "",
                },
            )
        return Trainer(process, codes={0, 4} if self.has_nan else {0})

    def end(self, trainer: Trainer, number: int) -> None:
        trainer.send(number, -number)
        trainer.process.wait()

    def round(self) -> None:
        """One run from its first start to its end."""
        self.rounds += 1
        self.expert, self.has_nan = self.folder / f"round-{self.rounds}", self.rounds % 2 == 0
        if self.rounds % 4 < 2:  # the others find their data prepared
            _write_expert(self.expert)
        else:
            shutil.copytree(
                self.folder / "whole", self.expert, ignore=shutil.ignore_patterns("runs")
            )
        before = len(self.findings)
        while self._one_start() != "finished":
            if len(self.findings) > before + 3:  # what is left is kept, to be looked at
                return
        found = _outcome(self.run_folder())
        whole = self.whole[self.has_nan]
        different = [key for key in whole if found.get(key) != whole[key]]
        self.log.append({"at": self._now(), "round": self.rounds, "different": different})
        if different:
            self.findings.append(f"round {self.rounds}: {', '.join(different)} differ")
        else:
            shutil.rmtree(self.expert)

    def _one_start(self) -> str:
        trainer, names = self.start(), ["nothing"]
        due = time.monotonic() + self.chance.uniform(0.2, 1.8) * self.every
        sampled = 0.0
        while trainer.process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            if now > due and self.left() > 0:
                names.append(self._fault(trainer))
                due = now + self.chance.uniform(0.5, 1.5) * self.every
            if now > sampled + SAMPLE_SECONDS:
                sampled = now
                self._sample(trainer)
        return self._ended(trainer, names)

    def _fault(self, trainer: Trainer) -> str:
        self._see_children(trainer)
        name = self.chance.choice(list(FAULTS))
        self.faults += 1
        try:
            done = FAULTS[name](self, trainer)
        except (OSError, psutil.Error) as error:  # it had just ended
            done = f"nothing: {error}"
        self.made[name] += 1
        self.log.append({"at": self._now(), "start": self.starts, "fault": name, "did": done})
        return name

    def _ended(self, trainer: Trainer, names: list[str]) -> str:
        code = trainer.process.returncode
        if len(names) > 1:
            self.ended[names[-1]][str(code)] += 1
        self.log.append({"at": self._now(), "start": self.starts, "code": code})
        text = (self.folder / f"start-{self.starts}.log").read_text(errors="replace")
        if code not in trainer.codes or (code == 0 and "nothing to resume" in text):
            self._find(f"start {self.starts} ended with {code} after {names}: {text[-1500:]}")
        elif "Traceback" in text:
            self._find(f"start {self.starts} printed a traceback after {names}: {text[-3000:]}")
        else:
            (self.folder / f"start-{self.starts}.log").unlink()
        _, alive = psutil.wait_procs(trainer.children, timeout=GONE_SECONDS)
        if alive:
            self._find(f"start {self.starts}: {len(alive)} processes stayed after {names}")
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        finished = self.run_folder() is not None and code == 0
        return "finished" if finished else names[-1]

    def _find(self, text: str) -> None:
        self.findings.append(text)
        print(text, flush=True)  # noqa: T201

    def _see_children(self, trainer: Trainer) -> None:
        with contextlib.suppress(psutil.Error):
            trainer.children |= set(psutil.Process(trainer.pid).children(recursive=True))

    def _sample(self, trainer: Trainer) -> None:
        self._see_children(trainer)
        run = self.run_folder()
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(trainer.pid)
            self.samples.append(
                {
                    "at": self._now(),
                    "age": round(time.monotonic() - trainer.began, 1),
                    "rss_mb": round(process.memory_info().rss / 1e6, 1),
                    "handles": process.num_fds(),
                    "threads": process.num_threads(),
                    "processes": len([each for each in trainer.children if each.is_running()]),
                    "run_files": sum(len(files) for _, _, files in os.walk(run)) if run else 0,
                    "temporary_files": sum(len(f) + len(d) for _, d, f in os.walk(self.temporary)),
                    "shared_memory_files": len(os.listdir("/dev/shm")),
                }
            )

    def _now(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def result(self) -> dict[str, Any]:
        step = max(1, len(self.samples) // SHOWN_SAMPLES)
        compared = [each["different"] for each in self.log if "different" in each]
        return {
            "what": "runs of tiny on a CPU with a fault drawn at random, resumed automatically",
            "date": time.strftime("%Y-%m-%d"),
            "seed": self.seed,
            "minutes": round((time.monotonic() - self.began) / 60, 1),
            "seconds_between_faults": self.every,
            "python": platform.python_version(),
            "steps_of_a_run": len(self.whole[0]["steps"]),
            "undisturbed_seconds": round(self.log[0]["undisturbed_seconds"], 1),
            "faults": self.faults,
            "starts": self.starts,
            "runs_finished": len(compared),
            "runs_equal_to_the_last_bit": sum(not different for different in compared),
            "findings": self.findings,
            "by_kind": {
                name: {"made": self.made[name], "ended_with": dict(self.ended[name])}
                for name in FAULTS
            },
            "flat": self._flat(),
            "samples": self.samples[::step],
        }

    def _flat(self) -> dict[str, Any]:
        """The middle value of processes that have trained for a while: first quarter, last."""
        steady = [each for each in self.samples if each["age"] > 3 * SAMPLE_SECONDS]
        quarter = max(1, len(steady) // 4)
        keys = [key for key in steady[0] if key not in ("at", "age")] if steady else []

        def middle(of: list[dict[str, float]], key: str) -> float:
            return statistics.median(each[key] for each in of)

        return {
            key: {
                "first_quarter": middle(steady[:quarter], key),
                "last_quarter": middle(steady[-quarter:], key),
                "most": max(each[key] for each in steady),
            }
            for key in keys
        }


def _write_expert(folder: Path) -> None:
    folder.mkdir()
    words = ("red", "green", "blue", "one", "two", "three", "cat", "dog")
    with (folder / "train.jsonl").open("w", encoding="utf-8") as out:
        for number in range(ROWS):
            word, times = words[number % len(words)], number % 7
            row = {
                "instruction": f"say {word} {number}",
                "response": f"{f'{word} ' * times}{number}",
            }
            out.write(json.dumps(row) + "\n")
    manifest = {
        "name": "soak",
        "base_model": {"name": "tiny", "prompt_template": "chatml"},
        "training": {"dataset": {"path": "train.jsonl"}, "config": SETTINGS},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _outcome(run: Path | None) -> dict[str, Any]:
    """What must be equal, to the last bit; of a step taken twice the second time counts."""
    assert run is not None
    found: dict[str, Any] = {"steps": {}, "evaluations": {}}
    for event in read_events(run / "events.jsonl"):
        if event["event"] == "step":
            numbers = [event.get(key) for key in ("loss", "rate", "grad_norm")]
            found["steps"][event["step"]] = [float(n).hex() for n in numbers if n is not None]
        elif event["event"] == "eval":
            found["evaluations"][event["step"]] = float(event["loss"]).hex()
    found["damage"] = damage_of(run / "final")
    found["weights"] = {
        path.name: path.read_bytes() for path in (run / "final").glob("*.safetensors")
    }
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--minutes", type=float, default=120.0)
    asked.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    asked.add_argument("--seed", type=int, default=20)
    asked.add_argument("--folder", type=Path, required=True, help="is made, and must not be there")
    asked.add_argument("--out", type=Path, required=True)
    told = asked.parse_args()
    told.folder.mkdir(parents=True)
    soak = Soak(told.folder, seconds=60 * told.minutes, every=told.every, seed=told.seed)
    soak.begin()
    while soak.left() > 0:
        soak.round()
        told.out.write_text(json.dumps(soak.result(), indent=1) + "\n", encoding="utf-8")
        (told.folder / "log.json").write_text(json.dumps(soak.log, indent=1), encoding="utf-8")
    result = soak.result()
    print(json.dumps({key: result[key] for key in result if key != "samples"}, indent=1))  # noqa: T201
    sys.exit(1 if result["findings"] else 0)


if __name__ == "__main__":
    main()
