"""From rung to rung: what is tried, what holds, and what it is held against."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError, ManifestError
from expert.jobs.footing import ReadWith, find_footing
from expert.planning.ladder import (
    BASELINE,
    RUNGS,
    Ground,
    Rung,
    as_overrides,
    changes,
    find_rung,
    not_comparable,
    not_here,
    plan_hash,
    tolerance,
)

if TYPE_CHECKING:
    from expert.insight.ladder import Ladder, Measured, RungResult, Status
    from expert.jobs.rig import Rig, Seen
    from expert.jobs.rungs import Pace, Work
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan

SAME_ROWS_AN_UPDATE = 0.02
"""How far the rows of an update may be from those of the other rungs, as a share."""


class CannotClimb(ExpertError):
    """A ladder that cannot be begun."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be measured, and how."""

    read: ReadWith
    command: str
    model: str | None = None
    vram: str | None = None
    quick: bool = False
    only: tuple[str, ...] = ()
    """Names of rungs; the others are taken as they are. None: all are measured."""
    remember: bool = True
    allow_remote_code: bool = False


class Watcher:
    """Told how a climb goes; this one says nothing."""

    def preparing(self, name: str, rows: int, tokens: int) -> None:
        """Rows are being tokenised."""

    def begins(self, rung: Rung, number: int, of: int) -> None:
        """A rung begins, one of so many that may be measured."""

    def goes_on(self, doing: str, done: int, of: int) -> None:
        """What the rung is doing, and how far it is."""

    def ends(self, result: RungResult) -> None:
        """A rung has ended, or was passed over."""

    def remembered(self, file: Path) -> None:
        """What won is kept for later plans."""

    def not_remembered(self, because: str) -> None:
        """What won could not be kept."""


@dataclass
class Standing:
    """The rung that the next one is held against."""

    values: dict[str, Any]
    """Keys of training.config of all rungs that held."""
    plan: RunPlan | None = None
    result: RungResult | None = None
    learnt: int | None = None
    gains: dict[str, float] = field(default_factory=dict)


class Climb:
    """One climb: the ground it begins on, and where it stands."""

    def __init__(self, asked: Asked, watcher: Watcher) -> None:
        from expert.jobs.rungs import QUICK, THOROUGH
        from expert.jobs.smollm2 import provide_model
        from expert.planning.machine import describe_machine

        self.asked, self.watcher = asked, watcher
        self.pace: Pace = QUICK if asked.quick else THOROUGH
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
        self.named = self._named()
        self.started = time.monotonic()
        self.results: list[RungResult] = []
        self.counts: dict[str, int] = {}

    # --- planning ------------------------------------------------------------------------------

    def _plan(self, read: ReadManifest) -> RunPlan:
        from expert.jobs.planning import plan

        return plan(
            read,
            model=self.asked.model,
            vram=self.asked.vram,
            machine=self.machine,
            use_measurements=False,
            look=False,
        )

    # --- climbing ------------------------------------------------------------------------------

    def run(self, rig: Rig, place: Path) -> Ladder:
        """Try every rung from the bottom to the top."""
        from expert.insight.ladder import FILE

        number, of = 0, len(self.named)
        for rung in (BASELINE, *RUNGS):
            number += rung.name in self.named
            result = self._try(rung, number, of, rig, place)
            if result is None:
                continue
            self.results.append(result)
            self.watcher.ends(result)
            ladder = self._ladder(rig.environment)
            text = json.dumps(ladder.model_dump(mode="json"), indent=2, ensure_ascii=False)
            (place / FILE).write_text(text + "\n", encoding="utf-8")
        return self._ladder(rig.environment)

    def _try(self, rung: Rung, number: int, of: int, rig: Rig, place: Path) -> RungResult | None:
        """Measure a rung where that means something; None for one that nobody asked about."""
        here = self.standing
        ground = self._ground_of(here)
        values = {**here.values, **rung.values(ground)}
        if rung is not BASELINE and (reason := rung.needs(ground)):
            return self._passed_over(rung, reason)
        try:
            read, plan = self._planned(values)
        except ManifestError as error:
            what = error.problems[0].what
            return self._result(rung, "failed", f"goes with nothing below: {what}", None, 0.0)
        if here.plan is not None and (reason := not_here(rung, here.plan, plan)):
            here.values = values  # it changes nothing here, but a later choice may look at it
            return self._passed_over(rung, reason)
        if rung.name not in self.named:
            self.standing = Standing(values, plan, None, here.learnt, here.gains)
            return None
        began = time.monotonic()
        self.watcher.begins(rung, number, of)
        seen = rig.measure(self._work(rung, plan, read, place), self.watcher.goes_on)
        self.counts = self.counts or seen.counts
        result = self._judge(rung, plan, seen, time.monotonic() - began)
        if result.status == "kept":
            self._stand_on(rung, result, values, plan)
        elif here.result is None:
            # Nothing below could be measured, so that this rung cannot be blamed.
            self.standing = Standing(values, plan, None, here.learnt, here.gains)
        return result

    def _named(self) -> set[str]:
        """Rungs to be measured: all, or those that were named and the one below each of them."""
        order = [rung.name for rung in (BASELINE, *RUNGS)]
        if not self.asked.only:
            return set(order)
        wanted = [rung.name for rung in wanted_rungs(self.asked.only)]
        there, standing = [BASELINE.name], Standing(BASELINE.values(self.footing.ground))
        standing.plan = self._planned(standing.values)[1]
        for rung in RUNGS:
            ground = self._ground_of(standing)
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
        below = [there[place - 1] for place, name in enumerate(there) if place and name in wanted]
        return {*wanted, *below}

    def _ground_of(self, standing: Standing) -> Ground:
        return replace(self.footing.ground, packed=standing.values.get("packing") is True)

    def _planned(self, values: Mapping[str, Any]) -> tuple[ReadManifest, RunPlan]:
        read = self.asked.read((*self.footing.overrides, *as_overrides(values)))
        return read, self._plan(read)

    def _work(self, rung: Rung, plan: RunPlan, read: ReadManifest, place: Path) -> Work:
        from expert.jobs.rungs import Work

        return Work(
            name=rung.name.replace(" ", "-").replace("+", "and"),
            plan=plan.model_dump(mode="json"),
            manifest=read.manifest.model_dump(mode="json", exclude_unset=True),
            folder=str(read.folder),
            runs=str(place / "runs"),
            pace=asdict(self.pace),
            learnt=self.standing.learnt,
            judged_in=self.top.kernels.precision,
            own_way=self._not_comparable(plan) != "",
            allow_remote_code=self.asked.allow_remote_code,
        )

    def _not_comparable(self, plan: RunPlan) -> str:
        before = self.standing.plan
        return not_comparable(before, plan) if before is not None else ""

    def _stand_on(
        self, rung: Rung, result: RungResult, values: dict[str, Any], plan: RunPlan
    ) -> None:
        assert result.measured is not None
        gains = dict(self.standing.gains)
        if result.gain is not None:
            gains |= dict.fromkeys(rung.about, result.gain)
        self.standing = Standing(values, plan, result, result.measured.updates_learnt, gains)

    # --- judging -------------------------------------------------------------------------------

    def _passed_over(self, rung: Rung, reason: str) -> RungResult | None:
        if rung.name not in self.named:
            return None
        return self._result(rung, "not here", reason, None, 0.0)

    def _judge(self, rung: Rung, plan: RunPlan, seen: Seen, seconds: float) -> RungResult:
        from expert.insight.ladder import loss_difference, own_difference, verdict

        if seen.measured is None:
            return self._result(rung, "failed", seen.because, plan, seconds)
        here = seen.measured
        below, base = self.standing.result, self._baseline()
        if below is None or below.measured is None or self.standing.plan is None:
            alone = {"cumulative": 1.0 if rung is BASELINE else None}
            return self._result(rung, "kept", "", plan, seconds, measured=here, **alone)
        allowed, because = tolerance(self.standing.plan, plan)
        reason = self._not_comparable(plan)
        status, why = verdict(below.measured, here, allowed, comparable=not reason)
        others = "data.packing" in changes(self.standing.plan, plan)
        return self._result(
            rung,
            status,
            why,
            plan,
            seconds,
            measured=here,
            below=below.name,
            gain=here.tokens_per_second / below.measured.tokens_per_second,
            cumulative=here.tokens_per_second / base.tokens_per_second if base else None,
            loss_difference=loss_difference(below.measured, here),
            own_difference=own_difference(here) if reason else None,
            tolerance=allowed,
            tolerance_because=f"{reason}: held to itself" if reason else because,
            same_rows=not others,
        )

    def _baseline(self) -> Measured | None:
        first = self.results[0] if self.results else None
        return first.measured if first is not None and first.name == BASELINE.name else None

    def _result(
        self,
        rung: Rung,
        status: Status,
        because: str,
        plan: RunPlan | None,
        seconds: float,
        **more: Any,
    ) -> RungResult:
        from expert.insight.ladder import RungResult

        before = self.standing.plan
        return RungResult(
            name=rung.name,
            adds=rung.adds,
            status=status,
            because=because,
            changes=changes(before, plan) if before is not None and plan is not None else {},
            settings=rung.values(self.footing.ground),
            plan_hash=plan_hash(plan) if plan is not None else "",
            seconds=seconds,
            **more,
        )

    # --- the result ----------------------------------------------------------------------------

    def _ladder(self, environment: Mapping[str, Any]) -> Ladder:
        from expert import __version__
        from expert.insight.ladder import Ladder

        top, counts = self.top, self.counts
        return Ladder(
            name=top.expert,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=self.asked.command,
            version=__version__,
            card=top.target,
            device=top.kernels.device,
            model=top.model.name,
            parameters=top.model.parameters,
            adapter=top.adapter.type,
            quantization=top.model.quantization,
            dataset=str(top.data.dataset.get("path") or "several tasks"),
            training_rows=counts.get("training_rows", 0),
            max_seq_length=top.data.max_seq_length,
            examples_per_update=self.footing.examples,
            held_out_rows=counts.get("held_out_rows", 0),
            held_out_tokens=counts.get("held_out_tokens", 0),
            quick=self.asked.quick,
            seconds=time.monotonic() - self.started,
            environment=dict(environment),
            notes=[*self.footing.notes, *self._rows_an_update()],
            rungs=self.results,
        )

    def _rows_an_update(self) -> list[str]:
        """Whether every rung had as many rows in an update, and which did not."""
        planned, said = self.footing.examples, []
        for result in self.results:
            if result.measured is None:
                continue
            rows = result.measured.examples_per_update
            # Packed sequences hold a number of rows on average that is seldom a whole one.
            if abs(rows - planned) > max(0.5, SAME_ROWS_AN_UPDATE * planned):
                said.append(f"{result.name}: {rows:.1f} rows an update, not {planned}")
            elif result.same_rows is False:
                said.append(f"{result.name}: {rows:.1f} rows an update on average, other ones")
        return said


def wanted_rungs(names: tuple[str, ...]) -> list[Rung]:
    """The rungs of these names; an error names those that there are."""
    found = []
    for name in names:
        rung = find_rung(name)
        if rung is None:
            known = ", ".join(rung.name for rung in (BASELINE, *RUNGS))
            raise CannotClimb(f"--only {name}: there is no such rung  (rungs: {known})")
        found.append(rung)
    return found
