"""How many packed sequences make an update, as far as a plan can tell before rows are counted."""

from __future__ import annotations

from expert.planning.sequences import packing_of


def test_sequences_keep_their_length_where_whole_ones_hold_the_rows():
    assert packing_of(64, mean=100, longest=900, length=1024) == (6, 1024, None)
    assert packing_of(8, mean=2000, longest=2048, length=2048) == (8, 2048, None)


def test_sequences_are_shorter_where_one_holds_more_rows_than_an_update():
    made = packing_of(16, mean=22, longest=40, length=1024)
    assert made == (1, 360, None)  # 16 · 22 / 0.99 = 355.6, to a multiple of 8


def test_a_longest_row_that_is_not_known_changes_nothing():
    assert packing_of(16, mean=22, longest=0, length=1024) == (1, 360, None)


def test_rows_that_are_all_alike_leave_gaps():
    assert packing_of(9, mean=29, longest=29, length=256) == (2, 152, None)


def test_a_long_row_keeps_sequences_long_and_rows_few():
    assert packing_of(16, mean=22, longest=900, length=1024) == (1, 904, 16)


def test_an_update_of_one_row_is_one_row():
    assert packing_of(1, mean=20, longest=40, length=512) == (1, 40, 1)
