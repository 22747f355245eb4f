from __future__ import annotations

from expert.training.state import TrainState


def test_a_state_of_an_older_version_has_the_usual_rest():
    assert TrainState.from_json({"done": 7}) == TrainState(done=7)
