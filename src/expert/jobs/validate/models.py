"""Models of a validation: loaded in this process, or in one for each card, which does its share.

The processes do not communicate. Rows and results go through files that only this user can access,
progress through pipes; the results are merged here, in the order of the rows.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.answer.writer import Answer
from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.files import open_regular
from expert.core.process import Child, describe_exit
from expert.core.rundir import RunFolder
from expert.jobs.validate.row_losses import BatchSums, Note, Tell, batch_sums, mean_losses
from expert.run.stored.choose_checkpoint import BASE, Choice
from expert.run.stored.load import Trained, load_base, load_trained, pick_device, read_plan

if TYPE_CHECKING:
    from expert.answer.decoding import DecodingSettings
    from expert.data.records import Example
    from expert.data.template.templates import Template
    from expert.jobs.validate.held_out import Run
    from expert.planning.run_plan import RunPlan
    from expert.training.evaluation import EvalResult

COMMAND = (sys.executable, "-P", "-m", "expert.jobs.validate.child")
SECONDS_BETWEEN_LOOKS = 0.05
OUT_OF_MEMORY = "the system ends processes like this when its memory is full: see dmesg"


class ModelWorker:
    """One model at a time, in this process, and its share of the work on it."""

    def __init__(self, trained: Trained | None = None) -> None:
        self.trained = trained

    def load(self, run: Path, choice: Choice | None, device: str) -> dict[str, Any]:
        """Load a state of a run, or its base if there is no choice; the device and tokenizer."""
        self.unload()  # before the next one needs its memory
        folder, own = RunFolder(run), pick_device(device)
        plan = read_plan(folder)
        if choice is None:
            self.trained = load_base(plan, device=own)
        else:
            self.trained = load_trained(folder, plan, choice, device=own)
        return {"device": str(own), "tokenizer": self.trained.tokenizer_folder}

    def unload(self, **_: Any) -> None:
        self.trained = None
        gc.collect()

    def losses(
        self, rows: Sequence[Example], place: int, of: int, **callbacks: Any
    ) -> list[BatchSums]:
        assert self.trained is not None
        return batch_sums(self.trained, rows, place=place, of=of, **callbacks)

    def answers(
        self,
        questions: Sequence[Example],
        numbers: Sequence[int],
        how: DecodingSettings,
        seed: int,
        **callbacks: Any,
    ) -> list[Answer]:
        from expert.answer.engine import answer_all

        assert self.trained is not None
        if not numbers:
            return []
        return answer_all(self.trained, questions, how, seed=seed, numbers=numbers, **callbacks)


class LocalModels:
    """Loads models in this process."""

    count = 1

    def __init__(self, device: str = "auto", trained: Trained | None = None) -> None:
        """`trained`: a model that is loaded already."""
        self._asked_device, self.device = device, str(pick_device(device))
        self._worker = ModelWorker(trained)

    def load(self, run: Run, choice: Choice | None) -> ValidatedModel:
        self._worker.load(run.folder.path, choice, self._asked_device)
        return self.loaded()

    def loaded(self) -> ValidatedModel:
        trained = self._worker.trained
        assert trained is not None
        return ValidatedModel(self, trained.choice.name, trained.choice.step, trained.template)

    def ask(
        self,
        do: str,
        asked: Sequence[Mapping[str, Any]],
        tell: Callable[[int], None] = lambda done: None,
        note: Note = lambda text: None,
    ) -> list[Any]:
        (arguments,) = asked
        work = getattr(self._worker, do)
        return [work(**arguments, tell=lambda done, of: tell(done), note=note)]


# --- several cards -------------------------------------------------------------------------------


class ProcessFailed(ExpertError):
    """A process of the validation failed; there is no verdict without its share."""

    exit_code = EXIT_RUN_FAILED


class ReportedFailure(ExpertError):
    """A user error reported by a process, shown as it would be without processes."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextlib.contextmanager
def models_on_cards(places: Sequence[Mapping[str, str]], device: str) -> Iterator[ModelsOnCards]:
    """Start a process for each environment, which selects its card; end all of them at exit."""
    folder = Path(tempfile.mkdtemp(prefix="expert-validate-"))
    work = folder / "work"
    work.mkdir()
    kept = False
    try:
        with contextlib.ExitStack() as running:
            processes = []
            for number, env in enumerate(places, start=1):
                name = f"process {number} of {len(places)}"
                card = env.get("CUDA_VISIBLE_DEVICES")
                log = folder / f"process-{number}.log"
                child = Child(COMMAND, log=log, env={**env, "TMPDIR": str(work)})
                running.callback(child.stop)
                processes.append(_Process(child, f"{name} ({card})" if card else name, log))
            yield ModelsOnCards(processes, work, device)
    except ProcessFailed:
        kept = True
        raise
    finally:
        shutil.rmtree(work if kept else folder, ignore_errors=True)


class _Process:
    def __init__(self, child: Child, name: str, log: Path) -> None:
        self.child, self.name, self._log = child, name, log

    def lost(self) -> ProcessFailed:
        """The error for a process that ended without an answer, with its last output and log."""
        code = self.child.wait()
        words = self.child.stderr_tail()
        if code == -signal.SIGKILL and not words:
            words = OUT_OF_MEMORY
        head = f"{self.name} {describe_exit(code)}: {words}".rstrip(": ")
        where = f"\n  its log: {self._log}" if self._log.stat().st_size else ""
        return ProcessFailed(f"{head}{where}\n  no verdict was written")


class ModelsOnCards:
    """One process per card, all with the same model loaded."""

    def __init__(self, processes: Sequence[_Process], folder: Path, device: str) -> None:
        self._processes, self._folder, self._asked_device = processes, folder, device
        self.device = device
        """Torch's name for it, once a model was loaded."""
        self.count = len(processes)

    def load(self, run: Run, choice: Choice | None) -> ValidatedModel:
        asked = {"run": run.folder.path, "choice": choice, "device": self._asked_device}
        first, *_ = self.ask("load", [asked] * self.count)
        self.device = first["device"]
        name, step = (choice.name, choice.step) if choice is not None else (BASE, None)
        return ValidatedModel(self, name, step, _template(run.plan, first["tokenizer"]))

    def ask(
        self,
        do: str,
        asked: Sequence[Mapping[str, Any]],
        tell: Callable[[int], None] = lambda done: None,
        note: Note = lambda text: None,
    ) -> list[Any]:
        """The answers of the processes, each to its own arguments. `tell` receives the total done
        by all; equal notes are reported once."""
        results = [self._folder / f"result-{number}" for number in range(self.count)]
        for process, arguments, to in zip(self._processes, asked, results, strict=True):
            file = to.with_suffix(".ask")  # a line may be too long for a pipe
            file.write_bytes(pickle.dumps((do, arguments)))
            # If it has ended, that is noticed below.
            process.child.ask({"ask": str(file), "to": str(to)})
        done, noted = [0] * self.count, dict[str, None]()
        waiting = dict(enumerate(self._processes))
        while waiting:
            for number, process in list(waiting.items()):
                wait = SECONDS_BETWEEN_LOOKS
                while fact := process.child.next(time.monotonic() + wait):
                    wait = 0.0
                    if "failed" in fact:
                        raise ReportedFailure(fact["failed"], fact["exit_code"])
                    if "note" in fact:
                        noted[fact["note"]] = None
                    if "done" in fact:
                        done[number] = fact["done"]
                        tell(sum(done))
                    if "result" in fact:
                        del waiting[number]
                        break
                if number in waiting and process.child.has_ended:
                    raise process.lost()
        for text in noted:
            note(text)
        return [_unpickled(file) for file in results]


def _unpickled(file: Path) -> Any:
    with open_regular(file) as stream:
        return pickle.load(stream)


class ValidatedModel:
    """A state of a run, or its base, loaded here or in every process.

    `template` is None for the character model, which answers nothing.
    """

    def __init__(
        self,
        models: LocalModels | ModelsOnCards,
        name: str,
        step: int | None,
        template: Template | None,
    ) -> None:
        self._models, self.name, self.step, self.template = models, name, step, template

    def unload(self) -> None:
        """Free its memory; it cannot be asked any more."""
        self._models.ask("unload", [{}] * self._models.count)

    def losses(self, rows: Sequence[Example], *, tell: Tell, note: Note) -> EvalResult:
        count = self._models.count
        asked = [{"rows": rows, "place": place, "of": count} for place in range(count)]
        found = self._models.ask("losses", asked, _share(tell, len(rows)), note)
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
        shares = dealt_by_size([_size(question) for question in questions], self._models.count)
        asked = [
            {"questions": [questions[n] for n in own], "numbers": own, "how": how, "seed": seed}
            for own in shares
        ]
        found = self._models.ask("answers", asked, _share(tell, len(questions)), note)
        by_number = {
            number: answer
            for numbers, answers in zip(shares, found, strict=True)
            for number, answer in zip(numbers, answers, strict=True)
        }
        return [by_number[number] for number in range(len(questions))]


def _share(tell: Tell, of: int) -> Callable[[int], None]:
    return lambda done: tell(min(done, of), of)


def dealt_by_size(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """The numbers 0, 1, … in `parts` lists of about equal size, dealt largest first, back and
    forth."""
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    shares: list[list[int]] = [[] for _ in range(parts)]
    for place, number in enumerate(order):
        turn, seat = divmod(place, parts)
        shares[parts - 1 - seat if turn % 2 else seat].append(number)
    return [sorted(share) for share in shares]


def _size(question: Example) -> int:
    """In characters: tokens are not counted here."""
    return len(question.tools) + sum(len(turn.text) + len(turn.extra) for turn in question.turns)


def _template(plan: RunPlan, tokenizer: Path | None) -> Template | None:
    from expert.data.template.text_tools import text_tools

    if tokenizer is None:
        return None
    _, template = text_tools(tokenizer, plan.model.prompt_template)
    return template
