"""The answers of a round: several to each prompt, judged, each prompt a line of answers.jsonl."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from expert.answer.decoding import DecodingSettings
from expert.core.errors import ExpertError
from expert.core.files import read_bytes
from expert.core.process import stop_programs
from expert.core.stored_json import parse_json
from expert.core.text import percent
from expert.jobs.validate.validate import JudgeChoice, Note, Tell, judge_answers
from expert.judging.answers import normalised

if TYPE_CHECKING:
    from expert.answer.writer import Answer
    from expert.data.records import Example
    from expert.judging.cases import Case
    from expert.judging.judge_pool import JudgeProcess
    from expert.run.stored.load import Trained

ANSWERS_AT_ONCE = {"cpu": 256, "cuda": 8192}
"""Answers that are generated, and then written, together; what is interrupted is asked again."""


MOST_BYTES = 2**32
"""Of a file of answers: 100,000 prompts with 16 answers each take about 0.5 GB."""


@dataclass(frozen=True, kw_only=True)
class OwnAnswer:
    """One of the expert's answers to a training prompt."""

    text: str
    tokens: int
    ended: bool
    """False: it was cut."""
    passed: bool | None
    reason: str
    kind: str
    score: float | None = None
    """Of a judge that gives one."""
    ids: Sequence[int] = ()
    """Its tokens, if they are trained on as they were drawn."""

    @property
    def reward(self) -> float:
        """From 0 to 1; an answer that was cut is not right."""
        return (float(bool(self.passed)) if self.score is None else self.score) * self.ended

    @property
    def key(self) -> str:
        """The same for answers that differ in whitespace alone."""
        return normalised(self.text)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt with its expected answer, and what the expert answered."""

    id: str
    prompt: str
    expected: str
    answers: tuple[OwnAnswer, ...]
    step: int | None = None
    """The step that learns from them, counted from 0, if it is a single one."""

    @property
    def right(self) -> list[OwnAnswer]:
        """Those to learn from: an answer that was cut, or is empty, is none of them."""
        fit = (each for each in self.answers if each.ended and each.text.strip())
        return _distinct([each for each in fit if each.passed])

    @property
    def wrong(self) -> list[OwnAnswer]:
        return _distinct([each for each in self.answers if each.passed is False])


def _distinct(answers: Sequence[OwnAnswer]) -> list[OwnAnswer]:
    found: dict[str, OwnAnswer] = {}
    for each in answers:
        found.setdefault(each.key, each)
    return list(found.values())


def read_answers(file: Path) -> list[Asked]:
    """What was asked so far; a line that an interruption cut short is left out."""
    lines = read_bytes(file, MOST_BYTES).split(b"\n") if file.is_file() else [b""]
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = parse_json(line)
            answers = tuple(OwnAnswer(**each) for each in record["answers"])
            found.append(Asked(**{**record, "answers": answers}))
        except (KeyError, TypeError, ValueError) as error:
            raise ExpertError(
                f"{file}:{number}: is not as it was written: {error}  (remove this line and those "
                "below it: their prompts are asked again)"
            ) from None
    return found


def ask(
    trained: Trained,
    prompts: Sequence[tuple[Case, Example]],
    file: Path,
    how: DecodingSettings,
    judging: JudgeChoice,
    *,
    count: int,
    seed: int,
    tell: Tell,
    note: Note,
) -> list[Asked]:
    """Answer each prompt `count` times and judge the answers, while the next are generated. Answers
    that are in the file are not asked again."""
    from expert.answer.engine import answer_all

    known = read_answers(file)
    keep(file, known)
    done = {each.id for each in known}
    # Random numbers depend on the place among all prompts, so a resumed round draws the same.
    left = [
        (place, case, example)
        for place, (case, example) in enumerate(prompts)
        if case.id not in done
    ]
    size = max(1, ANSWERS_AT_ONCE.get(trained.device.type, ANSWERS_AT_ONCE["cpu"]) // count)
    found, waiting = list(known), list[Future[list[Asked]]]()

    def take(most: int) -> None:
        """Write what is judged, until at most `most` groups are not."""
        while len(waiting) > most:
            group = waiting.pop(0).result()
            append(file, group)
            found.extend(group)

    def report(done: int, of: int) -> None:
        tell("answering training prompts", (asked + done) // count, len(prompts))

    with ThreadPoolExecutor(1) as judges, _stopped_early(judges):
        for first in range(0, len(left), size):
            part, asked = left[first : first + size], (len(known) + first) * count
            answers = answer_all(
                trained,
                [replace(e, turns=e.turns[:-1]) for _, _, e in part for _ in range(count)],
                how,
                seed=seed,
                numbers=[place * count + n for place, _, _ in part for n in range(count)],
                tell=report,
                note=note,
            )
            cases = [case for _, case, _ in part]
            waiting.append(judges.submit(judged, cases, answers, judging, note=note))
            take(1)
        tell("judging", 0, 0)
        take(0)
    places = {case.id: place for place, (case, _) in enumerate(prompts)}
    return sorted(found, key=lambda each: places.get(each.id, 0))


@contextmanager
def _stopped_early(judges: ThreadPoolExecutor) -> Iterator[None]:
    """Do not wait for a judge command when interrupted: its answers are asked again."""
    try:
        yield
    except BaseException:
        judges.shutdown(wait=False, cancel_futures=True)
        stop_programs()
        raise


def judged(
    cases: Sequence[Case],
    answers: Sequence[Answer],
    judging: JudgeChoice,
    *,
    note: Note,
    processes: Sequence[JudgeProcess] = (),
) -> list[Asked]:
    """The cases with their answers, as many to each, judged; equal answers once. `processes`: as in
    `judge_all`."""
    count = len(answers) // len(cases)
    known: dict[tuple[int, str, bool], int] = {}
    pairs: list[tuple[Case, Answer]] = []
    for n, answer in enumerate(answers):
        key, case = (n // count, answer.marked, answer.ended), cases[n // count]
        if known.setdefault(key, len(pairs)) == len(pairs):
            pairs.append((replace(case, id=f"{case.id} #{n % count + 1}"), answer))
    faults: list[str] = []
    found = judge_answers(pairs, judging, processes=processes, note=faults.append)
    verdicts = [
        found[known[n // count, answer.marked, answer.ended]] for n, answer in enumerate(answers)
    ]
    if judging.judge and (bad := [e for e in verdicts if e.judgement.score is None]):
        why = f"{len(bad)} of {len(verdicts)} answers have no score: {'; '.join(faults)}"
        raise ExpertError(f"--judge-command {judging.judge.command}: {why}")
    for text in faults:
        note(text)
    own = [
        OwnAnswer(
            text=each.answer,
            tokens=answer.tokens,
            ended=answer.ended,
            passed=each.judgement.passed,
            reason=each.judgement.reason,
            kind=each.judgement.kind,
            score=each.judgement.score,
        )
        for each, answer in zip(verdicts, answers, strict=True)
    ]
    return [
        Asked(
            id=case.id,
            prompt=case.prompt,
            expected=case.expected,
            answers=tuple(own[n * count : (n + 1) * count]),
        )
        for n, case in enumerate(cases)
    ]


def append(file: Path, asked: Sequence[Asked]) -> None:
    with file.open("ab") as stream:
        stream.write(b"".join(_line(each) + b"\n" for each in asked))


def keep(file: Path, asked: Sequence[Asked]) -> None:
    """Cut a file after its first answers, which are these."""
    with file.open("ab") as stream:
        stream.truncate(sum(len(_line(each)) + 1 for each in asked))


def _line(asked: Asked) -> bytes:
    def given(each: Any) -> dict[str, Any]:
        pairs = vars(each).items()
        return {key: value for key, value in pairs if value not in (None, ()) or key == "passed"}

    record = {**given(asked), "answers": [given(one) for one in asked.answers]}
    return json.dumps(record, ensure_ascii=False).encode()


# --- what the answers show -----------------------------------------------------------------------

MUCH_LONGER, MOSTLY = 1.5, 0.5
PARSED = ("parse", "schema")
"""Kinds of judgements that look at the form of an answer alone."""


def facts_of(asked: Sequence[Asked]) -> dict[str, Any]:
    """The figures of a round's answers."""
    answers = [one for each in asked for one in each.answers]
    judged = [one for one in answers if one.passed is not None]
    mixed = sum(bool(each.right) and bool(each.wrong) for each in asked)
    return {
        "prompts": len(asked),
        "answers": len(answers),
        "right": sum(bool(one.passed) for one in judged) / len(judged) if judged else None,
        "mixed": mixed / len(asked) if asked else None,
        "tokens": mean(one.tokens for one in answers) if answers else None,
    }


def doubts_about(asked: Sequence[Asked], before: dict[str, Any] | None) -> list[str]:
    """Signs that the judge is satisfied rather than the task done."""
    found = []
    earlier, now = (before or {}).get("tokens"), facts_of(asked)["tokens"]
    if earlier and now >= MUCH_LONGER * earlier:
        found.append(f"answers grow: {now:.0f} tokens, {earlier:.0f} before")
    right = [(each, one) for each in asked for one in each.right]
    found += _doubts_about_right(right) if right else []
    return [f"the judge may be gamed: {text}  (read answers.jsonl)" for text in found]


def _doubts_about_right(right: Sequence[tuple[Asked, OwnAnswer]]) -> list[str]:
    found = []
    longer = mean(len(one.text) for _, one in right) / max(
        1, mean(len(e.expected) for e, _ in right)
    )
    if longer >= MUCH_LONGER:
        found.append(f"right answers are {longer:.1f} times as long as the expected ones")
    text, times = Counter(one.key for _, one in right).most_common(1)[0]
    expected = Counter(normalised(each.expected) for each, _ in right)[text]
    if len(right) > 1 and times > MOSTLY * len(right) and times > 2 * expected:
        found.append(f"{percent(times / len(right))} of the right answers are the same text")
    by_form = sum(one.kind in PARSED for _, one in right) / len(right)
    if by_form > MOSTLY:
        found.append(f"{percent(by_form)} of the right answers are right by their form alone")
    return found
