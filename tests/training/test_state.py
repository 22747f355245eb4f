from __future__ import annotations

import json
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from expert.training.spikes import SkippedSteps
from expert.training.state import TrainState

windows = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 20)), max_size=5)
counts = st.integers(0, 10**12)


@given(
    numbers=st.lists(counts, min_size=6, max_size=6),
    place=st.none() | st.tuples(counts, counts, counts),
    spans=windows,
)
def test_a_state_comes_back_from_json_as_it_was(numbers, place, spans):
    skipped = SkippedSteps()
    for first, more in spans:
        skipped = skipped.with_window(first, first + more)
    done, epoch, tokens, rollbacks, skips, evaluated = numbers
    state = TrainState(
        done=done,
        epoch=epoch,
        place=place,
        tokens=tokens,
        rollbacks=rollbacks,
        skips=skips,
        evaluated=evaluated,
        skipped=skipped,
        best={"best": 1.5, "best_step": 3},
        losses={"history": [[1, 0.5]]},
        schedule={"kind": "cosine"},
    )
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_every_field_is_written():
    assert set(TrainState().to_json()) == {field.name for field in fields(TrainState)}


def test_a_state_of_an_older_version_has_the_usual_rest():
    assert TrainState.from_json({"done": 7}) == TrainState(done=7)
