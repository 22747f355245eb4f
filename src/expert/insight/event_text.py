"""Events of a run as text: the parts of a step line, and the lines of every other event.

Missing fields are left out and unknown events have no lines: the file may be older or newer than
this program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from expert.core.text import count, duration, gib, loss, value_in_words

Event = Mapping[str, Any]
Line = tuple[str, str]
"""A line of text and its style in a terminal."""
GAP = "  "
NOTICEABLE = 0.02
"""A rate may differ from tokens / seconds by this share without a note."""


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


def worded(value: float | None, form: str, write: Callable[[float], Any] = lambda v: v) -> str:
    """The formatted value; empty if None."""
    return "" if value is None else form.format(write(value))


def field(event: Event, key: str, form: str, write: Callable[[float], Any] = lambda v: v) -> str:
    """A formatted number of the event; empty if missing."""
    return worded(number(event, key), form, write)


def _finite(write: Callable[[float], str]) -> Callable[[float], str]:
    return lambda value: write(value) if math.isfinite(value) else "?"


time_in_words = _finite(duration)
bytes_in_words = _finite(gib)
count_in_words = _finite(lambda value: count(int(value)))


def three_digits(value: float) -> str:
    """`0.0123`, `2.31`, `12.3`, `1,234`."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def _short_loss(value: float) -> str:
    """Two decimals, or three significant digits below 1: `12.34`, `1.71`, `0.0312`."""
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def _percent(share: float) -> float:
    return 100 * share


def _joined(*words: str, gap: str = " ") -> str:
    return gap.join(filter(None, words))


def _plural(amount: float, noun: str) -> str:
    return f"{amount:g} {noun}" if amount == 1 else f"{amount:g} {noun}s"


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


# --- steps ---------------------------------------------------------------------------------------


def step_parts(event: Event, *, total: int | None, epochs: float | None) -> dict[str, str]:
    """The values of a step event in display order; unknown ones are left out."""
    step, epoch = whole(event, "step"), number(event, "epoch")
    parts = {
        "step": f"{step}/{total}" if total is not None else f"{step}",
        "loss": field(event, "loss", "loss {}", loss),
        "rate": field(event, "rate", "lr {:.1e}"),
        "speed": field(event, "tokens_per_second", "{:,.0f} tok/s"),
        "steps": field(event, "steps_per_second", "{} it/s", three_digits),
        "gpu": field(event, "gpu_utilization", "GPU {:.0f} %"),
        "memory": _memory(event),
        "data_wait": field(event, "data_wait", "data wait {:.1f} %", _percent),
        "eta": field(event, "eta_seconds", "ETA {}", time_in_words),
    }
    if epoch is not None and epochs is not None and math.isfinite(epoch):
        parts["epoch"] = f"epoch {_current_epoch(epoch, epochs)}/{epochs:g}"
    return {name: text for name, text in parts.items() if text}


def _memory(event: Event) -> str:
    """The run's peak GPU memory, else what all processes use; without a GPU its peak RAM."""
    for key, form in (
        ("peak_reserved_bytes", "peak {}"),
        ("gpu_memory_bytes", "{}"),
        ("cpu_peak_memory_bytes", "peak {} RAM"),
    ):
        known = number(event, key)
        if known is not None and math.isfinite(known):
            return form.format(gib(known))
    return ""


def _current_epoch(epoch: float, epochs: float) -> int:
    """The current epoch, counted from 1: a whole number means that epoch has just ended."""
    last = max(1, math.ceil(epochs)) if math.isfinite(epochs) else int(epoch) + 1
    return min(last, int(epoch) if epoch == int(epoch) and epoch > 0 else int(epoch) + 1)


# --- all other events ----------------------------------------------------------------------------


def lines_of(event: Event) -> list[Line]:
    """The lines an event is printed as; none for events that are not shown."""
    lines = lines_without_step(event)
    gap = _AFTER_STEP.get(str(event.get("event")))
    if gap is None or event.get("step") is None or not lines:
        return lines
    (first, style), *rest = lines
    return [(f"step {event['step']}{gap}{first}", style), *rest]


def lines_without_step(event: Event) -> list[Line]:
    """The lines of an event without its step, for callers that show the step elsewhere."""
    writer = _WRITERS.get(str(event.get("event")))
    return writer(event) if writer is not None else []


_AFTER_STEP = {"eval": GAP, "not_finite": ": ", "spike": ": ", "high_loss": ": ", "skipped": " "}
"""Events whose line starts with the step, and the separator after it."""


def _started(event: Event) -> list[Line]:
    steps = whole(event, "total_steps")
    facts = _joined(
        worded(steps, "1 step" if steps == 1 else "{:,} steps"),
        field(event, "epochs", "{}", lambda epochs: _epochs_in_words(epochs, event)),
        field(event, "tokens_per_epoch", "{} tokens per epoch", count_in_words),
        field(event, "trainable_parameters", "{} trainable parameters", count_in_words),
        gap=", ",
    )
    device = f" on {event['device']}" if event.get("device") else ""
    device += field(event, "ranks", f", {{:.0f}} ranks, {event.get('engine', '')}")
    lines = [(f"{event.get('expert', 'expert')}: {event.get('model', 'model')}{device}", "bold")]
    lines += [(facts, "")] if facts else []
    return lines + ([(f"run folder: {event['run']}", "dim")] if event.get("run") else [])


def _epochs_in_words(epochs: float, event: Event) -> str:
    """The planned epochs; if max_steps ends the run earlier, how many of them it reaches."""
    known = number(event, "epochs_to_come")
    if known is None or not math.isfinite(known):
        words = _plural(epochs, "epoch")
        return f"at most {words}" if event.get("ends_by") == "max_steps" else words
    digits = f"{known:.2g}" if known < 10 else f"{known:.0f}"
    return f"{digits} of {_plural(epochs, 'epoch')} (max_steps)"


def _kernels(event: Event) -> list[Line]:
    return [(str(line), "dim") for line in event.get("lines") or ()]


def _without_warmup(event: Event) -> str:
    """A note where the rates exclude warm-up steps."""
    tokens, seconds = number(event, "tokens"), number(event, "seconds")
    rate = number(event, "tokens_per_second")
    if not tokens or not seconds or not rate or abs(tokens / seconds / rate - 1) < NOTICEABLE:
        return ""
    return "after warm-up"


def _fell_back(event: Event) -> list[Line]:
    why = ": ".join(str(event[key]) for key in ("failure", "reason") if event.get(key))
    lines = [(f"fell back: {why}", "yellow")]
    changes = (each for each in event.get("changes") or () if isinstance(each, Mapping))
    for change in changes:
        path = str(change.get("path"))
        because = f"  ({change['because']})" if change.get("because") else ""
        lines.append((f"  {path} = {planned_value(path, change.get('value'))}{because}", "yellow"))
    return lines


def _not_finite(event: Event) -> list[Line]:
    where = f" in sequences {_listed(event['bins'])}" if event.get("bins") else ""
    where += f", rows {_listed(event['rows'])}" if event.get("rows") else ""
    policy = f": {event['policy']}" if event.get("policy") else ""
    return [(f"loss is not finite{where}{policy}", "yellow")]


def _spike(event: Event) -> list[Line]:
    known = _joined(
        field(event, "median", "median {}", _short_loss), field(event, "z", "z {:.1f}"), gap=", "
    )
    what = "loss spike" if event.get("event") == "spike" else "high loss"
    text = f"{what}: {field(event, 'loss', '{}', _short_loss)}"
    later = field(event, "stays", "; counts as a spike after {:.0f} steps in a row")
    return [((f"{text} ({known})" if known else text) + later, "yellow")]


def _rolled_back(event: Event) -> list[Line]:
    skipped = event.get("skipped")
    start = f" from step {event['from_step']} to" if event.get("from_step") else " to step"
    text = f"rolled back{start} {event.get('to_step')}"
    text += f", skipping {_listed(skipped)}" if skipped else ""
    rate = field(event, "rate_factor", "; the learning rate is {:g} of the planned one")
    return [(text + rate, "yellow")]


def _threads(event: Event) -> list[Line]:
    """Shown only if the thread count is not torch's default."""
    used, default = whole(event, "threads"), whole(event, "own")
    if used is None:
        return []
    text = f"computing with {_plural(used, 'thread')}: {event.get('because')}"
    if event.get("lowered") is True:
        return [(f"{text}  (OMP_NUM_THREADS={whole(event, 'cores')} uses all cores)", "yellow")]
    if event.get("kept") is True and default is not None and default != used:
        fix = f"OMP_NUM_THREADS={default} uses torch's default, whose sums round differently"
        return [(f"{text}  ({fix})", "yellow")]
    return []


def _resumed(event: Event) -> list[Line]:
    lines = [(f"resumed at step {event.get('step')} from {event.get('path')}", "bold")]
    return lines + [(f"  changed: {change}", "yellow") for change in event.get("changed") or ()]


def _final(event: Event) -> str:
    return f"final: {event['final']}" if event.get("final") else ""


def _time_taken(event: Event) -> str:
    """Time since the command started, and how much of it was training; the training of a resumed
    run is that of all its sessions."""
    training, waited = number(event, "seconds"), number(event, "wall_seconds")
    if waited is None or training is None:
        return worded(training, "in {}", time_in_words)
    words, trained = f"in {time_in_words(waited)}", time_in_words(training)
    if training > waited or number(event, "earlier_seconds"):
        return f"{words} ({trained} of training including earlier sessions)"
    return words if trained == time_in_words(waited) else f"{words} ({trained} of it training)"


def _validation_loss(event: Event) -> str:
    """The best validation loss, and the last if it differs."""
    best, last = number(event, "eval_loss"), number(event, "last_eval_loss")
    if best is None or last is None or last == best:
        known = worded(best, "best validation loss {}", loss)
        return known or worded(last, "last validation loss {}", loss)
    return f"best validation loss {loss(best)}, last {loss(last)}"


Part = Callable[[Event], str]


def _text(form: str) -> Part:
    """The form filled with the event's fields; missing ones are empty."""
    return lambda event: form.format_map(defaultdict(str, event))


def _number(key: str, form: str, write: Callable[[float], Any] = lambda v: v) -> Part:
    return lambda event: field(event, key, form, write)


def _together(*parts: Part, gap: str = " ") -> Part:
    return lambda event: _joined(*(part(event) for part in parts), gap=gap)


def _line(style: str, *parts: Part, gap: str = GAP) -> Callable[[Event], list[Line]]:
    """One line of the known parts; no line if all are unknown."""
    return lambda event: [(text, style)] if (text := _together(*parts, gap=gap)(event)) else []


def _lines(*lines: Callable[[Event], list[Line]]) -> Callable[[Event], list[Line]]:
    return lambda event: [line for each in lines for line in each(event)]


def _eval_loss(event: Event) -> str:
    """The split is not part of a format string: braces in its name would be looked up as fields."""
    text = field(event, "loss", "loss {}", loss)
    return f"{event.get('split') or 'validation'} {text}" if text else ""


_SECONDS = _number("seconds", "{}", time_in_words)
_RATE = _number("tokens_per_second", "{:,.0f} tok/s")
_WRITERS: Mapping[str, Callable[[Event], list[Line]]] = {
    "started": _started,
    "kernels": _kernels,
    "compiled": _line(
        "dim", _text("compiled"), _number("seconds", "in {}", time_in_words), gap=" "
    ),
    "epoch": _line(
        "bold",
        _together(_text("epoch {epoch}"), _number("epochs", "/{:g}"), gap=""),
        _together(
            _number("loss", "loss {}", _short_loss),
            _number("eval_loss", "(validation {})", _short_loss),
        ),
        _SECONDS,
        _RATE,
        _together(_number("samples_per_second", "{:,.1f} samples/s"), _without_warmup),
    ),
    "eval": _line(
        "cyan",
        _eval_loss,
        _number("perplexity", "perplexity {:.4g}"),
        _number("token_accuracy", "token accuracy {:.1f} %", _percent),
        _SECONDS,
        lambda event: "best so far" if event.get("best") is True else "",
    ),
    "data": _line(
        "dim",
        lambda event: str(event.get("split", "data")),
        lambda event: "cache hit" if event.get("hit") else "rows tokenised",
        _text("{because}"),
        gap=": ",
    ),
    "saved": _line("dim", _text("saved {path}"), _number("bytes", "{}", bytes_in_words), _SECONDS),
    "fell_back": _fell_back,
    "not_finite": _not_finite,
    "spike": _spike,
    "high_loss": _spike,
    "rolled_back": _rolled_back,
    "skipped": _line("yellow", _text("skipped"), _text("{reason}"), _text("{text}"), gap=": "),
    "threads": _threads,
    "resumed": _resumed,
    "columns": _line("", _text("columns: {text}")),
    "warning": _line("yellow", _text("warning: {text}")),
    "log_failed": _line("yellow", _text("warning: {what}: {because}")),
    "rejected": _line("yellow", _text("rejected {path}: {reason}")),
    "took_best": _line("", _text("loaded the best checkpoint: step {step}")),
    "stopped": _line(
        "bold red", _text("stopped: {reason}"), _number("exit_code", "(exit code {:.0f})"), gap=" "
    ),
    "failed": _line("bold red", _text("failed: {error}")),
    "finished": _lines(
        _line(
            "bold green",
            _together(_text("finished"), _time_taken),
            _number("loss", "mean loss {}", loss),
            _validation_loss,
            _together(_RATE, _without_warmup),
        ),
        _line("bold", _final),
    ),
}
