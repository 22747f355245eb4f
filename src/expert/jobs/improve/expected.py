"""What a round takes, by what the first run and its validation took."""

from __future__ import annotations

from expert.core.events import read_events
from expert.core.text import counted, duration, gib
from expert.jobs.validate.held_out import Run
from expert.jobs.validate.validation import Validation
from expert.manifest.schema.kinds import ON_POLICY


def expected_round(
    start: Run, found: Validation, prompts: int, answers: int, method: str
) -> list[str]:
    """Time and memory of a round, as far as they are known.

    Answers count as the test rows did, whose time includes loading: many at once take less.
    Training counts as the rows of the first run did.
    """
    score, plan, count = found.result.score, start.plan, prompts * answers
    each = found.seconds / max(1, score.cases)
    asked = f"a round: {counted(count, 'answer')} to {counted(prompts, 'prompt')}"
    times = [f"{asked} in {duration(count * each)} at the speed of the test rows, or less"]
    events = read_events(start.folder.path / "events.jsonl")
    ended = next((each for each in reversed(list(events)) if each.get("event") == "finished"), {})
    seconds, rows = ended.get("seconds"), plan.length.rows
    if seconds and rows and method != ON_POLICY:  # which trains on each answer as it is judged
        times.append(f"training in about {duration(seconds * min(1.0, prompts / rows))}")
    times.append(f"test rows in {duration(found.seconds)}")
    lines, planned = [", ".join(times)], plan.memory.peak_bytes
    if planned is not None:
        text = f"memory: {gib(planned)} as planned for the first run; answers take theirs before, "
        lines.append(f"{text}and give it back")
    return lines
