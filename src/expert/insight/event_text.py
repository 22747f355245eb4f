"""Events of a run as text: the parts of a step line, and the lines of every other event.

Missing fields are left out and unknown events have no lines: the file may be incomplete, or newer
than this program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from expert.core.text import count, counted, duration, epochs_in_words, gib, loss, value_in_words

Event = Mapping[str, Any]
Line = tuple[str, str]
"""A line of text and its style in a terminal."""
GAP = "  "


def number(event: Event, key: str) -> float | None:
    """The field as a number; None if missing. Event files store "nan" as text."""
    value = event.get(key)
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def whole(event: Event, key: str) -> int | None:
    """The field as an integer; None if it is not one."""
    value = event.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def field(event: Event, key: str, form: str, write: Callable[[float], Any] = lambda v: v) -> str:
    """A formatted number of the event; empty if missing."""
    value = number(event, key)
    return "" if value is None else form.format(write(value))


def time_in_words(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else "?"


def three_digits(value: float) -> str:
    """`0.0123`, `2.31`, `12.3`, `1,234`."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def _in_units(value: float) -> str:
    return count(int(value)) if math.isfinite(value) else "?"


def _short_loss(value: float) -> str:
    """Two decimals, or three significant digits below 1: `12.34`, `1.71`, `0.0312`."""
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def _joined(*words: str, gap: str = GAP) -> str:
    return gap.join(filter(None, words))


def planned_value(path: str, value: object) -> str:
    """A value of a plan in words; unchanged if its type does not match its path."""
    try:
        return value_in_words(path, value)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        return str(value)


def _listed(value: Any) -> str:
    """The items, or their count and the first three if there are more than eight."""
    if not isinstance(value, list | tuple):
        return str(value)
    if len(value) > 8:
        return f"{len(value)} ({', '.join(map(str, value[:3]))}, …)"
    return ", ".join(map(str, value))


def _preferences(event: Event) -> str:
    """For training on preferences: how far the answers are apart, and how many the right way; for
    training on rewards, their mean."""
    margin = field(event, "rewards/margins", "margin {:.3g}")
    right = field(event, "rewards/accuracies", "{:.0f} % preferred", lambda share: 100 * share)
    reward = field(event, "rewards/mean", "reward {:.3f}")
    return _joined(margin, right, reward, gap=", ")


# --- steps ---------------------------------------------------------------------------------------


def step_parts(event: Event, *, total: int | None, epochs: float | None) -> dict[str, str]:
    """The values of a step event in display order; unknown ones are left out."""
    step, epoch = whole(event, "step"), number(event, "epoch")
    # The run's peak GPU memory, else what all processes use; without a GPU its peak RAM.
    memory = (("peak_reserved_bytes", "peak {}"), ("gpu_memory_bytes", "{}"),
              ("cpu_peak_memory_bytes", "peak {} RAM"))  # fmt: skip
    sizes = [(number(event, key), form) for key, form in memory]
    parts = {
        "step": f"{step}/{total}" if total is not None else f"{step}",
        "loss": field(event, "loss", "loss {}", loss),
        "margin": _preferences(event),
        "rate": field(event, "rate", "lr {:.1e}"),
        "speed": field(event, "tokens_per_second", "{:,.0f} tok/s"),
        "steps": field(event, "steps_per_second", "{} it/s", three_digits),
        "gpu": field(event, "gpu_utilization", "GPU {:.0f} %"),
        "memory": next((form.format(gib(size)) for size, form in sizes
                        if size is not None and math.isfinite(size)), ""),
        "data_wait": field(event, "data_wait", "data wait {:.1f} %", lambda share: 100 * share),
        "eta": field(event, "eta_seconds", "ETA {}", time_in_words),
    }  # fmt: skip
    if step == total:  # what is left are evaluations, which show their own rows
        parts.pop("eta", None)
    if epoch is not None and epochs is not None and math.isfinite(epoch):
        # Counted from 1: a whole number means that epoch has just ended.
        last = max(1, math.ceil(epochs)) if math.isfinite(epochs) else int(epoch) + 1
        current = int(epoch) if epoch == int(epoch) and epoch > 0 else int(epoch) + 1
        parts["epoch"] = f"epoch {min(last, current)}/{epochs:g}"
    return {name: text for name, text in parts.items() if text}


# --- all other events ----------------------------------------------------------------------------


def lines_of(event: Event) -> list[Line]:
    """The lines an event is printed as; none for events that are not shown."""
    lines = lines_without_step(event)
    gap = {"eval": GAP, "not_finite": ": ", "spike": ": ", "high_loss": ": ", "skipped": " "}.get(
        str(event.get("event"))
    )
    if gap is None or event.get("step") is None or not lines:
        return lines
    (first, style), *rest = lines
    return [(f"step {event['step']}{gap}{first}", style), *rest]


def lines_without_step(event: Event) -> list[Line]:
    """The lines of an event without its step, for callers that show the step elsewhere."""

    def word(key: str) -> str:
        value = event.get(key)
        return "" if value is None else str(value)

    seconds = field(event, "seconds", "{}", time_in_words)
    match event.get("event"):
        case "started":
            return _started(event)
        case "kernels":
            # What is switched on in one line, and each that is off with its reason.
            told = [str(line) for line in event.get("lines") or ()]
            on = [line.removeprefix("✓ ") for line in told if line.startswith("✓ ")]
            off = [line for line in told if not line.startswith("✓ ")]
            return [(line, "dim") for line in ([f"✓ {', '.join(on)}"] if on else []) + off]
        case "compiled":
            return [(_joined("compiled", seconds and f"in {seconds}", gap=" "), "dim")]
        case "epoch":
            return [(_epoch(event, word("epoch"), seconds), "bold")]
        case "eval":
            value = field(event, "loss", "loss {}", loss)
            right = field(event, "token_accuracy", "token accuracy {:.1f} %", lambda s: 100 * s)
            text = _joined(
                value and f"{event.get('split') or 'validation'} {value}",
                field(event, "perplexity", "perplexity {:.4g}"),
                right,
                _preferences(event),
                seconds,
                "best so far" if event.get("best") is True else "",
            )
            return [(text, "cyan")] if text else []
        case "data":
            made = "cache hit" if event.get("hit") else "rows tokenised"
            split = str(event.get("split", "data"))
            return [(_joined(split, made, word("because"), gap=": "), "dim")]
        case "saved":
            size = field(event, "bytes", "{}", lambda n: gib(n) if math.isfinite(n) else "?")
            return [(_joined(f"saved {word('path')}", size, seconds), "dim")]
        case "fell_back":
            return _fell_back(event)
        case "not_finite":
            where = f" in sequences {_listed(event['bins'])}" if event.get("bins") else ""
            where += f", rows {_listed(event['rows'])}" if event.get("rows") else ""
            policy = f": {event['policy']}" if event.get("policy") else ""
            return [(f"loss is not finite{where}{policy}", "yellow")]
        case "spike" | "high_loss" as kind:
            median = field(event, "median", "median {}", _short_loss)
            known = _joined(median, field(event, "z", "z {:.1f}"), gap=", ")
            text = "loss spike: " if kind == "spike" else "high loss: "
            text += field(event, "loss", "{}", _short_loss) + (f" ({known})" if known else "")
            later = field(event, "stays", "; counts as a spike after {:.0f} steps in a row")
            return [(text + later, "yellow")]
        case "rolled_back":
            start = f" from step {event['from_step']} to" if event.get("from_step") else " to step"
            text = f"rolled back{start} {event.get('to_step')}"
            text += f", skipping {_listed(event['skipped'])}" if event.get("skipped") else ""
            rate = field(event, "rate_factor", "; the learning rate is {:g} of the planned one")
            return [(text + rate, "yellow")]
        case "skipped":
            return [(_joined("skipped", word("reason"), word("text"), gap=": "), "yellow")]
        case "threads":
            used = whole(event, "threads")
            if used is None or used == whole(event, "own"):  # torch's default
                return []
            return [(f"computing with {counted(used, 'thread')}: {word('because')}", "yellow")]
        case "resumed":
            lines = [(f"resumed at step {event.get('step')} from {event.get('path')}", "bold")]
            return lines + [(f"  changed: {one}", "yellow") for one in event.get("changed") or ()]
        case "columns":
            return [(f"columns: {word('text')}", "")]
        case "warning":
            return [(f"warning: {word('text')}", "yellow")]
        case "log_failed":
            return [(f"warning: {word('what')}: {word('because')}", "yellow")]
        case "rejected":
            return [(f"rejected {word('path')}: {word('reason')}", "yellow")]
        case "took_best":
            return [(f"loaded the best checkpoint: step {word('step')}", "")]
        case "stopped":
            code = field(event, "exit_code", "(exit code {:.0f})")
            return [
                (_joined(_joined("stopped", word("reason"), gap=": "), code, gap=" "), "bold red")
            ]
        case "failed":
            return [(f"failed: {word('error')}", "bold red")]
        case "finished":
            return _finished(event)
        case _:
            return []


def _started(event: Event) -> list[Line]:
    steps = whole(event, "total_steps")
    epochs, reached = number(event, "epochs"), number(event, "epochs_to_come")
    planned = ""
    if epochs is not None:  # and how many of them, if max_steps ends the run earlier
        known = reached is not None and math.isfinite(reached)
        planned = epochs_in_words(epochs, reached) if known else epochs_in_words(epochs)
        if not known and event.get("ends_by") == "max_steps":
            planned = f"at most {planned}"
    facts = _joined(
        "" if steps is None else counted(steps, "step"),
        planned,
        field(event, "tokens_per_epoch", "{} tokens per epoch", _in_units),
        field(event, "trainable_parameters", "{} trainable parameters", _in_units),
        gap=", ",
    )
    device = f" on {event['device']}" if event.get("device") else ""
    ranks = field(event, "ranks", ", {:.0f} ranks, ")
    device += f"{ranks}{event.get('engine', '')}" if ranks else ""
    lines = [(f"{event.get('expert', 'expert')}: {event.get('model', 'model')}{device}", "bold")]
    lines += [(facts, "")] if facts else []
    return lines + ([(f"run folder: {event['run']}", "dim")] if event.get("run") else [])


def _epoch(event: Event, epoch: str, seconds: str) -> str:
    trained = field(event, "loss", "loss {}", _short_loss)
    return _joined(
        f"epoch {epoch}" + field(event, "epochs", "/{:g}"),
        _joined(trained, field(event, "eval_loss", "(validation {})", _short_loss), gap=" "),
        seconds,
        field(event, "tokens_per_second", "{:,.0f} tok/s"),
        field(event, "samples_per_second", "{:,.1f} samples/s"),
    )


def _fell_back(event: Event) -> list[Line]:
    why = ": ".join(str(event[key]) for key in ("failure", "reason") if event.get(key))
    lines = [(f"fell back: {why}", "yellow")]
    for change in (each for each in event.get("changes") or () if isinstance(each, Mapping)):
        path = str(change.get("path"))
        because = f"  ({change['because']})" if change.get("because") else ""
        lines.append((f"  {path} = {planned_value(path, change.get('value'))}{because}", "yellow"))
    return lines


def _finished(event: Event) -> list[Line]:
    """The time since the command started, and how much of it was training (of a resumed run that of
    all its sessions); the losses; where the weights are."""
    training, waited = number(event, "seconds"), number(event, "wall_seconds")
    trained = "" if training is None else time_in_words(training)
    taken = trained and f"in {trained}"
    if waited is not None and training is not None:
        taken = f"in {time_in_words(waited)}"
        if training > waited or number(event, "earlier_seconds"):
            taken += f" ({trained} of training including earlier sessions)"
        elif trained != time_in_words(waited):
            taken += f" ({trained} of it training)"
    best = field(event, "eval_loss", "best validation loss {}", loss)
    last = field(event, "last_eval_loss", "last {}", loss)
    if event.get("eval_loss") != event.get("last_eval_loss") and last:
        best = f"{best}, {last}" if best else last.replace("last", "last validation loss")
    text = _joined(
        _joined("finished", taken, gap=" "),
        field(event, "smoothed_loss", "loss {}", loss),
        best,
        field(event, "median_tokens_per_second", "{:,.0f} tok/s"),
    )
    final = [(f"final: {event['final']}", "bold")] if event.get("final") else []
    return [(text, "bold green"), *final]
