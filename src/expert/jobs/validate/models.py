"""Models of a validation: loaded in this process, or in one for each card, which does its share.

The processes do not communicate; their results are merged here, in the order of the rows.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from expert.answer.decoding import DecodingSettings
from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.process import describe_exit
from expert.core.rundir import RunFolder
from expert.data.records import Example
from expert.data.template.templates import Template
from expert.jobs.validate.held_out import Run
from expert.jobs.validate.row_losses import Note, Tell, batch_sums, mean_losses
from expert.run.stored.choose_checkpoint import BASE, Choice
from expert.run.stored.load import Trained, load_base, load_trained, pick_device, read_plan

if TYPE_CHECKING:
    from expert.answer.writer import Answer
    from expert.training.evaluation import EvalResult


class ProcessFailed(ExpertError):
    """A process of the validation failed; there is no verdict without its share."""

    def __init__(self, message: str, exit_code: int = EXIT_RUN_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ModelWorker:
    """One model at a time, in this process, and its share of the work on it."""

    def __init__(self, trained: Trained | None = None) -> None:
        self.trained = trained

    def load(self, run: Path, choice: Choice | None, device: str, **_: Any) -> tuple[str, Any]:
        """Load a state of a run, or its base if there is no choice; the device and tokenizer."""
        self.unload()  # before the next one needs its memory
        folder, own = RunFolder(run), pick_device(device)
        plan = read_plan(folder)
        if choice is None:
            self.trained = load_base(plan, device=own)
        else:
            self.trained = load_trained(folder, plan, choice, device=own)
        return str(own), self.trained.tokenizer_folder

    def unload(self, **_: Any) -> None:
        self.trained = None
        gc.collect()

    def losses(self, rows: Sequence[Example], **how: Any) -> list[Any]:
        assert self.trained is not None
        return batch_sums(self.trained, rows, **how)

    def answers(self, questions: Sequence[Example], **how: Any) -> list[Answer]:
        from expert.answer.engine import answer_all

        assert self.trained is not None
        return answer_all(self.trained, questions, **how) if questions else []


class ValidatedModel:
    """A state of a run, or its base: one at a time, loaded in this process or in `processes`."""

    def __init__(
        self,
        device: str = "auto",
        trained: Trained | None = None,
        processes: Sequence[CardProcess] = (),
    ) -> None:
        """`trained`: a model that is loaded already."""
        self.processes, self.count = processes, len(processes) or 1
        self._asked_device = device
        self.device = device if processes else str(pick_device(device))
        self._worker = ModelWorker(trained)
        self.name, self.step = "", None if trained is None else trained.choice.step
        self.template: Template | None = None
        """None for the character model, which answers nothing."""
        if trained is not None:
            self.name, self.template = trained.choice.name, trained.template

    def load(self, run: Run, choice: Choice | None) -> None:
        """Load a state of a run, or its base, instead of the present one."""
        asked = {"run": run.folder.path, "choice": choice, "device": self._asked_device}
        (self.device, tokenizer), *_ = self._ask("load", [asked] * self.count)
        self.name, self.step = (choice.name, choice.step) if choice is not None else (BASE, None)
        self.template = None
        if self._worker.trained is not None:
            self.template = self._worker.trained.template
        elif tokenizer is not None:
            from expert.data.template.text_tools import text_tools

            self.template = text_tools(tokenizer, run.plan.model.prompt_template)[1]

    def unload(self) -> None:
        """Free its memory; it cannot be asked any more."""
        self._ask("unload", [{}] * self.count)

    def losses(
        self, rows: Sequence[Example], *, one_by_one: bool, tell: Tell, note: Note
    ) -> EvalResult:
        how = {"rows": rows, "one_by_one": one_by_one, "of": self.count}
        asked = [{**how, "place": place} for place in range(self.count)]
        found = self._ask("losses", asked, tell, note, of=len(rows))
        # Batches were dealt in turn: restore their order, and sum as one process does.
        return mean_losses(
            each for turn in zip_longest(*found) for each in turn if each is not None
        )

    def answers(
        self,
        questions: Sequence[Example],
        how: DecodingSettings,
        seed: int,
        *,
        tell: Tell,
        note: Note,
    ) -> list[Answer]:
        """Its answers to every question, in order."""

        def size(number: int) -> int:
            one = questions[number]
            return len(one.tools) + sum(len(turn.text) + len(turn.extra) for turn in one.turns)

        # By size in characters, so that each process has long and short ones.
        order = sorted(range(len(questions)), key=size, reverse=True)
        shares = [order[place :: self.count] for place in range(self.count)]
        asked = [
            {"questions": [questions[n] for n in own], "numbers": own, "how": how, "seed": seed}
            for own in shares
        ]
        found = self._ask("answers", asked, tell, note, of=len(questions))
        answers = {
            number: answer
            for own, said in zip(shares, found, strict=True)
            for number, answer in zip(own, said, strict=True)
        }
        return [answers[number] for number in range(len(questions))]

    def _ask(
        self,
        do: str,
        asked: Sequence[Mapping[str, Any]],
        tell: Tell = lambda done, of: None,
        note: Note = lambda text: None,
        *,
        of: int = 0,
    ) -> list[Any]:
        """The answers of the processes, each to its own arguments. `tell` receives the total done
        by all, at most `of`; equal notes are reported once."""
        if not self.processes:
            work = getattr(self._worker, do)
            return [work(**asked[0], tell=lambda done, _: tell(min(done, of), of), note=note)]
        waiting = {process.connection: place for place, process in enumerate(self.processes)}
        results: list[Any] = [None] * self.count
        done, noted = [0] * self.count, dict[str, None]()
        try:
            number = 0
            for number, process in enumerate(self.processes):
                process.connection.send((do, asked[number]))
            while waiting:
                ready: Any
                for ready in wait(list(waiting)):
                    number = waiting[ready]
                    kind, value = ready.recv()
                    if kind == "failed":
                        raise ProcessFailed(*value)
                    if kind == "note":
                        noted[value] = None
                    elif kind == "done":
                        done[number] = value
                        tell(min(sum(done), of), of)
                    else:
                        results[number] = value
                        del waiting[ready]
        except (EOFError, OSError):
            lost = self.processes[number]
            raise ProcessFailed(
                f"{lost.name} {describe_exit(lost.child.wait())}: no verdict was written  (its "
                "output is above; the system kills processes when its memory is full: see dmesg)"
            ) from None
        for text in noted:
            note(text)
        return results


# --- several cards -------------------------------------------------------------------------------


COMMAND = (
    *(sys.executable, "-P", "-c"),
    "import sys; from expert.jobs.validate.models import work; work(int(sys.argv[1]))",
)


@contextlib.contextmanager
def models_on_cards(places: Sequence[Mapping[str, str]], device: str) -> Iterator[ValidatedModel]:
    """Start a process for each environment, which selects its card; end all of them at exit."""
    processes: list[CardProcess] = []
    try:
        for number, env in enumerate(places, start=1):
            card = env.get("CUDA_VISIBLE_DEVICES")
            name = f"process {number} of {len(places)}" + (f" ({card})" if card else "")
            ours, theirs = multiprocessing.Pipe()
            started = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the parent's, which may write JSON to it
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent
            )
            theirs.close()  # so that its end is noticed
            processes.append(CardProcess(name, started, ours))
        yield ValidatedModel(device, processes=processes)
    finally:
        for process in processes:
            process.child.kill()
            process.child.wait()


class CardProcess(NamedTuple):
    """A process for one card, and the pipe to it."""

    name: str
    child: subprocess.Popen[bytes]
    connection: Any


def work(file_descriptor: int) -> None:
    """The process for one card: does what it is asked through a pipe, until its parent ends."""
    connection = Connection(file_descriptor)
    requests: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def listen() -> None:
        """Runs in a thread: if the parent dies, this process ends in the middle of its work."""
        while True:
            try:
                requests.put(connection.recv())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    worker = ModelWorker()
    while True:
        do, asked = requests.get()
        asked["tell"] = lambda done, of: connection.send(("done", done))
        asked["note"] = lambda text: connection.send(("note", text))
        try:
            connection.send(("result", getattr(worker, do)(**asked)))
        except ExpertError as error:
            connection.send(("failed", (str(error), error.exit_code)))
