"""The job behind `expert improve`: an expert answers its training prompts, its judge says which
answers are right, and a new run learns from those; round after round.

Everything is in one folder: improve.json (what was asked, and what each round brought), test.jsonl
(the rows that judge every round), before.json (the first run's verdicts on them), and for each
round answers.jsonl, rows.jsonl, a manifest and the run. The same command with `resume` continues
after the last line that was written.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.answer.decoding import resolve_decoding
from expert.core.errors import EXIT_OK, ExpertError
from expert.core.files import write_text_atomically
from expert.core.links import refuse_links, refuse_links_inside
from expert.core.rundir import RunFolder
from expert.core.stored_json import read_object
from expert.core.text import counted, json_text
from expert.jobs.improve.answers import Asked, ask, doubts_about, facts_of, read_answers
from expert.jobs.improve.expected import expected_round
from expert.jobs.improve.overlap import overlapping
from expert.jobs.improve.rows import (
    copies_for,
    manifest_of_round,
    pairs,
    preference_settings,
    prompts_of,
    right_answers,
    row_of,
    rows_to_judge_by,
    settings_of_groups,
    write_rows,
)
from expert.jobs.validate.held_out import Run
from expert.jobs.validate.test_sets import TestSet, data_folder, find_test_set, trained_and_held_out
from expert.jobs.validate.validate import JudgeChoice, Tell, choose_judge, validate
from expert.jobs.validate.validation import Validation
from expert.judging.domain import OPEN
from expert.judging.oracles.calls import CALLS
from expert.judging.score import compare
from expert.manifest.reader import ReadManifest, read_manifest
from expert.manifest.schema.kinds import LOW_RANK, ON_POLICY
from expert.manifest.schema.manifest import CHAR_GPT
from expert.run.session.result import RunResult
from expert.run.stored.choose_checkpoint import choose
from expert.run.stored.load import load_trained, manifest_of_run, pick_device, read_plan
from expert.run.stored.locate import find_expert, has_saved

if TYPE_CHECKING:
    from expert.data.records import Example
    from expert.judging.cases import Case

Method = Literal["rft", "dpo", "grpo"]
ROUNDS, PROMPTS = 3, 4000
ANSWERS = {"rft": 4, "dpo": 4, "grpo": 8}
TEMPERATURE = {"rft": 0.8, "dpo": 0.8, "grpo": 1.0}
PAIRS_HELD_OUT = 0.05
MOST_OVERLAP = 0.1
"""A test set of which more is among the training prompts judges what was learnt by heart."""
MOST_NOTES = 20
STATE, VERDICTS = "improve.json", "before.json"

Train = Callable[[ReadManifest, str | None, Callable[[Path], None], Any], RunResult]
"""Trains a manifest, from a run to resume if given; the run's folder is told once it exists. Last
comes what makes steps of answers, if the round learns from them as they are given."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a run stands on the test set."""

    run: str
    accuracy: float | None
    interval: Sequence[float] | None
    passed: int
    judged: int
    gate: bool | None


@dataclass(kw_only=True)
class Round:
    """What a round did so far."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Of its answers."""
    doubts: list[str] = field(default_factory=list)
    rows: int | None = None
    run: str | None = None
    standing: Standing | None = None
    difference: dict[str, Any] | None = None
    """To the run that was improved: cases won and lost, and p."""
    seconds: float = 0.0


@dataclass(kw_only=True)
class Improvement:
    """The rounds so far, and the best run of them; improve.json holds it."""

    folder: Path
    start: str
    settings: dict[str, Any]
    before: Standing | None = None
    overlap: int = 0
    """Training prompts that are not asked, since they are in the test set."""
    rounds: list[Round] = field(default_factory=list)
    ended: str = ""
    """Why there are no more rounds; "": interrupted."""
    notes: list[str] = field(default_factory=list)
    exit_code: int = EXIT_OK

    @property
    def best(self) -> Standing:
        """The most accurate run; ties go to the earlier."""
        assert self.before is not None
        found = [self.before, *(each.standing for each in self.rounds if each.standing)]
        return max(found, key=lambda each: each.accuracy or 0.0)

    def as_dict(self) -> dict[str, Any]:
        """The content of improve.json."""
        best = self.best.run if self.before is not None else None
        return {**asdict(self), "folder": str(self.folder), "best": best}

    def save(self) -> None:
        write_text_atomically(self.folder / STATE, json_text(self.as_dict()) + "\n")


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What all rounds of an improvement share."""

    start: Run
    done: Improvement
    trained: TestSet
    """The rows that the first run was trained on."""
    prompts: Sequence[tuple[Case, Example]]
    judging: JudgeChoice
    held_out: Mapping[str, Any]
    """Where every round finds its validation and test rows, as keys of its data set."""
    how: Mapping[str, Any]
    """Arguments of every validation."""
    train: Train
    overrides: tuple[str, ...]

    @property
    def this(self) -> Round:
        return self.done.rounds[-1]

    @property
    def folder(self) -> Path:
        return self.done.folder / f"round-{len(self.done.rounds)}"

    def judge(self, run: str) -> Validation:
        """Validate a run by the rows that judge all of them."""
        return validate(run, test_set=Path(self.held_out["test_path"]), **self.how)

    def run_round(self) -> None:
        """Answers, rows, a run, and its standing; what an interrupted round has is kept."""
        began = time.monotonic()
        if self.done.settings["method"] == ON_POLICY:
            result = self._train_on_policy()
        else:
            asked = self._answers()
            before = self.done.rounds[-2].facts if len(self.done.rounds) > 1 else None
            self.this.facts, self.this.doubts = facts_of(asked), doubts_about(asked, before)
            config = self._write_rows(asked)
            self.done.save()
            if not self.this.rows:
                self.done.ended = "no prompt has a wrong answer to learn from"
                return
            result = self._train(config)
        if result.final is None:
            self.done.exit_code = result.exit_code
            return
        found = self.judge(str(result.folder))
        verdicts = read_object(self.done.folder / VERDICTS)
        difference = compare(found.result.verdicts(), verdicts)
        self.this.difference = {
            "won": len(difference.wins),
            "lost": len(difference.losses),
            "p": difference.p_value,
        }
        self.this.run, self.this.standing = str(result.folder), _standing(found)
        self.this.seconds += time.monotonic() - began

    def _note(self, text: str) -> None:
        """Keep a note once; a judge may have another for every answer."""
        notes = self.done.notes
        if text not in notes and len(notes) < MOST_NOTES:
            notes.append(text)

    def _train_on_policy(self) -> RunResult:
        """The run answers the prompts while it learns from the answers."""
        from expert.jobs.improve.groups import Groups, first_and_last, reward_curve

        settings, best = self.done.settings, Path(self.done.best.run)
        groups = Groups(
            prompts=self.prompts,
            file=self.folder / "answers.jsonl",
            judging=self.judging,
            count=settings["answers"],
            seed=settings["seed"] + len(self.done.rounds),
            note=self._note,
        )
        self.this.rows = write_rows(self.folder / "rows.jsonl", prompts_of(self.prompts))
        result = self._train(settings_of_groups(best, self.start.plan.adapter.type), groups.steps)
        asked = read_answers(groups.file)
        first, last = first_and_last(asked)
        self.this.facts = {**facts_of(asked), "steps": reward_curve(asked)}
        self.this.doubts = doubts_about(last, facts_of(first))
        return result

    def _answers(self) -> list[Asked]:
        """The best run so far answers the prompts."""
        settings, source = self.done.settings, RunFolder(Path(self.done.best.run))
        plan = read_plan(source)
        choice = choose(source, plan.watch.packaging_checkpoint)
        loaded = load_trained(source, plan, choice, device=pick_device(self.how["device"]))
        asked = ask(
            loaded,
            self.prompts,
            self.folder / "answers.jsonl",
            resolve_decoding(plan, {key: settings[key] for key in ("temperature", "top_p")})[0],
            self.judging,
            count=settings["answers"],
            seed=settings["seed"] + len(self.done.rounds),
            tell=self.how["tell"],
            note=self._note,
        )
        device = loaded.device
        del loaded  # training takes memory of its own
        _release(device)
        return asked

    def _write_rows(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """Write what the round trains on; returns its settings."""
        if self.done.settings["method"] == "dpo":
            rows, config = pairs(self.trained, asked), preference_settings(Path(self.done.best.run))
        else:
            epochs = self.start.plan.length.epochs or 1
            copies = copies_for(asked, epochs)
            rows = right_answers(self.trained, asked, copies)
            config = {"epochs": epochs / copies}
        self.this.rows = write_rows(self.folder / "rows.jsonl", rows)
        return config

    def _train(self, config: Mapping[str, Any], answers: Any = None) -> RunResult:
        """Train the round's run, or resume it. Of pairs some are held out, of prompts none."""
        shares = {"dpo": PAIRS_HELD_OUT, ON_POLICY: 0}
        method = self.done.settings["method"]
        held_out = {"validation_split": shares[method]} if method in shares else self.held_out
        content = manifest_of_round(
            manifest_of_run(self.start.folder),
            self.start.plan,
            self.start.place or self.start.folder.path,
            dataset={"path": str(self.folder / "rows.jsonl"), **held_out},
            config=config,
        )
        if method == ON_POLICY and self.start.plan.adapter.type == "full":
            content["base_models"][0]["name"] = str(Path(self.done.best.run) / "final")
        file = self.folder / "manifest.json"
        write_text_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

        def begin(run: Path) -> None:
            self.this.run = str(run)
            self.done.save()

        run = Path(self.this.run) if self.this.run else None  # as improve.json says
        own = run is not None and run.parent == self.folder / "runs"
        kept = str(run) if run is not None and own and has_saved(RunFolder(run)) else None
        read = read_manifest(file, overrides=self.overrides)
        return self.train(read, kept, begin, answers)


def improve(
    expert: str | Path | None = None,
    *,
    method: Method = "rft",
    rounds: int = ROUNDS,
    minutes: float | None = None,
    answers: int | None = None,
    prompts: int = PROMPTS,
    temperature: float | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    test_set: Path | None = None,
    limit: int | None = None,
    domain: str | None = None,
    overrides: tuple[str, ...] = (),
    output: Path | None = None,
    resume: bool = False,
    device: str = "auto",
    tell: Tell = lambda what, done, of: None,
    say: Callable[[str], None] = lambda text: None,
    train: Train | None = None,
    **requirements: Any,
) -> Improvement:
    """Improve a finished run until its gate passes, the rounds or `minutes` end, or a round brings
    nothing.

    `answers`: to each of at most `prompts` training prompts. `rft` trains the base on the right
    ones, `dpo` continues the run with pairs of a right and a wrong one, `grpo` continues it step by
    step with what it answers in that step. `overrides`: of the
    manifest of every round. `requirements`: as in `validate`. `say`: told what a round will take.
    """
    began = time.monotonic()
    folder, beside = find_expert(Path(expert) if expert is not None else None, "finished")
    folder = RunFolder(folder.path.absolute())  # rounds name it from other folders
    plan = read_plan(folder)
    start = Run(folder, plan, data_folder(folder, plan, beside))
    _refuse_unfit(start, method)
    if method == ON_POLICY and (top_p != 1.0 or temperature not in (None, 1.0) or answers == 1):
        what = (
            "several answers to each prompt, drawn as the weights have it: top_p 1, temperature 1"
        )
        raise ExpertError(f"--method {method}: needs {what}  (leave them out)")
    _refuse_overrides(start, method, overrides)
    given = {key: value for key, value in requirements.items() if value is not None}
    tell("reading the rows", 0, 0)
    test = find_test_set(start, named=test_set)
    trained, held_out = trained_and_held_out(start)
    judging = choose_judge(start, test.limited(limit), domain, given)
    if not (judging.has_judged_answers or judging.judge):
        raise ExpertError(
            f"{test.name}: nothing says which answers are right: {judging.because}  (name a judge "
            "with --domain, or your own with --judge-command)"
        )
    usual = "" if judging.judge is not None else judging.domain
    questions, overlap = _prompts(trained, test, prompts, usual)
    settings: dict[str, Any] = {
        "method": method,
        "answers": answers or ANSWERS[method],
        "prompts": prompts,
        "temperature": temperature or TEMPERATURE[method],
        "top_p": top_p,
        "seed": seed,
        "limit": limit,
        "domain": domain or judging.domain,
        "test_set": str(test_set.absolute()) if test_set else None,
        "overrides": list(overrides),
        **given,
    }
    done = _state(start, settings, output, resume=resume)
    done.overlap = overlap
    work = Rounds(
        start=start,
        done=done,
        trained=trained,
        prompts=questions,
        judging=judging,
        held_out=_write_held_out(test, held_out, done.folder),
        how={"limit": limit, "domain": settings["domain"], "device": device, "tell": tell, **given},
        train=train or _train_quietly,
        overrides=overrides,
    )
    if done.before is None:
        found = work.judge(str(folder.path))
        write_text_atomically(done.folder / VERDICTS, json_text(found.result.verdicts()))
        done.before = _standing(found)
        done.save()
        for line in expected_round(start, found, len(questions), settings["answers"], method):
            say(line)
    while not done.ended:
        finished = sum(each.standing is not None for each in done.rounds)
        if done.best.gate:
            done.ended = "the gate passes"
        elif _brought_nothing(done):
            done.ended = "the last round brought nothing"
        elif finished >= rounds:
            done.ended = f"{counted(rounds, 'round')} done"
        elif minutes is not None and time.monotonic() - began > 60 * minutes:
            done.ended = f"{minutes:g} minutes are over"
        else:
            if finished == len(done.rounds):
                done.rounds.append(Round())
            work.folder.mkdir(exist_ok=True)
            work.run_round()
        done.save()
        if done.exit_code != EXIT_OK:
            break
    return done


def _train_quietly(
    read: ReadManifest, resume: str | None, begin: Callable[[Path], None], answers: Any
) -> RunResult:
    from expert.jobs.train import train

    return train(read, resume=resume, begin=begin, answers=answers)


def _refuse_unfit(start: Run, method: Method) -> None:
    plan, fault = start.plan, ""
    tasks = (plan.data.dataset.get("tasks") or {}).values()
    if any(task.get("weight", 1) != 1 for task in tasks):
        fault = "its tasks have weights, which the rows of a round would not keep"
    elif plan.model.name == CHAR_GPT:
        fault = "the character model continues text, it answers nothing"
    elif plan.objective.loss is not None:
        fault = "it was trained on preferences  (name the supervised run it started from)"
    elif method == "dpo" and plan.adapter.type not in LOW_RANK:
        fault = f"--method dpo continues an adapter, and this is {plan.adapter.type}  (rft trains "
        fault += "from the base)"
    elif method == ON_POLICY and (
        plan.adapter.type not in (*LOW_RANK, "full") or plan.adapter.soft_prompts
    ):
        fault = "--method grpo continues lora, dora or full without soft prompts  (rft trains any)"
    elif method != "rft" and (plan.memory.workload or {}).get("shape", {}).get("recurrent"):
        fault = f"--method {method} reads a prompt once for all its answers, and layers of this "
        fault += "model carry a state from there  (use rft)"
    elif method != "rft" and not choose(start.folder, plan.watch.packaging_checkpoint).is_final:
        fault = f"--method {method} continues final/, and the run answers with its checkpoint "
        fault += f"{plan.watch.packaging_checkpoint}  (rft trains from the base)"
    if fault:
        raise ExpertError(f"{start.folder.path}: {fault}")


def _refuse_overrides(start: Run, method: Method, overrides: Sequence[str]) -> None:
    """Refuse wrong ones, and those of keys that a round sets itself, before anything is asked: with
    a manifest as the rounds will have."""
    content = manifest_of_round(
        manifest_of_run(start.folder),
        start.plan,
        start.place or start.folder.path,
        dataset={"path": "rows.jsonl"},
        config={} if method == "rft" else {"method": method},
    )

    def set_by_rounds(overrides: Sequence[str]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "manifest.json")
            file.write_text(json.dumps(content), encoding="utf-8")
            manifest = read_manifest(file, overrides=overrides).manifest
        training, config = manifest.training, manifest.training.config
        return {
            "training.dataset": training.dataset,
            "training.decoding": training.decoding,
            "training.packaging_checkpoint": training.packaging_checkpoint,
            **{key: getattr(config, key) for key in ("output_dir", "start_from", "method")},
            "base_models[].name": [each.name for each in manifest.base_models],
        }

    before, after = set_by_rounds(()), set_by_rounds(overrides)
    changed = [key for key in before if before[key] != after[key]]
    if changed:
        raise ExpertError(f"--set: a round sets {', '.join(changed)} itself  (leave it out)")


def _state(
    start: Run, settings: dict[str, Any], output: Path | None, *, resume: bool
) -> Improvement:
    """The improvement to continue, an unfinished one first; else a new one in a new folder."""
    runs = start.folder.path.parent
    above = runs.parent / "improved" if runs.name == "runs" else runs / "improved"
    refuse_links(above, below=above.parent)
    above = (output or above).absolute()
    own = str(start.folder.path)
    begun = [
        (folder, kept)
        for folder in sorted(above.glob("*"), reverse=True)
        if resume and (folder / STATE).is_file()
        for kept in [read_object(folder / STATE)]
        if kept.get("start") == own
    ]
    begun.sort(key=lambda each: bool(each[1].get("ended")))  # one that ended may have more rounds
    for folder, kept in begun[:1]:
        earlier, now = kept.get("settings") or {}, json.loads(json.dumps(settings))
        if earlier != now:
            changed = [key for key in {**earlier, **now} if earlier.get(key) != now.get(key)]
            raise ExpertError(
                f"--resume: {folder} was started with another {', '.join(changed)}  (repeat its "
                "command, or leave out --resume)"
            )
        refuse_links_inside(folder)  # it may come from someone else, and is written to
        return _read_state(folder, kept)
    if resume:
        raise ExpertError(f"--resume: {above}: there is no improvement of {own}")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (stamp if number == 1 else f"{stamp}-{number}" for number in range(1, 100))
    folder = next(above / name for name in names if not (above / name).exists())
    folder.mkdir(parents=True)
    new = Improvement(folder=folder, start=own, settings=settings)
    new.save()  # from here on it can be continued
    return new


def _read_state(folder: Path, kept: Mapping[str, Any]) -> Improvement:
    def standing(value: Any) -> Standing | None:
        return Standing(**value) if value else None

    try:
        rounds = [
            Round(**{**each, "standing": standing(each.get("standing"))}) for each in kept["rounds"]
        ]
        known = {key: kept[key] for key in ("start", "settings", "overlap", "notes")}
        found = Improvement(
            folder=folder, before=standing(kept.get("before")), rounds=rounds, **known
        )
        places = [(found.before, Path(found.start).parent)]
        places += [
            (each.standing, folder / f"round-{number}" / "runs")
            for number, each in enumerate(rounds, 1)
        ]
        for stands, runs in places:  # what is loaded and trained further is its own
            if stands is not None and Path(stands.run).parent != runs:
                raise KeyError(f"{stands.run} is not below {runs}")
        return found
    except (AttributeError, KeyError, TypeError) as error:
        raise ExpertError(
            f"{folder / STATE}: is not as it was written: {error}  (start again without --resume)"
        ) from None


def _prompts(
    trained: TestSet, test: TestSet, most: int, domain: str
) -> tuple[list[tuple[Case, Example]], int]:
    """The training prompts to answer, evenly spread, and how many are not, since the test set has
    them, or nearly."""
    asked = [
        (case, example)
        for case, example in trained.asked()
        if (case.domain or domain) not in (CALLS, OPEN) and case.expected.strip()
    ]
    if not asked:
        raise ExpertError(f"{trained.name}: no row has an answer that can be judged")
    if not all(example.turns for example in trained.examples):
        raise ExpertError(f"{trained.name}: has plain text beside conversations: rounds need one")

    def compared(case: Case) -> tuple[str, str]:
        return "\n".join(text for _, text in case.turns), case.expected

    tests = [compared(case) for case in (test.part_of or test).every_case]
    known = overlapping([compared(case) for case, _ in asked], tests)
    overlap = sum(known)
    if overlap > MOST_OVERLAP * len(tests):
        share = overlap / len(tests)
        raise ExpertError(
            f"{test.name}: {overlap} of the training prompts are, or nearly are, among its "
            f"{len(tests)} prompts ({share:.0%}): it would judge what was learnt by heart  (name "
            "other rows with --test-set)"
        )
    left = [each for each, is_known in zip(asked, known, strict=True) if not is_known]
    count = min(most, len(left))
    return [left[place * len(left) // count] for place in range(count)], overlap


def _write_held_out(test: TestSet, held_out: TestSet | None, folder: Path) -> dict[str, Any]:
    """Write the rows that judge every round, and those that the first run held out: other rows
    would be split off the rows of a round."""
    judged_by, file = folder / "test.jsonl", folder / "validation.jsonl"
    if not judged_by.is_file():
        write_rows(judged_by, rows_to_judge_by(test))
    found: dict[str, Any] = {"test_path": str(judged_by)}
    if held_out is None:
        return {**found, "validation_split": 0}
    if not file.is_file():
        write_rows(file, (row_of(example) for example in held_out.examples))
    return {**found, "validation_path": str(file)}


def _standing(found: Validation) -> Standing:
    score = found.result.score
    return Standing(
        run=str(found.folder),
        accuracy=found.result.scores.mean if found.judge else score.accuracy,
        interval=score.interval,
        passed=score.passed,
        judged=score.judged,
        gate=found.gate.passed,
    )


def _brought_nothing(done: Improvement) -> bool:
    """Whether the last round is not better than all before it."""
    standings = [done.before, *(each.standing for each in done.rounds)]
    if len(standings) < 2 or standings[-1] is None:
        return False
    *earlier, last = (each.accuracy or 0.0 for each in standings if each is not None)
    return last <= max(earlier)


def _release(device: Any) -> None:
    from expert.model.device_memory import release_memory

    gc.collect()
    release_memory(device)
