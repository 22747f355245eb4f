"""The rows an expert is judged by: a given file, or what its manifest holds out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import read_json
from expert.core.rundir import RunFolder
from expert.core.text import counted
from expert.data.examples.column_survey import survey_rows
from expert.data.examples.columns import Columns, ColumnsNotFound, detect_source_columns
from expert.data.examples.formats import example_of
from expert.data.examples.tools import calls_of, with_calls
from expert.data.read.sources import Source, first_row, iterate, resolve_sources
from expert.data.records import BadRow, DataError, Dropped, Example, Row, Turn, place_of
from expert.data.template.templates import Template, TemplateError
from expert.jobs.validate.held_out import (
    TOKENS_ONLY,
    Run,
    TrainedRowsUnknown,
    restore_split,
)
from expert.judging.cases import Case
from expert.judging.oracles.calls import CALLS, CallMarks, check_of, marks_of
from expert.manifest.schema.dataset import DatasetSpec
from expert.planning.run_plan import RunPlan
from expert.run.stored.locate import start_of

CASE_FILE = "test_cases.json"
CASES_VERSION = 1
_OWN_KEYS = frozenset({"id", "task", "expected", "check", "domain"})
"""Keys of a case that are not part of the prompt."""
SHOWN_BAD_ROWS = 3
_PROMPT_ROLES = ("user", "tool")
"""Roles that are followed by an answer."""


@dataclass(frozen=True, kw_only=True)
class TestSet:
    """Rows that were not trained on; each answer in them is a case."""

    __test__ = False  # pytest would collect it as a test class

    name: str
    """Where they come from, in words."""
    domain: str
    """As given in a case file; "": not given."""
    examples: tuple[Example, ...]
    cases: tuple[tuple[Case, ...], ...]
    """For each example, one for every answer in it; none for plain text."""
    drawn: bool = False
    """Held out of the training rows by the run: another run may have been trained on these."""
    left_out: int = 0
    """Rows that were also held out, but whose answers start after max_seq_length: not asked."""
    part_of: TestSet | None = None
    """The whole set, if only a part is judged."""

    @property
    def partial(self) -> dict[str, Any] | None:
        """Name and size of the whole set; None if this is the whole."""
        whole = self.part_of
        return {"test_set": whole.name, "of": whole.count} if whole is not None else None

    @property
    def every_case(self) -> tuple[Case, ...]:
        return tuple(case for own in self.cases for case in own)

    def asked(self) -> list[tuple[Case, Example]]:
        """Every case with its row up to and including the expected answer."""
        return [
            (case, replace(example, turns=example.turns[: case.turn]))
            for example, own in zip(self.examples, self.cases, strict=True)
            for case in own
        ]

    @property
    def count(self) -> int:
        """The number of cases; a row without any counts as one."""
        return sum(len(own) or 1 for own in self.cases)

    def limited(self, most: int | None) -> TestSet:
        """At most `most` cases, spread evenly, as rows of a task are often adjacent. A row is kept
        whole if one of its cases is."""
        count = self.count
        if most is None or most >= count:
            return self
        every = [(row, case) for row, own in enumerate(self.cases) for case in own or (None,)]
        kept: dict[int, list[Case]] = {}
        for place in range(most):
            row, case = every[place * count // most]
            kept.setdefault(row, []).extend([case] if case is not None else [])
        return replace(
            self,
            name=f"{most} of {count}: {self.name}",
            examples=tuple(self.examples[row] for row in kept),
            cases=tuple(map(tuple, kept.values())),
            part_of=self,
        )


def find_test_set(run: Run, *, named: Path | None) -> TestSet:
    """The rows to judge by: those of `named`, else the manifest's test rows, else its cases, else
    its validation rows."""
    spec, place = DatasetSpec.model_validate(run.plan.data.dataset), run.place
    if named is not None:
        if not named.exists():
            raise ExpertError(f"--test-set {named}: there is no such file")
        if (found := _cases_in(named)) is not None:
            return _of_cases(named, found)
        source = resolve_sources(DatasetSpec(path=str(named.resolve())), named.parent).train
        assert source is not None
        # A run that was trained on pairs may be judged by single answers.
        single = spec.model_copy(update={"preference_rows": None})
        faults: list[str] = []
        for each in (spec, single):
            try:
                return _of_sources([source], each, str(named))
            except ColumnsNotFound as error:
                faults.append(str(error).partition("  (")[0])
        raise ExpertError(
            f"--test-set {faults[0]}  (name its columns as those of the rows it was trained on)"
        )
    if place is None:
        raise ExpertError(
            f"{run.folder.path}: the run's data was moved or deleted  (name rows with --test-set "
            "FILE, or the folder of the manifest with --expert)"
        )
    sources = resolve_sources(spec, place)
    for split in ("test", "validation"):
        if own := sources.of(split):
            names = ", ".join(source.name for source in own)
            return _of_sources(own, spec, f"{split} rows: {names}")
        file = place / CASE_FILE
        if split == "test" and file.is_file():
            return _of_cases(file, _cases_in(file) or {})
    return _of_split(run, spec)


def data_folder(folder: RunFolder, plan: RunPlan, beside: Path | None) -> Path | None:
    """The folder that the manifest's paths are relative to; None if the data is gone."""
    from expert.data.plain_text import folder_of_paths

    if beside is not None:
        return beside
    spec = DatasetSpec.model_validate(plan.data.dataset)
    above = folder.path.resolve().parents[1:2]
    manifest = start_of(folder).get("manifest")  # runs and tokens may be on other disks
    started = [Path(str(manifest)).parent] if manifest else []
    return folder_of_paths(plan, spec, *above, *started)


def _cases_in(path: Path) -> Mapping[str, Any] | None:
    """A test_cases.json: a .json object with a list of cases; None for a file of rows."""
    if path.suffix.lower() != ".json":
        return None
    try:
        found = read_json(path)
    except (OSError, ValueError, RecursionError):
        return None  # reading it as rows reports the error
    return found if isinstance(found, dict) and isinstance(found.get("cases"), list) else None


def _of_cases(path: Path, found: Mapping[str, Any]) -> TestSet:
    """A test_cases.json; its cases are read like training rows of instruction, input and output."""
    cases, version = found.get("cases") or [], found.get("version", CASES_VERSION)
    if version != CASES_VERSION or not cases or not all(isinstance(case, dict) for case in cases):
        raise ExpertError(
            f"{path}: is not a file of cases  (an object with version {CASES_VERSION} and a list "
            "of cases, which are objects)"
        )
    rows = []
    for number, case in enumerate(cases, 1):
        if not set(case) - _OWN_KEYS:
            raise ExpertError(f"{path}: case {number} asks nothing  (write instruction, and input)")
        asked = {key: value for key, value in case.items() if key not in _OWN_KEYS}
        facts = {key: case[key] for key in ("id", "task", "check", "domain") if key in case}
        rows.append(Row({**asked, "output": case.get("expected"), **facts}, str(path), number))
    spec = DatasetSpec(path="cases", json_values=True)
    columns = detect_source_columns(survey_rows(rows), spec)
    domain = str(found.get("domain") or "")
    return _of_rows([(rows, columns)], spec, str(path), domain=domain)


def _of_sources(sources: Sequence[Source], spec: DatasetSpec, name: str) -> TestSet:
    groups = []
    for source in sources:
        seen = survey_rows(iterate(source))
        if not seen.rows:
            first_row(source)  # raises, with the reason
        if "input_ids" in seen.names:
            raise ExpertError(TOKENS_ONLY.format(source.name))
        groups.append((iterate(source), detect_source_columns(seen, spec)))
    return _of_rows(groups, spec, name)


def trained_and_held_out(run: Run) -> tuple[TestSet, TestSet | None]:
    """The rows a run was trained on, found again with its seed, and its validation rows."""
    spec = DatasetSpec.model_validate(run.plan.data.dataset)
    try:
        if spec.streaming:
            raise TrainedRowsUnknown("they were streamed")
        drawn = restore_split(run)
    except TrainedRowsUnknown as why:
        raise ExpertError(
            f"{run.folder.path}: the rows it was trained on are not known: {why}  (restore the "
            "data as it was, or train it again)"
        ) from why
    name = spec.path or "the tasks"
    trained = _of_rows(list(drawn.rows_of(drawn.made.train)), spec, f"training rows of {name}")
    if given := drawn.line.sources_of("validation"):
        return trained, _of_sources(given, spec, f"validation rows of {name}")
    if drawn.made.validation is None:
        return trained, None
    held_out = list(drawn.rows_of(drawn.made.validation))
    return trained, _of_rows(held_out, spec, f"rows held out of {name}")


def _of_split(run: Run, spec: DatasetSpec) -> TestSet:
    """The part of the training rows that was held out, found again with the run's seed."""
    nothing = ExpertError(
        f"{run.folder.path}: the manifest holds out no rows  (name rows with --test-set FILE, or "
        "set training.dataset.test_path)"
    )
    if spec.streaming or not spec.validation_split:
        raise nothing
    name = spec.path or "the tasks"
    try:
        drawn = restore_split(run)
    except TrainedRowsUnknown as why:
        raise ExpertError(
            f"{run.folder.path}: the rows it held out of {name} are not known: {why}  (name rows "
            "it was not trained on with --test-set FILE, or restore the data as it was)"
        ) from why
    split = drawn.made.validation
    if split is None:
        raise nothing
    found = _of_rows(list(drawn.rows_of(split)), spec, f"rows held out of {name}")
    return replace(found, drawn=True, left_out=split.index.overlong.unlearnt)


def _of_rows(
    groups: Sequence[tuple[Iterable[Row | BadRow], Columns]],
    spec: DatasetSpec,
    name: str,
    *,
    domain: str = "",
) -> TestSet:
    """Read rows as training reads them; a row that cannot be read is an error."""
    examples: list[Example] = []
    cases: list[tuple[Case, ...]] = []
    seen: dict[str, int] = {}
    bad: list[str] = []
    for group, columns in groups:
        for row in group:
            example = row if isinstance(row, BadRow) else example_of(row, columns)
            if isinstance(example, BadRow) or isinstance(row, BadRow):
                bad.append(str(example))
            elif not isinstance(example, Dropped):  # training drops some by their label, too
                examples.append(example)
                cases.append(_cases(example, row, _name(row, seen)))
    if len(bad) > spec.max_bad_rows:
        raise DataError(
            "\n".join([f"{name}: {counted(len(bad), 'bad row')}", *bad[:SHOWN_BAD_ROWS]])
        )
    if not examples:
        raise ExpertError(f"{name}: there are no rows  (name others with --test-set FILE)")
    return TestSet(name=name, domain=domain, examples=tuple(examples), cases=tuple(cases))


def _cases(example: Example, row: Row, name: str) -> tuple[Case, ...]:
    """The cases in a row: every answer that training would use, with the turns before it.

    The row's task, domain and check apply to each of them; an answer that calls tools is judged by
    its calls.
    """
    turns, values = example.turns, row.values
    said = tuple((turn.role, with_calls(turn)) for turn in turns)
    answers = [
        place
        for place in range(1, len(turns))
        if turns[place].role == "assistant"
        and turns[place].is_trained(learn_prompt=False)
        and turns[place - 1].role in _PROMPT_ROLES
    ]
    texts = {key: str(values.get(key) or "") for key in ("task", "domain")}
    check = _check(values.get("check"), row)
    cases = []
    for place in answers:
        calls = calls_of(turns[place])
        cases.append(
            Case(
                id=name if len(answers) == 1 else f"{name}, turn {place + 1}",
                turns=said[:place],
                expected=said[place][1],
                task=texts["task"],
                domain=CALLS if calls else texts["domain"],
                check=check_of(calls) if calls else check,
                row=name,
                turn=place + 1,
            )
        )
    return tuple(cases)


def _name(row: Row, seen: dict[str, int]) -> str:
    """The id of a row, or its location; repeated names are numbered."""
    name = str(row.values.get("id") or place_of(Path(row.file).name, row.line))
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name} ({seen[name]})"


def _check(value: Any, row: Row) -> Mapping[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) and value else value or {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise DataError(f"{row.place}: column 'check' is not a JSON object")
    return {key: part for key, part in found.items() if part is not None}


_NAME = "zq0called"


def with_rendered_answers(asked: Sequence[tuple[Case, Example]], template: Template) -> list[Case]:
    """The cases; if one expects calls, its expected answer becomes the text that was trained on."""
    if not any(example.turns[-1].extra for _, example in asked):
        return [case for case, _ in asked]
    marks = call_marks(template)
    found = []
    for case, example in asked:
        if example.turns[-1].extra:
            check = {**case.check, **({"marks": asdict(marks)} if marks else {})}
            case = replace(case, expected=_written(template, example), check=check)
        found.append(case)
    return found


def call_marks(template: Template) -> CallMarks | None:
    """The marks a template puts around calls; None if it cannot render the shortest row."""
    tool = {"name": _NAME, "description": "x", "parameters": {"type": "object", "properties": {}}}
    call = {"name": _NAME, "arguments": {"x": "y"}}
    # Mistral's template requires an id of nine letters.
    calls = [{"type": "function", "function": call, "id": "call00001"}]
    turns = (Turn("user", "x"), Turn("assistant", "", extra=json.dumps({"tool_calls": calls})))
    tools = json.dumps([{"type": "function", "function": tool}])
    return marks_of(_written(template, Example(turns, tools=tools)), _NAME)


def _written(template: Template, example: Example) -> str:
    """The last answer without its end token; "" if the template cannot write it."""
    try:
        *_, answer = (each.text for each in template.segments(example) if each.learn)
    except TemplateError:
        return ""
    return answer.strip().removesuffix(template.stop).strip()
