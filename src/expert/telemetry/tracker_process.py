"""The process of a tracker with a third-party package: events arrive as lines of JSON.

It answers with `{"said": …}` (a message for the user), `{"failed": …}` and `{"closed": true}`. It
ends on the event "close", or when the run is gone. Keys and tokens come from the environment, or
from where the package's login stores them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.events import read_events
from expert.core.files import write_text_atomically
from expert.core.links import refuse_links
from expert.core.secrets import redacted
from expert.core.stored_json import read_object_or_empty
from expert.telemetry.trackers import CLOSING_SECONDS, OPENING_EVENTS, Notify, curve_values

ENDINGS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
LONGEST_SENTENCE = 500


class TrackerRun:
    """A run in a tracker: named after its folder, filed under a project, and continued if its
    folder records an id."""

    name = ""
    open: Callable[[], str]
    """Open or continue the run; returns the id to find it again."""
    configure: Callable[[Mapping[str, Any]], None]
    """Log the current plan."""
    log: Callable[[Mapping[str, float], int, float], None]
    """Log the values of curves at a step and time."""
    log_paths: Callable[[Mapping[str, str]], None]
    """Log the paths of the result; nothing is uploaded."""
    close: Callable[[], None]
    """Write the rest, and how the run ended."""

    def __init__(self, run: Path, tell: Notify) -> None:
        self.run, self.tell = run, tell
        plan = read_object_or_empty(run / "plan.json")
        watch = plan.get("watch", {})
        self.project = str(watch.get("tracker_project") or plan.get("expert") or run.parent.name)
        self.title = str(watch.get("tracker_run_name") or run.name)
        record = run / "trackers" / f"{self.name}.json"
        refuse_links(record, below=run)
        record.parent.mkdir(exist_ok=True)
        known = read_object_or_empty(record).get("id")
        self.known = known if isinstance(known, str) else None
        identity = self.open()
        if identity != self.known:  # which run of the tracker this is
            text = json.dumps({"id": identity, "project": self.project}, indent=2)
            write_text_atomically(record, text + "\n")
        self.ending = "FAILED"  # if the run vanishes without an event

    def beside(self, name: str) -> Path:
        """A folder for all runs, next to the run folders."""
        store = self.run.absolute().parent / name
        refuse_links(store, below=store.parent)
        return store

    def write(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event", "")
        if kind in ("started", "fell_back"):
            # Secrets were removed from the plan when it was written; decisions have the reasons.
            plan = read_object_or_empty(self.run / "plan.json")
            self.configure(
                {
                    key: value
                    for key, value in plan.items()
                    if isinstance(value, Mapping | str | int | float) and key != "decisions"
                }
            )
        values = curve_values(event)
        if values:
            self.log(values, int(event["step"]), float(event.get("time") or 0))
        self.ending = ENDINGS.get(kind, "FAILED" if kind in OPENING_EVENTS else self.ending)
        if kind == "finished":
            facts = {"final": event.get("final"), "run": str(self.run)}
            self.log_paths({name: str(value) for name, value in facts.items() if value})


class Wandb(TrackerRun):
    """Weights & Biases; offline if WANDB_MODE says so or if it cannot be reached."""

    name = "wandb"

    def open(self) -> str:
        import wandb

        mode, identity = os.environ.get("WANDB_MODE", "online"), self.known or uuid.uuid4().hex[:12]
        try:
            self.tracker_run = self._init(mode, identity)
        except (wandb.errors.Error, OSError) as error:
            if mode != "online":
                raise
            wandb.teardown(exit_code=1)  # otherwise it considers the run open
            self.tracker_run = self._init("offline", identity)
            folder = Path(self.tracker_run.dir).parent
            self.tell(
                f"W&B cannot be used ({_brief(error)}); its curves are written offline  "
                f"(upload them with: wandb sync {folder})"
            )
        # Rows are numbered by all events so far: a continued run adds rows, also in an offline
        # folder that was never uploaded.
        events = read_events(self.run / "events.jsonl") if self.known else ()
        self.rows = sum(1 for event in events if curve_values(event))
        self.tracker_run.define_metric("step")
        self.tracker_run.define_metric("*", step_metric="step")
        return identity

    def _init(self, mode: str, identity: str) -> Any:
        import wandb

        quiet = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=CLOSING_SECONDS / 3,
            finish_timeout=CLOSING_SECONDS / 3,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # already in the events
            x_disable_meta=True,  # the command line may contain a secret
            x_save_requirements=False,
            symlink=False,
        )
        return wandb.init(
            dir=str(self.beside("wandb").parent),  # it creates links, not allowed in a run folder
            project=os.environ.get("WANDB_PROJECT") or self.project,
            name=self.title,
            id=identity,
            resume="allow" if mode == "online" else None,
            mode=mode,
            settings=quiet,
        )

    def configure(self, settings: Mapping[str, Any]) -> None:
        self.tracker_run.config.update(dict(settings), allow_val_change=True)

    def log(self, values: Mapping[str, float], step: int, when: float) -> None:
        self.tracker_run.log({"step": step, "time": when, **values}, step=self.rows)
        self.rows += 1

    def log_paths(self, facts: Mapping[str, str]) -> None:
        self.tracker_run.summary.update(dict(facts))

    def close(self) -> None:
        self.tracker_run.finish(exit_code=int(self.ending != "FINISHED"))


class Mlflow(TrackerRun):
    """MLflow at MLFLOW_TRACKING_URI, by default in files next to the run folders."""

    name = "mlflow"

    def open(self) -> str:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        store = os.environ.get("MLFLOW_TRACKING_URI")
        if not store:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            store = self.beside("mlflow").as_uri()
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=store)
        if self.known:
            with suppress(MlflowException):  # it is in another store, or was deleted
                self.client.update_run(self.known, status="RUNNING")
                self.identity = self.known
                return self.known
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if not experiment:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.project
            with suppress(MlflowException):  # it exists
                self.client.create_experiment(name)
            experiment = str(self.client.get_experiment_by_name(name).experiment_id)
        self.identity = str(self.client.create_run(experiment, run_name=self.title).info.run_id)
        return self.identity

    def configure(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        params = self.client.get_run(self.identity).data.params  # these cannot be changed
        flat = {key: str(value)[:5000] for key, value in _flat(settings)}
        new = [Param(key, value) for key, value in flat.items() if key not in params]
        tags = [
            RunTag(f"changed.{key}", value)
            for key, value in flat.items()
            if params.get(key, value) != value
        ]
        for start in range(0, max(len(new), len(tags)), 100):
            part = slice(start, start + 100)
            self.client.log_batch(self.identity, params=new[part], tags=tags[part])

    def log(self, values: Mapping[str, float], step: int, when: float) -> None:
        from mlflow.entities import Metric

        stamp = int(when * 1000)
        metrics = [Metric(key, value, stamp, step) for key, value in values.items()]
        self.client.log_batch(self.identity, metrics=metrics)

    def log_paths(self, facts: Mapping[str, str]) -> None:
        for name, value in facts.items():
            self.client.set_tag(self.identity, f"{name}_folder", value)

    def close(self) -> None:
        self.client.set_terminated(self.identity, self.ending)


class Trackio(TrackerRun):
    """Trackio: a database in TRACKIO_DIR, or the Space TRACKIO_SPACE_ID. It reports problems by
    warnings."""

    name = "trackio"

    def open(self) -> str:
        warnings.showwarning = lambda message, *_, **__: self.tell(f"Trackio: {_brief(message)}")
        warnings.simplefilter("once", UserWarning)
        import trackio

        name = self.known or self.title
        self.tracker_run = trackio.init(
            project=self.project,
            name=name,
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # already in the events
            auto_log_cpu=False,
        )
        self.last_step = 0
        return name

    def configure(self, settings: Mapping[str, Any]) -> None:
        self.tracker_run.config.update(_flat(settings))  # sent with the first values

    def log(self, values: Mapping[str, float], step: int, when: float) -> None:
        self.last_step = max(step, self.last_step)
        self.tracker_run.log(dict(values), step=step)

    def log_paths(self, facts: Mapping[str, str]) -> None:
        named = {f"{name}_folder": value for name, value in facts.items()}
        self.tracker_run.log(named, step=self.last_step)

    def close(self) -> None:
        self.tracker_run.finish()


TRACKER_RUNS: dict[str, Callable[[Path, Notify], TrackerRun]] = {
    remote.name: remote for remote in (Wandb, Mlflow, Trackio)
}


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif value is not None:
            yield f"{above}{key}", value if isinstance(value, int | float | str) else str(value)


def _brief(error: object) -> str:
    """The first line, without secrets."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return redacted(lines[0])[:LONGEST_SENTENCE]


def main(name: str, run: str) -> None:
    """Write events from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keeps the package's prints out of the answers

    def answer(**fact: Any) -> None:
        answers.write(json.dumps(fact) + "\n")
        answers.flush()

    # Signals are meant for the run, whose last events must still be written.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    try:
        remote = TRACKER_RUNS[name](Path(run), lambda text: answer(said=text))
        for line in sys.stdin:
            event = json.loads(line)
            if event.get("event") == "close":
                break
            remote.write(event)
        limit = threading.Timer(CLOSING_SECONDS, os._exit, (1,))
        limit.daemon = True
        limit.start()
        remote.close()
        answer(closed=True)
    except Exception as error:  # noqa: BLE001 - report whatever a package raises
        own = isinstance(error, ExpertError)
        answer(failed=_brief(error) if own else f"{type(error).__name__}: {_brief(error)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # otherwise packages would wait for unfinished uploads
