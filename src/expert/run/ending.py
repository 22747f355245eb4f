"""The end of a run: the best weights, the test rows, and what a user takes away."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.run.session import Session
    from expert.training.evaluation import EvalResult


def take_best(session: Session) -> None:
    """Go back to the best checkpoint where the plan says so and it is not the last one."""
    from expert.run.checkpoints import NAME, load
    from expert.training.checkpoint import CheckpointError

    best = session.best.best_step
    if not session.plan.watch.load_best or best is None or best == session.state.done:
        return
    path = session.folder.checkpoints / f"{NAME}{best:06d}"
    try:
        groups = load(path).groups
    except CheckpointError as error:
        text = f"the last weights are kept, the best cannot be had: {error}"
        session.emit("warning", step=session.state.done, text=text)
        return
    session.built.load(groups)
    session.taken = best
    session.emit("took_best", step=best, path=str(path))


def last_eval_loss(session: Session) -> float | None:
    """The loss on the validation rows when they were last looked at, perhaps before a resume."""
    from expert.core.events import read_events

    if session.last_eval is not None or not session.evaluates:
        return session.last_eval.loss if session.last_eval is not None else None
    events = read_events(session.folder.events) if session.folder.events.is_file() else ()
    told = [e for e in events if e["event"] == "eval" and e.get("split") == "validation"]
    loss = told[-1].get("loss") if told else None
    return float(loss) if isinstance(loss, int | float) else None


def evaluate_test(session: Session) -> EvalResult | None:
    """The test rows by the weights that the run ends with; None where there are no such rows, or a
    signal asked for an end in between."""
    from expert.run.evaluate import evaluate_split

    if session.data.test is None:
        return None
    began = time.monotonic()
    result = evaluate_split(session, session.data.test)
    if result is not None:
        session.emit(
            "eval",
            step=session.state.done if session.taken is None else session.taken,
            split="test",
            loss=result.loss,
            perplexity=result.perplexity,
            token_accuracy=result.token_accuracy,
            tokens=result.targets,
            best=False,
            seconds=time.monotonic() - began,
        )
    return result


def publish_final(session: Session) -> Path:
    """What a user takes away, whole or not at all."""
    from expert.core.publish import publishing
    from expert.model.saving import save_trained
    from expert.training.checkpoint import bytes_needed, check_space

    loaded = session.built.loaded
    check_space(session.folder.path, bytes_needed({"weights": loaded.weights}))
    with publishing(session.folder.final) as folder:
        save_trained(loaded, folder)
    return session.folder.final
