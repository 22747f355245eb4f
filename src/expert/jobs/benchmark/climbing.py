"""From rung to rung: what is tried, what holds, and what it is held against."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ManifestError
from expert.core.files import write_text_atomically
from expert.insight.ladder.ladder import STAND
from expert.insight.ladder.pairs import Paired
from expert.jobs.benchmark.asked import Asked, CannotClimb, Watcher, wanted_rungs
from expert.jobs.benchmark.footing import find_footing
from expert.jobs.benchmark.holding import Timed, hold_against, time_against_baseline
from expert.jobs.benchmark.minutes import LEARNING_SHARE, ClimbTime
from expert.jobs.benchmark.result import judged, ladder_of, result_of
from expert.jobs.benchmark.rig import RungLost
from expert.planning.ladder import (
    BASELINE,
    RUNGS,
    THE_REST,
    Ground,
    Rung,
    as_overrides,
    not_comparable,
    not_here,
    together,
)
from expert.planning.machine.threads import choose_threads

if TYPE_CHECKING:
    from expert.insight.ladder.ladder import Ladder, RungResult
    from expert.jobs.benchmark.rig import Rig, Seen
    from expert.jobs.benchmark.rungs import Work
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan


@dataclass
class Standing:
    """The rung that the next one is held against."""

    values: dict[str, Any]
    """Keys of training.config of all rungs that stand."""
    plan: RunPlan | None = None
    result: RungResult | None = None
    learnt: int | None = None
    gains: dict[str, float] = field(default_factory=dict)
    timed: Timed | None = None
    """How it can be timed again; None where it was never measured."""


class Climb:
    """One climb: the ground it begins on, and where it stands."""

    def __init__(self, asked: Asked, watcher: Watcher) -> None:
        from expert.jobs.benchmark.rungs import pace_of
        from expert.planning.machine.machine import describe_machine
        from expert.run.smollm2 import provide_model

        self.asked, self.watcher = asked, watcher
        self.pace = pace_of(quick=asked.quick, minutes=asked.minutes)
        wanted_rungs(asked.only)  # a name that is none ends it before anything is prepared
        first = asked.read(())
        if first.manifest.training.dataset.streaming:
            raise CannotClimb(
                "training.dataset.streaming: a stream has no rows that every rung could see again  "
                "(--set training.dataset.streaming=false)"
            )
        provide_model(first, asked.model)
        self.machine = describe_machine(first.folder)
        self.top = self._plan(first)
        """The plan without a ladder: every choice left to it."""
        self.footing = find_footing(asked.read, self.top, model=asked.model, tell=watcher.preparing)
        self.standing = Standing(BASELINE.values(self.footing.ground))
        self.expected = self._expected()
        """Names of the rungs that are likely to be measured: those that change something here."""
        self.named = self._named()
        self.time = ClimbTime(self.pace.total_seconds)
        self.results: list[RungResult] = []
        self.left_out: list[Rung] = []
        """Rungs that there was no time for."""
        self.counts: dict[str, int] = {}
        self.threads: int | None = None
        """Of a CPU: settled by the first rung, and the same for all."""
        self.lowered = False
        self.base: Timed | None = None
        self.against_baseline: Paired | None = None
        self.warned = False
        self.so_far: Ladder | None = None
        """What was measured, as soon as there is something."""

    # --- planning ------------------------------------------------------------------------------

    def _plan(self, read: ReadManifest) -> RunPlan:
        from expert.run.open import open_run

        opened = open_run(
            read,
            data="unread",
            model=self.asked.model,
            vram=self.asked.vram,
            machine=self.machine,
            use_measurements=False,
        )
        return opened.plan

    # --- climbing ------------------------------------------------------------------------------

    def run(self, rig: Rig, place: Path) -> Ladder:
        """Try every rung from the bottom to the top, and what won against the bottom.

        What stands ready is asked to leave only at the end: after Ctrl-C it may be in the middle of
        a window, and the rig ends its process at once."""
        self.time = ClimbTime(self.pace.total_seconds)
        for rung in (BASELINE, *RUNGS):
            result = self._try(rung, rig, place)
            if result is not None:
                self._keep(result, rig, place)
        self._climb_the_rest(rig, place)
        self._hold_against_baseline(rig)
        for each in (self.standing.timed, self.base):
            if each is not None:
                each.leave()
        return self._write(rig, place)

    def _keep(self, result: RungResult, rig: Rig, place: Path) -> None:
        self.results.append(result)
        self.watcher.ends(result)
        self._write(rig, place)

    def _write(self, rig: Rig, place: Path) -> Ladder:
        from expert.insight.ladder.ladder import FILE

        ladder = ladder_of(self, rig.environment)
        write_text_atomically(place / FILE, ladder.as_text())
        if any(rung.measured for rung in ladder.rungs):
            self.so_far = ladder
        return ladder

    def _try(self, rung: Rung, rig: Rig, place: Path) -> RungResult | None:
        """Measure a rung where that means something; None for one that nobody asked about."""
        here = self.standing
        if self.left_out and rung.name in self._to_come(BASELINE):
            return self._left_out(rung)
        ground = self._ground_of(here.values)
        values = {**here.values, **rung.values(ground)}
        if rung is not BASELINE and (reason := rung.needs(ground)):
            return self._passed_over(rung, reason)
        try:
            read, plan = self._planned(values)
        except ManifestError as error:
            what = error.problems[0].what
            return result_of(self, rung, "failed", f"goes with nothing below: {what}", None, 0.0)
        if here.plan is not None and (reason := not_here(rung, here.plan, plan)):
            here.values = values  # it changes nothing here, but a later choice may look at it
            return self._passed_over(rung, reason)
        if rung.name not in self.named:
            if here.timed is not None:
                here.timed.leave()
            self.standing = Standing(values, plan, None, here.learnt, here.gains)
            return None
        if self._no_time_for(rung):
            return self._left_out(rung)
        return self._tried(rung, values, self._work(rung, plan, read, place), plan, rig)

    def _no_time_for(self, rung: Rung) -> bool:
        """The last one is measured however late it is: a climb ends at its top. So is one that was
        asked for by its name."""
        to_come = len(self._to_come(rung)) - 1
        return to_come > 0 and not self.asked.only and self.time.is_up_for(to_come)

    def _left_out(self, rung: Rung) -> RungResult:
        self.left_out.append(rung)
        words = f"in '{THE_REST}', as {self.time.elapsed:.0f} s had passed"
        more = "without --quick there is more time" if self.asked.quick else "--minutes N for more"
        hint = f"  ({more})" if len(self.left_out) == 1 else ""
        return result_of(self, rung, "no time", f"{words}{hint}", None, 0.0)

    def _climb_the_rest(self, rig: Rig, place: Path) -> None:
        """What there was no time for rung by rung, together."""
        if not self.left_out:
            return
        rest = together(self.left_out, self.standing.values, self._ground_of)
        values = {**self.standing.values, **rest.settings}
        try:
            read, plan = self._planned(values)
        except ManifestError as error:
            what = error.problems[0].what
            failed = result_of(self, rest, "failed", f"do not go together: {what}", None, 0.0)
            self._keep(failed, rig, place)
            return
        work = self._work(rest, plan, read, place)
        self._keep(self._tried(rest, values, work, plan, rig), rig, place)

    def _tried(
        self, rung: Rung, values: dict[str, Any], work: Work, plan: RunPlan, rig: Rig
    ) -> RungResult:
        """Measure the rung beside the one that stands, and stand on it where it holds."""
        here, to_come = self.standing, self._to_come(rung)
        number = len([r for r in self.results if r.measured or r.status == "failed"]) + 1
        whole = number + len(to_come) - 1
        self.watcher.begins(rung, number, whole, self.time.left(len(to_come) + 1))
        share = self.time.begin_rung(len(to_come) + 1)
        pace = replace(
            self.pace, learn_seconds=min(self.pace.learn_seconds, LEARNING_SHARE * share)
        )
        new = Timed(name=rung.name, work=replace(work, pace=asdict(pace)), plan=plan)
        hold = partial(hold_against, pace=pace, time=self.time, tell=self.watcher.goes_on)
        try:
            seen, paired = hold(here.timed, new, rig)
            if self._with_fewer_threads(seen):
                new.leave()
                self.time.begin_rung(len(to_come) + 1)  # or every rung would seem to take twice
                new.work = replace(new.work, threads=self.threads)
                seen, paired = hold(here.timed, new, rig)
        except RungLost as lost:
            new.leave()
            result = result_of(self, rung, "failed", str(lost), plan, self.time.end_rung())
            if here.result is None:
                # Nothing below could be measured, so that this rung cannot be blamed.
                self.standing = Standing(values, plan, None, here.learnt, here.gains)
            return result
        seen = self._heeded(seen)
        result = judged(self, rung, plan, seen, paired, self.time.end_rung())
        if rung is BASELINE:
            self.base = new
        if result.status in STAND:
            self._stand_on(rung, result, values, plan, new)
        elif new is not self.base:
            new.leave()
        return result

    def _with_fewer_threads(self, seen: Seen) -> bool:
        """Whether the first rung has shown that others use the cores: then all compute with fewer
        threads. One look before it began may have missed that, and threads that wait for each
        other on crowded cores are slowed down more than anything a rung could gain: of one rung
        windows of 104 and of 635 tokens a second were seen with two threads on two such cores."""
        first, self.threads = self.threads is None, self.threads or seen.measured.threads
        if not first or self.threads is None:
            return False
        cores, busy = seen.measured.cores or self.threads, seen.measured.others or 0.0
        chosen = choose_threads(
            own=self.threads, granted=cores, cores=cores, busy=busy, environ=os.environ
        )
        self.lowered = bool(seen.measured.lowered) or chosen.lowered
        self.threads = chosen.count
        return chosen.lowered

    def _heeded(self, seen: Seen) -> Seen:
        """With what all rungs have in common; warns of neighbours once."""
        from expert.insight.ladder.doubts import crowded

        measured = seen.measured.model_copy(update={"lowered": self.lowered})
        self.counts = self.counts or seen.counts
        words = crowded(measured)
        if words and not self.warned:
            self.warned = True
            self.watcher.crowded(words)
        return replace(seen, measured=measured)

    def _hold_against_baseline(self, rig: Rig) -> None:
        """Time what won and the baseline in turns: a product of gains multiplies their errors."""
        won, base = self.standing.timed, self.base
        result = self.standing.result
        if won is None or base is None or won is base or result is None:
            return
        if result.below == BASELINE.name and result.paired is not None:
            self.against_baseline = result.paired
            return
        self.watcher.compares(won.name, self.time.left(1))
        self.time.begin_rung(1)
        try:
            self.against_baseline = time_against_baseline(
                won, base, rig, pace=self.pace, time=self.time, tell=self.watcher.goes_on
            )
        except RungLost:
            return
        better = result.model_copy(update={"cumulative": self.against_baseline.gain})
        self.results = [better if one is result else one for one in self.results]
        self.standing.result = better

    def _to_come(self, rung: Rung) -> list[str]:
        """This rung and those after it that are likely to be measured."""
        order = [one.name for one in (BASELINE, *RUNGS)]
        after = order[order.index(rung.name) + 1 :] if rung.name in order else []
        return [rung.name, *(n for n in after if n in self.expected and n in self.named)]

    def _expected(self) -> list[str]:
        """Rungs that change something here, if each of them stands."""
        there, standing = [BASELINE.name], Standing(BASELINE.values(self.footing.ground))
        standing.plan = self._planned(standing.values)[1]
        for rung in RUNGS:
            ground = self._ground_of(standing.values)
            if rung.needs(ground):
                continue
            values = {**standing.values, **rung.values(ground)}
            try:
                plan = self._planned(values)[1]
            except ManifestError:  # it will fail, and what is above stands on the rung below it
                continue
            if not not_here(rung, standing.plan, plan):
                standing = Standing(values, plan)
                there.append(rung.name)
        return there

    def _named(self) -> set[str]:
        """Rungs to be measured: all, or those that were named and the one below each of them."""
        if not self.asked.only:
            return {rung.name for rung in (BASELINE, *RUNGS)}
        wanted = [rung.name for rung in wanted_rungs(self.asked.only)]
        there = self.expected
        below = [there[place - 1] for place, name in enumerate(there) if place and name in wanted]
        return {*wanted, *below}

    def _ground_of(self, values: Mapping[str, Any]) -> Ground:
        return replace(self.footing.ground, packed=values.get("packing") is True)

    def _planned(self, values: Mapping[str, Any]) -> tuple[ReadManifest, RunPlan]:
        read = self.asked.read((*self.footing.overrides, *as_overrides(values)))
        return read, self._plan(read)

    def _work(self, rung: Rung, plan: RunPlan, read: ReadManifest, place: Path) -> Work:
        from expert.jobs.benchmark.rungs import Work

        return Work(
            name=rung.name.replace(" ", "-").replace("+", "and"),
            plan=plan.model_dump(mode="json"),
            manifest=read.manifest.model_dump(mode="json", exclude_unset=True),
            folder=str(read.folder),
            runs=str(place / "runs"),
            pace=asdict(self.pace),
            learnt=self.standing.learnt,
            judged_in=self.top.kernels.precision,
            own_way=self.not_comparable(plan) != "",
            threads=self.threads,
            allow_remote_code=self.asked.allow_remote_code,
        )

    def not_comparable(self, plan: RunPlan) -> str:
        before = self.standing.plan
        return not_comparable(before, plan) if before is not None else ""

    def _stand_on(
        self, rung: Rung, result: RungResult, values: dict[str, Any], plan: RunPlan, timed: Timed
    ) -> None:
        assert result.measured is not None
        below = self.standing.timed
        if below is not None:
            below.leave()
        gains = dict(self.standing.gains)
        if result.gain is not None and result.status == "kept":
            gains |= dict.fromkeys(rung.about, result.gain)
        learnt = result.measured.updates_learnt
        self.standing = Standing(values, plan, result, learnt, gains, timed)

    # --- judging -------------------------------------------------------------------------------

    def _passed_over(self, rung: Rung, reason: str) -> RungResult | None:
        if rung.name not in self.named:
            return None
        return result_of(self, rung, "not here", reason, None, 0.0)
