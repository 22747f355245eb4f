"""Which cards --gpus means, and what a rank is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert.jobs.launch.cards import Cards, choose_cards
from expert.jobs.launch.ranks import COMMAND_VARIABLE, given_command, with_resume
from expert.parallel.launch import WorldError
from expert.run.stored.resume_command import without_options
from tests.parallel.test_launch import TORCHRUN
from tests.planning.fake_nvml import UUIDS, FakeNvml, describe


def chosen(asked: str, *, cards: int = 3, visible: str | None = None, device: str = "auto", **env):
    return choose_cards(asked, describe(FakeNvml(cards), visible), device=device, env=env)


@pytest.mark.parametrize(
    ("asked", "visible", "places"),
    [
        ("all", None, (0, 1, 2)),
        ("2", None, (0, 1)),
        ("0,2", None, (0, 2)),
        ("2,0", None, (2, 0)),
        ("1,", None, (1,)),
        (" ALL ", "2,0", (2, 0)),
        ("1,", "2,0", (0,)),
    ],
)
def test_cards_are_counted_among_the_visible_ones_and_named_by_uuid(asked, visible, places):
    found = chosen(asked, visible=visible)
    assert found.visible == tuple(UUIDS[place] for place in places)
    assert found.ranks == len(places)
    assert found.environment({})["CUDA_VISIBLE_DEVICES"] == ",".join(found.visible)
    own = [each["CUDA_VISIBLE_DEVICES"] for each in found.environment_per_card({})]
    assert own == list(found.visible)


@pytest.mark.parametrize(
    ("asked", "more", "problems"),
    [
        ("4", {}, 1),
        ("0", {}, 1),
        ("3,1,1,7", {}, 3),
        ("two", {}, 1),
        ("", {}, 1),
        ("2", {"cards": 0}, 1),
        ("all", {"device": "cpu"}, 1),
        ("0,1", {"device": "cpu"}, 1),
        ("9", TORCHRUN, 2),
    ],
)
def test_cards_that_are_not_there_are_refused_with_all_reasons(asked, more, problems):
    with pytest.raises(WorldError) as refused:
        chosen(asked, **more)
    assert len(str(refused.value).splitlines()) == problems + 1, refused.value


def test_on_a_cpu_cores_are_divided_unless_a_number_of_threads_is_set():
    found = chosen("2", cards=0, device="cpu")
    assert (found.visible, found.ranks) == ((), 2)
    shared = Cards(visible=(), ranks=2, threads=3)
    assert shared.environment({}) == {"OMP_NUM_THREADS": "3"}
    assert shared.environment({"MKL_NUM_THREADS": "1"}) == {}
    assert shared.environment_per_card({}) == [{"OMP_NUM_THREADS": "3"}] * 2


def test_a_rank_runs_the_command_that_was_given_and_resumes_what_was_saved(tmp_path: Path):
    words = ["train", "m.json", "--gpus", "2", "--max-restarts=3", "--epochs", "2", "--resume"]
    words = without_options(words, ("--gpus", "--max-restarts"))
    assert words == ["train", "m.json", "--epochs", "2", "--resume"]
    assert with_resume(words, None) == words
    assert with_resume(words, tmp_path) == words  # it never began
    (tmp_path / "plan.json").write_text("{}")
    resumed = ["train", "m.json", "--epochs", "2", "--resume", str(tmp_path)]
    assert with_resume(words, tmp_path) == resumed
    assert with_resume(["train", "m.json", "--epochs", "2", "--resume", "x"], tmp_path) == resumed
    assert given_command({COMMAND_VARIABLE: '["expert", "train"]'}) == ["expert", "train"]
