"""Events of a run as text: the parts of a step line, and the lines of every other event.

Fields that are missing are left out, events that are not known have no lines: a file may be older
or newer than the program that shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from expert.cli.event_words import (
    bytes_in_words,
    counted,
    joined,
    listed,
    loss_in_words,
    number,
    percent,
    three_digits,
    time_in_words,
    whole,
    worded,
)
from expert.cli.words import loss, value_in_words

Event = Mapping[str, Any]
Line = tuple[str, str]
"""A line of text and its style in a terminal."""

GAP = "  "
NOTICEABLE = 0.02
"""A share by which a rate may be off from what stands beside it without a word."""


def step_parts(event: Event, *, total: int | None, epochs: float | None) -> dict[str, str]:
    """What a step event says, in the order it is shown; unknown values are left out."""
    step, epoch = whole(event, "step"), number(event, "epoch")
    parts = {
        "step": f"{step}/{total}" if total is not None else f"{step}",
        "loss": worded(number(event, "loss"), "loss {}", loss),
        "rate": worded(number(event, "rate"), "lr {:.1e}"),
        "speed": worded(number(event, "tokens_per_second"), "{:,.0f} tok/s"),
        "steps": worded(number(event, "steps_per_second"), "{} it/s", three_digits),
        "gpu": worded(number(event, "gpu_utilization"), "GPU {:.0f} %"),
        "memory": _memory(event),
        "data_wait": worded(number(event, "data_wait"), "data wait {:.1f} %", percent),
        "eta": worded(number(event, "eta_seconds"), "ETA {}", time_in_words),
    }
    if epoch is not None and epochs is not None and math.isfinite(epoch):
        parts["epoch"] = f"epoch {_current_epoch(epoch, epochs)}/{epochs:g}"
    return {name: text for name, text in parts.items() if text}


def _memory(event: Event) -> str:
    """The most that the run had of the card, or what is in use there by whomever where only that
    is known; without a card the most that the process had of the host."""
    for field, form in (
        ("peak_reserved_bytes", "peak {}"),
        ("gpu_memory_bytes", "{}"),
        ("cpu_peak_memory_bytes", "peak {} RAM"),
    ):
        known = number(event, field)
        if known is not None and math.isfinite(known):
            return form.format(bytes_in_words(known))
    return ""


def _current_epoch(epoch: float, epochs: float) -> int:
    """Which epoch, counted from 1: a whole number is one that is named, a fraction is progress."""
    last = max(1, math.ceil(epochs)) if math.isfinite(epochs) else int(epoch) + 1
    return min(last, int(epoch) if epoch == int(epoch) and epoch > 0 else int(epoch) + 1)


def lines_of(event: Event) -> list[Line]:
    """The lines that an event is printed as; none for events that are not shown."""
    writer = _WRITERS.get(str(event.get("event")))
    return writer(event) if writer is not None else []


def _started(event: Event) -> list[Line]:
    parameters, tokens = number(event, "trainable_parameters"), number(event, "tokens_per_epoch")
    epochs, steps = number(event, "epochs"), whole(event, "total_steps")
    facts = [
        worded(steps, "1 step" if steps == 1 else "{:,} steps"),
        worded(epochs, "{}", lambda passes: _epochs_in_words(passes, event)),
        worded(tokens, "{} tokens an epoch", counted),
        worded(parameters, "{} parameters learn", counted),
    ]
    who = f"{event.get('expert', 'expert')}: {event.get('model', 'model')}"
    device = f" on {event['device']}" if event.get("device") else ""
    lines = [(who + device, "bold")]
    if any(facts):
        lines.append((", ".join(filter(None, facts)), ""))
    if event.get("run"):
        lines.append((f"run folder: {event['run']}", "dim"))
    return lines


def _epochs_in_words(epochs: float, event: Event) -> str:
    """The passes that are made; where max_steps ends the run before those that were asked for,
    so much is said, and where nobody knows how many it will be, no more than that."""
    known = number(event, "epochs_to_come")
    if known is None or not math.isfinite(known):
        words = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
        return f"at most {words}" if event.get("ends_by") == "max_steps" else words
    digits = f"{known:.2g}" if known < 10 else f"{known:.0f}"
    return f"{digits} of {epochs:g} {'epoch' if epochs == 1 else 'epochs'} (max_steps)"


def _kernels(event: Event) -> list[Line]:
    return [(str(line), "dim") for line in event.get("lines") or ()]


def _compiled(event: Event) -> list[Line]:
    return [(joined("compiled", worded(number(event, "seconds"), "in {}", time_in_words)), "dim")]


def _epoch(event: Event) -> list[Line]:
    which = f"epoch {whole(event, 'epoch')}" + worded(number(event, "epochs"), "/{:g}")
    learnt = worded(number(event, "loss"), "loss {}", loss_in_words)
    validation = worded(number(event, "eval_loss"), "(validation {})", loss_in_words)
    parts = (
        which,
        " ".join(filter(None, (learnt, validation))),
        worded(number(event, "seconds"), "{}", time_in_words),
        worded(number(event, "tokens_per_second"), "{:,.0f} tok/s"),
        joined(
            worded(number(event, "samples_per_second"), "{:,.1f} samples/s"), _without_warmup(event)
        ),
    )
    return [(GAP.join(filter(None, parts)), "bold")]


def _without_warmup(event: Event) -> str:
    """Says so where the rates are not those of all tokens and seconds: the first updates, which
    compile and settle, are left out of them."""
    tokens, seconds = number(event, "tokens"), number(event, "seconds")
    rate = number(event, "tokens_per_second")
    if not tokens or not seconds or not rate or abs(tokens / seconds / rate - 1) < NOTICEABLE:
        return ""
    return "after the warm-up"


def _eval(event: Event) -> list[Line]:
    split = event.get("split") or "validation"
    parts = (
        worded(whole(event, "step"), "step {}"),
        worded(number(event, "loss"), f"{split} loss {{}}", loss),
        worded(number(event, "perplexity"), "perplexity {:.4g}"),
        worded(number(event, "token_accuracy"), "token accuracy {:.1f} %", percent),
        worded(number(event, "seconds"), "{}", time_in_words),
        "best so far" if event.get("best") is True else "",
    )
    return [(GAP.join(filter(None, parts)), "cyan")]


def _data(event: Event) -> list[Line]:
    found = "tokens were there" if event.get("hit") else "tokens were made"
    return [(f"{event.get('split', 'data')}: {found}: {event.get('because', '')}", "dim")]


def _saved(event: Event) -> list[Line]:
    parts = (
        f"saved {event.get('path', '')}",
        worded(number(event, "bytes"), "{}", bytes_in_words),
        worded(number(event, "seconds"), "{}", time_in_words),
    )
    return [(GAP.join(filter(None, parts)), "dim")]


def _fell_back(event: Event) -> list[Line]:
    why = ": ".join(str(event[key]) for key in ("failure", "reason") if event.get(key))
    lines = [(f"fell back: {why}", "yellow")]
    for change in event.get("changes") or ():
        path = str(change.get("path"))
        value = value_in_words(path, change.get("value"))
        because = f"  ({change['because']})" if change.get("because") else ""
        lines.append((f"  {path} = {value}{because}", "yellow"))
    return lines


def _not_finite(event: Event) -> list[Line]:
    bins = event.get("bins")
    where = f" in sequences {listed(bins)}" if bins else ""
    policy = f": {event['policy']}" if event.get("policy") else ""
    return [(f"step {event.get('step')}: not a finite number{where}{policy}", "yellow")]


def _spike(event: Event) -> list[Line]:
    parts = (
        worded(number(event, "median"), "median {}", loss_in_words),
        worded(number(event, "z"), "z {:.1f}"),
    )
    leap = worded(number(event, "loss"), "loss {}", loss_in_words)
    known = ", ".join(filter(None, parts))
    text = f"step {event.get('step')}: the loss leaps: {leap}"
    return [(f"{text} ({known})" if known else text, "yellow")]


def _rolled_back(event: Event) -> list[Line]:
    skipped = event.get("skipped")
    text = f"rolled back to step {event.get('to_step')}"
    return [(f"{text}, skipping {listed(skipped)}" if skipped else text, "yellow")]


def _skipped(event: Event) -> list[Line]:
    why = event.get("reason") or event.get("text") or ""
    return [(": ".join(filter(None, (f"step {event.get('step')} skipped", str(why)))), "yellow")]


def _columns(event: Event) -> list[Line]:
    return [(f"columns: {event.get('text', '')}", "")]


def _warning(event: Event) -> list[Line]:
    return [(f"warning: {event.get('text', '')}", "yellow")]


def _log_failed(event: Event) -> list[Line]:
    return [(f"warning: {event.get('what', '')}: {event.get('because', '')}", "yellow")]


def _threads(event: Event) -> list[Line]:
    count, cores = whole(event, "threads"), whole(event, "cores")
    if count is None:
        return []
    text = f"computing with {count} {'thread' if count == 1 else 'threads'}: {event.get('because')}"
    if event.get("lowered") is True:
        return [(f"{text}  (OMP_NUM_THREADS={cores} takes them all)", "yellow")]
    own = whole(event, "own")
    if event.get("kept") is True and own is not None and own != count:
        fix = f"OMP_NUM_THREADS={own} takes torch's own number, whose sums round otherwise"
        return [(f"{text}  ({fix})", "yellow")]
    return []


def _stopped(event: Event) -> list[Line]:
    code = whole(event, "exit_code")
    text = f"stopped: {event.get('reason', '')}"
    return [(f"{text} (exit code {code})" if code else text, "bold red")]


def _finished(event: Event) -> list[Line]:
    parts = (
        joined("finished", _time_taken(event)),
        worded(number(event, "loss"), "mean loss {}", loss),
        _validation_loss(number(event, "eval_loss"), number(event, "last_eval_loss")),
        joined(worded(number(event, "tokens_per_second"), "{:,.0f} tok/s"), _without_warmup(event)),
    )
    lines = [(GAP.join(filter(None, parts)), "bold green")]
    if event.get("final"):
        lines.append((f"final: {event['final']}", "bold"))
    return lines


def _time_taken(event: Event) -> str:
    """How long somebody waited, and how much of it was training; a run that was resumed has
    trained longer than that."""
    training, waited = number(event, "seconds"), number(event, "wall_seconds")
    if waited is None or training is None:
        return worded(training, "in {}", time_in_words)
    words = f"in {time_in_words(waited)}"
    if training > waited:
        return f"{words} ({time_in_words(training)} of training with what came before)"
    if time_in_words(training) == time_in_words(waited):
        return words
    return f"{words} ({time_in_words(training)} of it training)"


def _validation_loss(best: float | None, last: float | None) -> str:
    """The best, and the last where that is another: it rose again."""
    if best is None or last is None or last == best:
        known = worded(best, "best validation loss {}", loss)
        return known or worded(last, "last validation loss {}", loss)
    return f"best validation loss {loss(best)}, last {loss(last)}"


_WRITERS: Mapping[str, Callable[[Event], list[Line]]] = {
    "started": _started,
    "kernels": _kernels,
    "compiled": _compiled,
    "epoch": _epoch,
    "eval": _eval,
    "data": _data,
    "saved": _saved,
    "fell_back": _fell_back,
    "not_finite": _not_finite,
    "spike": _spike,
    "rolled_back": _rolled_back,
    "skipped": _skipped,
    "warning": _warning,
    "columns": _columns,
    "log_failed": _log_failed,
    "threads": _threads,
    "stopped": _stopped,
    "finished": _finished,
}
