"""Loss and token accuracy of a trained expert on rows, computed as in a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from expert.data.prepared import PreparedSplit
from expert.data.records import BadRow, Example, Row, Segment
from expert.data.template.templates import TemplateError
from expert.run.build import evaluation_engine

if TYPE_CHECKING:
    from expert.model.load import LoadedModel
    from expert.run.stored.load import Trained
    from expert.training.objectives.objective import EvalResult


def row_losses(
    trained: Trained,
    examples: Sequence[Example],
    *,
    one_by_one: bool = False,
    tell: Callable[[int, int], None] = lambda done, of: None,
    note: Callable[[str], None] = lambda text: None,
) -> EvalResult:
    """Means over all target tokens of the rows, every token weighted equally. `one_by_one`: with
    the loss of each row. `tell` gets the finished rows and their number, `note` remarks."""
    from expert.data.feed.run_data import split_batches
    from expert.model.attention import disable_failed_cudnn
    from expert.model.device_memory import is_out_of_memory
    from expert.training.evaluation import EvalSums, evaluate, mean_metrics
    from expert.training.objectives.next_token import NextToken

    plan = trained.plan
    # One row per sequence: the loss is the same as packed, and one kernel works on every machine.
    alone = plan.model_copy(update={"data": plan.data.model_copy(update={"packing": "none"})})
    rows = 1 if one_by_one else plan.batch.eval_batch
    found: list[EvalSums | None] = []
    with (
        tempfile.TemporaryDirectory(prefix="expert-rows-") as folder,
        _evaluating(trained) as loaded,
    ):
        split = _prepared(trained, examples, Path(folder))
        engine = evaluation_engine(loaded, trained.device)
        while True:
            found, done = [], 0
            try:
                with split_batches(alone, split, rows=rows, device=trained.device) as batches:
                    for batch in batches:
                        found.append(evaluate(engine, NextToken(), [batch]))
                        done += batch.counts.examples
                        tell(min(done, len(examples)), len(examples))
                break
            except RuntimeError as error:
                if text := disable_failed_cudnn(error):
                    note(text)
                elif is_out_of_memory(error) and rows > 1:
                    rows //= 2
                else:
                    raise
        del split  # its tokens are mapped from the folder that is removed
    sums = [each for each in found if each is not None]
    losses = [float(each.sums["loss"].item()) for each in sums]
    total = 0.0
    for loss in losses:  # Python 3.12's sum rounds differently from a device
        total += loss
    means = mean_metrics(
        total,
        sum(int(each.sums["correct"].item()) for each in sums),
        targets=sum(each.weight for each in sums),
        examples=sum(each.examples for each in sums),
    )
    single = one_by_one and all(each.examples == 1 for each in sums)
    return replace(means, row_losses=tuple(losses)) if single else means


@contextmanager
def _evaluating(trained: Trained) -> Iterator[LoadedModel]:
    """Use training's attention, which separates documents, and afterwards that of generation. SDPA
    has no soft cap on scores, which Gemma 2 needs: it uses eager attention."""
    from expert.answer.cache import attention_for
    from expert.model.attention import IMPLEMENTATIONS

    loaded = trained.loaded
    if trained.template is None:
        yield loaded
        return
    model = loaded.causal_lm
    if getattr(model.config, "attn_logit_softcapping", None):
        loaded = replace(loaded, kernels=loaded.kernels.model_copy(update={"attention": "eager"}))
    model.set_attn_implementation(IMPLEMENTATIONS[loaded.kernels.attention])
    try:
        yield loaded
    finally:
        model.set_attn_implementation(attention_for(model.config))


def _prepared(trained: Trained, examples: Sequence[Example], place: Path) -> PreparedSplit:
    """The rows tokenised, one per sequence."""
    from expert.data.pack.pack import pack_none
    from expert.data.tokens.documents import DocumentStore
    from expert.data.tokens.prepare import Recipe, prepare
    from expert.data.tokens.tokenise import TokeniseJob

    plan, template = trained.plan, trained.template

    def segments_of(row: Row) -> list[Segment] | BadRow:
        example = examples[row.line - 1]
        if template is None:
            return [Segment(example.text, learn=True)]
        try:
            return template.segments(example, learn_prompt=plan.data.train_on_prompt)
        except TemplateError as error:
            return BadRow(row.file, row.line, str(error))

    def rows() -> Iterator[Row | BadRow]:
        return (Row({}, "test set", number + 1) for number in range(len(examples)))

    recipe = Recipe(
        data="", tokenizer="", template="", columns="", learn_prompt=plan.data.train_on_prompt
    )
    work = TokeniseJob(rows=rows, formatter=lambda: segments_of, encoder=trained.encoder)
    tokens = prepare(work, recipe, place / "tokens")
    soft = trained.loaded.soft_prompts
    index = pack_none(
        DocumentStore(tokens.folder).lengths,
        plan.data.max_seq_length,
        overlong="split" if template is None else plan.data.overlong,
        soft_tokens=len(soft.rows()) if soft is not None else 0,
    )
    return PreparedSplit("test", (tokens,), index, place / "index.arrow", False)
