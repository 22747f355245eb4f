"""Tables, bars and numbers as people see them."""

from __future__ import annotations

import re

from expert.cli.show.display import Sheet, show, show_bars, show_sheet
from expert.core.text import count, counted, duration, gib, value_in_words
from tests.cli.screens import recorded
from tests.each import each

SHEET = Sheet(("key", "value"), [[("a", "1")], [("longer", "[bold]2")]], "title")


def shown(terminal: bool, sheet: Sheet = SHEET) -> str:
    console, file = recorded(terminal=terminal, width=60)
    show_sheet(sheet, console)
    return file.getvalue()


def plain_lines(sheet: Sheet) -> list[str]:
    return shown(False, sheet).splitlines()


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


def test_at_80_columns_no_word_is_broken():
    console, file = recorded(terminal=True, width=80)
    names = ["training.config.gradient_accumulation_steps", "optim.scheduler_options"]
    why = "measured on this card: "
    rows = [(name, "bestfit, apart", why + name, "manifest") for name in names]
    show_sheet(Sheet(("key", "value", "because", "source"), [rows]), console)
    narrow = [(name, "x", "short") for name in names]
    show_sheet(Sheet(("key", "value", "because"), [narrow]), console)
    show(console, "warning: " + "the answer starts after max_seq_length " * 5, "yellow")
    show_bars([("gradient accumulation", 1.0, "12.3 ms  44 % overlapped")], 1.0, console)
    lines = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", file.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(lines).split()
    assert all(text.count(name) == times for name, times in zip(names, (3, 3), strict=True))
    assert text.count("max_seq_length") == 5
    command = "next: expert validate /a/folder --baseline base " + "--more" * 12
    show(console, command)
    assert command in file.getvalue()  # to be copied whole


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
