"""Which cases of a test set stand, prompt and answer, among the rows that a run has learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from expert.core.errors import ExpertError
from expert.jobs.validate.held_out import CannotBeTold, Run, draw_again

if TYPE_CHECKING:
    from collections.abc import Sequence

    from expert.data.line import Line
    from expert.data.records import Example, Segment
    from expert.jobs.validate.test_sets import TestSet


def learnt_cases(test: TestSet, run: Run) -> tuple[frozenset[str], str]:
    """The ids of the cases that were learnt, and why that cannot be told where it cannot.

    Cases are written and tokenised as the rows of the run were, and recognised by their tokens:
    what is compared is what the model really saw.
    """
    import numpy as np

    from expert.data.splits import keys_of
    from expert.data.tokens.row_keys import keys_of_batch
    from expert.manifest.schema.dataset import DatasetSpec
    from expert.manifest.schema.manifest import CHAR_GPT

    asked = [pair for pair in zip(test.cases, test.examples, strict=True) if pair[0]]
    spec = DatasetSpec.model_validate(run.plan.data.dataset)
    if not asked or run.plan.model.name == CHAR_GPT:
        return frozenset(), ""
    if spec.streaming:
        return frozenset(), "its rows were streamed"
    if run.place is None:
        return frozenset(), "its data is not where it was"
    try:
        drawn = draw_again(run.folder, run.plan, spec, run.place, make=test.drawn)
        train = drawn.made.train
        known = keys_of(drawn.line, train.folders)
        assert known is not None
        segments = _written(drawn.line, [example for _, example in asked])
        keys = keys_of_batch(drawn.line.encoder.encode(segments)).whole
    except (CannotBeTold, ExpertError, OSError) as why:
        return frozenset(), str(why)
    found = np.isin(keys, known.whole[np.unique(train.index.piece_document)])
    learnt = (cases for (cases, _), known in zip(asked, found, strict=True) if known)
    return frozenset(case.id for cases in learnt for case in cases), ""


def _written(line: Line, examples: Sequence[Example]) -> list[list[Segment]]:
    """The examples as training writes them; what a template cannot write was never learnt."""
    from expert.data.records import Segment
    from expert.data.template.templates import TemplateError

    template, written = line.template, []
    assert template is not None, "the character model has no turns"
    for example in examples:
        try:
            made = template.segments(example, learn_prompt=line.plan.data.train_on_prompt)
        except TemplateError:
            made = [Segment("", False)]
        written.append(list(made))
    return written
