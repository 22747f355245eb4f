"""Repeats, leaks, leftovers and lengths, held against what a plain look would find."""

from __future__ import annotations

from expert.data.examples.text_warnings import MARKERS, TextWarnings, leftover_markers
from expert.data.inspect.audit import (
    LEAKS,
    NEARLY,
    SAME,
    SAME_PROMPT,
    SHOWN_PAIRS,
    ExampleTable,
    Pairs,
    SplitReport,
    duplicates,
    leaks,
    length_summary,
    near_key,
    table_of,
)
from expert.data.records import Example, Row, Segment, Turn
from tests.data.tokenizers import small_encoder
from tests.each import each


def talk(request: str, answer: str, system: str = "") -> Example:
    turns = (Turn("user", request), Turn("assistant", answer))
    return Example((Turn("system", system), *turns) if system else turns)


def collected(examples: list[Example], file: str = "a.jsonl") -> ExampleTable:
    rows = [Row({}, file, line) for line in range(1, len(examples) + 1)]
    texts = [
        [Segment(turn.text, turn.role == "assistant") for turn in example.turns]
        or [Segment(example.text, True)]
        for example in examples
    ]
    return table_of(rows, [near_key(each) for each in examples], small_encoder().encode(texts), {})


def counts(found: dict[str, Pairs]) -> list[int]:
    return [found[kind].count for kind in LEAKS]


def test_nearly_equal_examples_differ_in_system_text_case_and_spacing_only():
    plain, dressed = talk("Count  to\n3", "One"), talk("count to 3", "one ", system="Be kind.")
    assert near_key(plain) == near_key(dressed)
    assert near_key(plain) != near_key(talk("count to 4", "one"))
    assert near_key(talk("ab", "c")) != near_key(talk("a", "bc"))
    four = Example((*talk("a", "b").turns, *talk("c", "d").turns))
    assert near_key(four) != near_key(talk("a", "busercassistantd"))
    assert near_key(Example(text="a")) != near_key(Example(text="b"))
    assert near_key(Example(text="\ud800")) > 0  # a lone surrogate is no obstacle


@each("marker", MARKERS)
def test_every_marker_is_found_in_what_is_said(marker):
    assert leftover_markers(talk("a", f"b {marker} c {marker}")) == [marker]
    assert leftover_markers(Example(text=f"x{marker}")) == [marker]


def test_duplicates_are_counted_and_the_first_few_point_to_the_first_occurrence():
    a, b, c = talk("a", "1"), talk("b", "2"), talk("c", "3")
    found = duplicates(collected([a, b, a, c, b, *[a] * 20]))
    assert (found.count, len(found.shown)) == (22, SHOWN_PAIRS)
    repeats = [(3, 1), (5, 2), (6, 1), (7, 1), (8, 1)]
    assert found.shown == tuple((f"a.jsonl:{one}", f"a.jsonl:{two}") for one, two in repeats)


def test_every_leak_is_counted_once_under_its_gravest_kind_with_both_places():
    train = collected([talk("x", "y"), talk("q", "a"), talk("p", "b")], "train.jsonl")
    other = collected(
        [talk("p", "other"), talk("Q", "a", system="s"), talk("x", "y"), talk("new", "y")],
        "test.jsonl",
    )
    found = leaks(train, other)
    assert counts(found) == [1, 1, 1]
    assert found[SAME].shown == (("test.jsonl:3", "train.jsonl:1"),)
    assert found[NEARLY].shown == (("test.jsonl:2", "train.jsonl:2"),)
    assert found[SAME_PROMPT].shown == (("test.jsonl:1", "train.jsonl:3"),)


def test_lengths_are_summed_up_and_held_against_the_room():
    documents = collected([Example(text="a" * n) for n in (1, 2, 3, 40)])
    lengths = documents.length
    told = length_summary(documents, room=int(lengths[2]))
    assert told["examples"] == 4
    assert told["tokens"] == told["learnt_tokens"] == lengths.sum()
    assert (told["learnt_share"], told["longest"]) == (1.0, lengths[3])
    assert (told["over_long"], told["over_long_share"]) == (1, 0.25)
    assert length_summary(documents, room=None)["over_long_share"] is None


def test_a_split_warns_of_everything_a_person_should_look_at():
    split = SplitReport("test")
    split.texts.note(talk("a", "[INST] b"), (), "t:5")
    train = collected([talk("a", "1")], "train")
    documents = collected([talk("a", "1")] * 2, "t")
    split.duplicates = duplicates(documents)
    split.leaks = leaks(train, documents)
    split.lengths = length_summary(documents, room=0)
    assert split.warnings() == [
        "test: template remnant [INST] in 1 example: t:5",
        "test: 1 example also earlier in the split",
        "  t:2 repeats t:1",
        "test: 2 examples also in train (same prompt and answer)",
        "  t:1 repeats train:1",
        "  t:2 repeats train:1",
        "test: 2 examples longer than max_seq_length: 4 tokens (100.0%) are lost",
    ]


@each(
    ("text", "found"),
    [
        ("<image>What does {{ name }} hold? {{x.y}} {}", ["<image>", "{{ name }}", "{{x.y}}"]),
        ('a {{"a": 1}} b <images> <|image_pad|>', ["<|image_pad|>"]),
        ("Sum up.\n\nInput:\nNone", ["None"]),
        ("None", []),
        ("It ends.</s>\n", ["</s>"]),
        ("<s>No</s> yes", []),
    ],
)
def test_placeholders_that_nobody_filled_in_are_found(text, found):
    assert leftover_markers(talk(text, "a")) == leftover_markers(Example(text=text)) == found


@each(
    ("text", "told"),
    [
        ("User: What is a river?\nAssistant: Water.", True),
        ("<human>: What is a river?\n<bot>: Water.", True),
        ("A chat. USER: What is a river? ASSISTANT: Water.", True),
        (f"Q:{chr(10) * 20_000}", False),  # at once, not in a minute
        ("A user: and an assistant: met.", False),
    ],
)
def test_plain_text_that_is_a_conversation_is_warned_about(text, told):
    split = SplitReport("train")
    split.texts.note(Example(text=text), (), "rows:1")
    assert any("written as a conversation" in line for line in split.warnings()) == told


MESSAGES_AS_JSON = '[{"role": "user", "content": "Name a river."}]'
LONG = "Which rivers meet near Iquitos?"
WEATHER = '[{"type": "function", "function": {"name": "weather"}}]'


def told_of(example: Example, others: int = 0) -> str:
    """The warnings about an example among others that have none."""
    texts = TextWarnings()
    for number in range(others):
        texts.note(talk(f"a{number}", "b"), (), f"rows:{number + 2}")
    said = [Segment(text, True) for text in (example.text, *(t.text for t in example.turns))]
    texts.note(example, said, "rows:1")
    return "\n".join(texts.lines("train"))


@each(
    ("example", "sentence"),
    [
        (talk("Wo liegt MÃ¼nchen?", "a"), "1 example with characters of a wrong encoding"),
        (Example(text="a \ufffd b"), "1 example with characters of a wrong encoding"),
        (
            talk("Human: Hi.\nAssistant: Hello.\nHuman: Bye.\nAssistant: ", "a"),
            "the model sees it as one turn",
        ),
        (talk("a", MESSAGES_AS_JSON), "messages written as JSON text, which is trained on as text"),
        (talk(LONG, f"{LONG} The Ucayali."), "the whole request in the answer"),
        # Sound rows
        (talk("a", '[{"from": "Berlin", "value": "3"}, {"from": "Rome", "value": "9"}]'), None),
        (talk("a", "<p><s>old</s> new <s>old</s>"), None),
        (talk("MÃE, MAÇÃ, «château», “ă”", "Â"), None),
        (talk("User: Hi.\nAssistant: Hello.\n\nSum up this conversation.", "a"), None),
        (talk(f"{LONG} Answer in one word.", f"{LONG} Ucayali."), None),
        (Example(talk("a", "b").turns, tools=WEATHER), None),
    ],
)
def test_rows_that_were_put_together_wrongly_are_warned_about_and_sound_ones_not(example, sentence):
    assert sentence in told_of(example) if sentence else told_of(example) == ""


def test_answers_that_repeat_the_request_are_told_of_where_most_do():
    example = talk(LONG, f"{LONG} The Ucayali.")
    assert "the whole request in the answer" in told_of(example, others=1)
    assert told_of(example, others=2) == ""
