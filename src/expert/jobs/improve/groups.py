"""Steps of answers (GRPO): for every step of the loop the weights in training answer its prompts
several times, the judge rewards the answers, and the step learns from their differences.

The prompts of a step are those of the run's own data at that step, and random numbers depend on the
step: a resumed run asks the same. What is in the file of answers is not asked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from expert.core.text import counted
from expert.jobs.improve.answers import Asked, append, judged, keep, read_answers
from expert.judging.judge_pool import JudgeProcess, most_processes
from expert.parallel.hang import NO_LIMIT

if TYPE_CHECKING:
    from expert.data.feed.feed import FedStep
    from expert.data.feed.order import StepBins
    from expert.data.records import Example
    from expert.jobs.validate.validate import JudgeChoice, Note
    from expert.judging.cases import Case
    from expert.run.session.groups import Prompt, Sampler
    from expert.run.session.session import Session


@dataclass(frozen=True, kw_only=True)
class Groups:
    """How the prompts of every step are asked, and where the answers are kept."""

    prompts: Sequence[tuple[Case, Example]]
    """Of the rows that are trained on, in their order."""
    file: Path
    judging: JudgeChoice
    count: int
    """Answers to each prompt."""
    seed: int
    note: Note

    def steps(self, session: Session, coming: Iterable[FedStep]) -> Iterator[FedStep]:
        """The steps of a run, with batches of answers in place of the expected ones."""
        from expert.run.session.groups import Sampler, fed_batches, laid_out

        plan, sampler = session.plan, Sampler(session, self.count, self.note)
        places = plan.batch.micro_batch * plan.data.max_seq_length
        how: dict[str, Any] = {"device": session.device, "pin": plan.loader.pin_memory}
        kept = read_answers(self.file)
        keep(self.file, kept)
        silent = set[str]()  # prompts that leave no room for an answer
        with ExitStack() as stack:
            own = (JudgeProcess() for _ in range(most_processes()))  # each starts on demand
            processes = [stack.enter_context(each) for each in own]
            for fed in coming:
                session.group.progress(NO_LIMIT)
                prompts = self._prompts_of(fed.step, session, sampler, silent)
                asked = [each for each in kept if each.step == fed.step.done]
                if [each.id for each in asked] != [case.id for case, _ in prompts]:
                    if asked:  # an interruption cut them short
                        keep(self.file, [each for each in kept if each.step != fed.step.done])
                    if session.group.signal is not None:
                        return  # the loop stops, though no step was due since the signal
                    asked = self._ask(sampler, fed.step.done, prompts, processes)
                    append(self.file, asked)
                session.group.progress()
                groups = [
                    (prompt.ids, [(one.ids, one.reward) for one in each.answers])
                    for (_, prompt), each in zip(prompts, asked, strict=True)
                ]
                packed = laid_out(groups, self.count, places)
                if packed is None:
                    continue  # the step would change nothing
                facts = {f"rewards/{name}": value for name, value in reward_facts(asked).items()}
                for made in fed_batches(fed.step, packed, self.count, **how):
                    yield replace(made, facts=facts)
        if silent:
            what = "leaves no room for an answer in the context: not asked"
            self.note(f"{counted(len(silent), 'prompt')} {what}")

    def _prompts_of(
        self, step: StepBins, session: Session, sampler: Sampler, silent: set[str]
    ) -> list[tuple[Case, Prompt]]:
        """The prompts of a step, without those that leave no room for an answer, which are added to
        `silent`."""
        split, _ = session.data.prepared
        store = split.open()
        documents = split.index.documents_in(step.bins).tolist()
        rows = dict.fromkeys(store.row(each) for each in documents)  # a long one may be in pieces
        chosen = [self.prompts[row] for row in rows]
        known = [(case, sampler.prompt(example)) for case, example in chosen]
        silent.update(case.id for case, prompt in known if prompt is None)
        return [(case, prompt) for case, prompt in known if prompt is not None]

    def _ask(
        self,
        sampler: Sampler,
        step: int,
        prompts: Sequence[tuple[Case, Prompt]],
        processes: Sequence[JudgeProcess],
    ) -> list[Asked]:
        rows = sampler.answers([prompt for _, prompt in prompts], seed=self.seed * 1_000_003 + step)
        found = judged(
            [case for case, _ in prompts],
            [row.answer() for row in rows],
            self.judging,
            note=self.note,
            processes=processes,
        )
        ids = iter([tuple(row.writer.ids) for row in rows])
        return [
            replace(
                each,
                step=step,
                answers=tuple(replace(one, ids=next(ids)) for one in each.answers),
            )
            for each in found
        ]


def reward_facts(asked: Sequence[Asked]) -> dict[str, float]:
    """The mean reward and length of answers, and the share of groups with a difference."""
    answers = [one for each in asked for one in each.answers]
    return {
        "mean": mean(one.reward for one in answers),
        "mixed": mean(len({one.reward for one in each.answers}) > 1 for each in asked),
        "tokens": mean(one.tokens for one in answers),
    }


def reward_curve(asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """The facts of every step, which counts from 1."""
    steps: dict[int, list[Asked]] = {}
    for each in asked:
        steps.setdefault(each.step or 0, []).append(each)
    return [{"step": step + 1, **reward_facts(own)} for step, own in sorted(steps.items())]


def first_and_last(asked: Sequence[Asked]) -> tuple[list[Asked], list[Asked]]:
    """The answers of the first and of the last tenth of the steps."""
    steps = sorted({each.step or 0 for each in asked})
    tenth = max(1, len(steps) // 10)
    first, last = set(steps[:tenth]), set(steps[-tenth:])
    return [each for each in asked if each.step in first], [e for e in asked if e.step in last]
