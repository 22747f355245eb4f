"""Tables, bars and numbers as people see them."""

from __future__ import annotations

from expert.cli.show.display import Sheet, bar_of, plain_lines, show_sheet
from expert.core.text import count, counted, duration, gib, value_in_words
from tests.cli.screens import recorded
from tests.each import each

SHEET = Sheet(("key", "value"), [[("a", "1")], [("longer", "[bold]2")]], "title")


def shown(terminal: bool) -> str:
    console, file = recorded(terminal=terminal, width=60)
    show_sheet(SHEET, console)
    return file.getvalue()


def test_a_table_is_ruled_in_a_terminal_and_plain_aligned_lines_elsewhere():
    assert shown(terminal=False) == "title\nkey     value\na       1\nlonger  [bold]2\n"
    text = shown(terminal=True)
    assert "───" in text
    assert "[bold]2" in text  # brackets are not markup
    assert plain_lines(Sheet(("key",), [[("x" * 500,)]]))[1] == "x" * 500  # no word is cut
    fits = plain_lines(Sheet(("k", "v"), [[("a", "x y " * 20)]]))
    assert fits[1] == "a  " + "x y " * 19 + "x y"
    words = "word " * 60
    lines = plain_lines(Sheet(("", "name", "found", "fix", "why"), [[("!", "a", *[words] * 3)]]))
    assert lines[0] == "!  a"  # a name alone does not head a table


def test_a_wide_table_is_wrapped_within_its_columns():
    words = "word " * 60
    lines = plain_lines(Sheet(("key", "means", "by"), [[("a.long.key", words, "me")]]))
    assert max(map(len, lines)) <= 100
    assert lines[1].startswith("a.long.key  word word")
    assert lines[1].endswith("  me")
    assert lines[2].startswith("            word word")  # it continues under its column
    assert " ".join(lines).count("word") == 60


@each(
    ("share", "bar"),
    [(0, "····"), (1, "████"), (0.5, "██··"), (2, "████"), (0.25 / 8, "▏···"), (-1, "····")],
)
def test_a_bar_is_filled_to_an_eighth_of_a_cell(share, bar):
    assert bar_of(share, width=4) == bar


@each(
    ("words", "expected"),
    [
        (duration(0.44), "0.4 s"),
        (counted(1, "step"), "1 step"),
        (counted(1200, "step"), "1,200 steps"),
        (duration(12_000), "3 h 20 min"),
        (count(1998), "1,998"),
        (count(596_049_920), "596.0 M"),
        (count(8_030_261_248), "8.03 B"),
        (gib(3 * 2**29), "1.5 GiB"),
        (gib(7 * 2**20), "7 MiB"),
        (value_in_words("watch.keep_checkpoints", None), "all"),
        (value_in_words("kernels.tf32", True), "yes"),
        (value_in_words("adapter.target_modules", ["a", "b"]), "a, b"),
        (value_in_words("adapter.soft_prompts", [{"name": "s", "tokens": 4}]), "s (4 tokens)"),
        (value_in_words("optim.scheduler_options", {"num_cycles": 2}), "num_cycles 2"),
    ],
)
def test_numbers_are_written_as_people_write_them(words, expected):
    assert words == expected
