"""The job behind `expert pretokenize` and `expert.prepare`: rows to packed tokens on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.links import refuse_links, refuse_links_inside
from expert.data.pack.index_name import IndexName
from expert.data.pack.packing import (
    RowsToPack,
    packed,
    packing_for,
    rows_to_pack,
    soft_tokens,
)
from expert.data.tokens.tokenizer_files import tokenizer_folder
from expert.planning.plan import folder_name
from expert.run.left_out import doubts_of, not_empty
from expert.run.places import Doubt
from expert.run.prepared import PreparedData, PreparedSplit
from expert.run.token_folders import (
    CACHE_KEY,
    CHECKED,
    NamedSources,
    choose_sources,
    named_sources,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from expert.data.examples.column_survey import ColumnSurvey
    from expert.data.examples.columns import Columns
    from expert.data.feed.streaming import Stream
    from expert.data.inspect.shared_rows import SharedRows
    from expert.data.pack.pack_index import PackIndex
    from expert.data.read.sources import Source, Sources
    from expert.data.records import BadRow, Row
    from expert.data.template.templates import Template
    from expert.data.tokens.encoder import Encoder
    from expert.data.tokens.flat_documents import FlatDocuments
    from expert.data.tokens.prepare import Prepared, Recipe
    from expert.data.tokens.row_keys import RowKeys
    from expert.data.tokens.tokenised import TokenColumns
    from expert.manifest.reader import ReadManifest
    from expert.planning.choose.sequences import Packing
    from expert.planning.run_plan import RunPlan

Tell = Callable[[str, int, int], None]
LATE_COLUMN = (
    "column {!r} is filled here for the first time, and none of the first {:,} rows of the stream "
    "has it  (set training.dataset.streaming: false, or fill it in an earlier row)"
)
LONG_TEXT = 4000
"""Characters of a single text from which its end is held out; less would tell nothing."""
ENOUGH_FOR_TWO = 4_000_000
"""Bytes of data from which a second process pays: loading its own tokenizer takes half a second."""


class NothingToPrepare(ExpertError):
    """Rows that are tokenised while training."""


def prepare(
    manifest: str | Path | ReadManifest,
    *,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    tell: Tell = lambda name, rows, tokens: None,
) -> PreparedData:
    """Tokenise and pack what a manifest names, once; a second call finds it done."""
    from expert.manifest.reader import ReadManifest, read_manifest
    from expert.run.plan import plan as plan_job
    from expert.run.smollm2 import provide_model

    read = manifest
    if not isinstance(read, ReadManifest):
        read = read_manifest(read, overrides=overrides)
    spec = read.manifest.training.dataset
    if spec.streaming:
        raise NothingToPrepare(
            "training.dataset.streaming is true: its rows are tokenised while training, there is "
            "nothing to prepare  (set streaming: false to prepare them once)"
        )
    sources = named_sources(read)
    provide_model(read, model)
    plan = plan_job(read, model=model, look=False)
    builder = Builder(plan, read, sources, tell)
    return builder.build()


class Builder:
    """What all splits share: the tokenizer, the template and the place they go to."""

    def __init__(
        self,
        plan: RunPlan,
        read: ReadManifest,
        named: NamedSources,
        tell: Tell,
        *,
        own_indexes: frozenset[str] = frozenset(),
    ) -> None:
        """`own_indexes`: names of the indexes of a run whose rows these are to be."""
        self.plan = plan
        self.own_indexes = own_indexes
        self.packed_before = False
        """The rows are those of the run, which an earlier version had packed."""
        self.spec = read.manifest.training.dataset
        self.folder, self.manifest_file = read.folder, read.source
        self.tell = tell
        self.explicit = read.manifest.training.config.pretokenized_cache is not None
        self.cache = Path(plan.data.cache or read.folder / "datasets_optimized")
        refuse_links_of_cache(self.cache, read.folder, explicit=self.explicit)
        self.sources: Sources = named.rows or named.first
        self.encoder, self.template = self._load_encoder()
        self.chosen = choose_sources(named, self.encoder, self.spec, self._converted)
        self.sources = self.chosen.sources
        self.doubts: dict[str, Doubt] = {each.text: each for each in self.chosen.doubts}
        """What there is to say before any row is tokenised."""
        self._window_packing: Packing | None = None
        self._columns: dict[Source, tuple[Columns, ColumnSurvey]] = {}
        self._end_apart: dict[Source, bool] = {}
        self._keeps = False
        """Whether what was seen of the columns is kept in the cache: looking writes nothing."""
        self.most_rows: int | None = None
        """Rows that are looked at to know the columns; None: all of them."""

    @property
    def _check(self) -> str:
        """The command that says where bad and shared rows stand."""
        return f"expert dataset check --manifest {self.manifest_file}"

    @property
    def beside(self) -> Path:
        """Where indexes, further splits and what rows are recognised by go: in the cache, or beside
        a folder that is the cache; beside the manifest where nothing can be written there."""
        if not self.explicit:
            return self.cache
        above = self.cache.parent
        if above.exists() and not os.access(above, os.W_OK):
            return self.folder / "datasets_optimized" / folder_name(self.plan.expert)
        return above

    def build(self) -> PreparedData:
        import numpy as np

        from expert.data.feed.drawing import doubt_of_repeats, draw_documents

        tasks = self.sources.tasks
        trains = self._sources_of("train")
        tokens = tuple(self._tokenise(source, "train") for source in trains)
        given = [self._given("validation"), self._given("test")]
        validation, test = given
        share = self.spec.validation_split if validation is None else 0.0
        keys = self.keys_of(tokens) if share else None
        chosen, held_out = draw_documents(
            [prepared.statistics.documents for prepared in tokens],
            [task.weight for task in tasks] or [1.0],
            held_out_share=share,
            seed=self.plan.optim.seed,
            keys=keys,
        )
        repeats = doubt_of_repeats(keys, chosen, held_out) if keys is not None else ""
        doubts = [*self.doubts.values()]
        doubts += [Doubt("training.dataset.validation_split", repeats)] if repeats else []
        doubts += self.doubts_about_columns()
        if self.holds_out_the_end(trains[0]):
            chosen, held_out = np.array([0]), np.array([1])
        train = self._pack("train", tokens, chosen)
        if len(held_out):
            validation = self._pack("validation", tokens, held_out, drawn_beside=train)
        name = self.template.name if self.template else "characters"
        found = [self._shared(split, train, chosen) for split in given if split is not None]
        shared = tuple(each for each in found if each is not None)
        doubts += [Doubt(each.key, each.told(f"{self._check} lists them")) for each in shared]
        doubts += doubts_of(self.plan, train, validation, test)
        return PreparedData(
            train=train,
            validation=validation,
            test=test,
            encoder=self.encoder,
            template=name,
            doubts=tuple(doubts),
            shared=shared,
            columns=self.columns_read(),
            notes=tuple(self.chosen.notes()),
        )

    def keys_of(self, tokens: tuple[Prepared, ...]) -> RowKeys:
        """What the documents of prepared sources are recognised by."""
        from expert.data.tokens.row_keys import RowKeys, saved_keys

        return RowKeys.joined([saved_keys(prepared, self.beside) for prepared in tokens])

    def _shared(
        self, split: PreparedSplit, train: PreparedSplit, learnt: npt.NDArray[np.integer[Any]]
    ) -> SharedRows | None:
        """The rows of a split with files of its own that are learnt as well."""
        from expert.data.inspect.shared_rows import PreparedRows, find_shared

        own, known = (
            PreparedRows(
                names=[source.name for source in self._sources_of(each.name)],
                folders=each.folders,
                keys=self.keys_of(each.folders),
            )
            for each in (split, train)
        )
        return find_shared(split.name, own, known, learnt)

    def held_out(self) -> tuple[PreparedSplit | None, PreparedSplit | None]:
        """Validation and test rows that have files of their own: all that is prepared of a run
        whose training rows are streamed."""
        return self._given("validation"), self._given("test")

    def stream(self) -> Stream:
        """The training rows, tokenised and packed as they are read."""
        from expert.data.feed.loader import LoaderOptions
        from expert.data.feed.streaming import Stream, StreamedRows
        from expert.data.records import DataError

        if self.sources.tasks:
            raise DataError(
                "training.dataset.streaming: several tasks cannot be streamed together  "
                "(set streaming: false)"
            )
        source = _only(self.sources.train)
        segments_of, _ = self.formatter(source)
        self._window_packing = None
        loader = self.plan.loader
        return Stream(
            StreamedRows(lambda: self.rows_of(source), segments_of, self.encoder),
            self._pack_window,
            examples_per_update=self.plan.batch.examples_per_update,
            seed=self.plan.optim.seed,
            options=LoaderOptions(workers=loader.workers, prefetch=loader.prefetch),
            max_bad_rows=self.spec.max_bad_rows,
        )

    def _pack_window(self, store: FlatDocuments, seed: int) -> PackIndex:
        """Rows of a stream as the first of them were packed: updates are cut by that."""
        import numpy as np

        rows = self._rows_to_pack(store, np.arange(len(store)))
        if self._window_packing is None:
            self._window_packing = self._packing("train", rows)
        return self._index("train", rows, seed, self._window_packing)

    def _rows_to_pack(
        self, store: FlatDocuments, documents: npt.NDArray[np.integer[Any]]
    ) -> RowsToPack:
        return rows_to_pack(self.plan, store, documents, is_text=self.template is not None)

    def _load_encoder(self) -> tuple[Encoder, Template | None]:
        from expert.data.read.sources import iterate
        from expert.data.template.text_tools import text_tools
        from expert.data.tokens.encoder import CharacterEncoder
        from expert.manifest.schema.manifest import CHAR_GPT

        if self.plan.model.name == CHAR_GPT:
            rows = iterate(_only(self.sources.train))
            text = "".join(str(getattr(row, "values", {}).get("text", "")) for row in rows)
            return CharacterEncoder(text), None
        folder = tokenizer_folder(self.plan, self.folder)
        return text_tools(folder, self.plan.model.prompt_template)

    def _tokenise(self, source: Source, name: str) -> Prepared:
        from dataclasses import replace

        from expert.data.tokens.prepare import prepare
        from expert.data.tokens.shards import Work

        self._keeps = True
        recipe, folder = self.recipe_of(source, name)
        segments_of, _ = self.formatter(source)
        checked = self.chosen.checks.get(source)
        work = Work(
            rows=lambda: self.rows_of(source),
            segments_of=segments_of,
            encoder=self.encoder,
            made_for=f"{name} {source.name}",
            max_bad_rows=self.spec.max_bad_rows,
            listed_by=f"{self._check} lists them",
            tell=lambda rows, tokens: self.tell(f"{name} {source.name}", rows, tokens),
            with_helper=checked is None and self._pays_for_a_helper(source),
            records={CHECKED: json.dumps(checked.to_json(), indent=2)} if checked else {},
        )
        made = prepare(work, recipe, folder)
        if checked is None:
            return made
        return replace(made, because=f"tokens of {source.name}, made elsewhere; {made.because}")

    def recipe_of(self, source: Source, name: str) -> tuple[Recipe, Path]:
        """What decides the tokens of a source, and the folder they are in or would go to."""
        from expert.data.examples.remembered import remembered_content_hash
        from expert.data.tokens.prepare import Recipe, misfit, tokens_folder

        if source in self.chosen.tokens:
            recipe = self._recipe_of_tokens(source, self.chosen.tokens[source].columns)
        else:
            _, columns = self.formatter(source)
            checks = self.spec.validation
            recipe = Recipe(
                data=remembered_content_hash(source, self.beside),
                tokenizer=self.encoder.fingerprint,
                template=self.template.fingerprint if self.template else "characters",
                columns=columns,
                learn_prompt=self.plan.data.train_on_prompt,
                checks=checks.model_dump_json() if checks else "",
                max_samples=source.max_samples,
            )
        keyed = self.beside / tokens_folder(recipe.key())
        if not self.explicit or name != "train" or self.sources.tasks:
            return recipe, keyed
        why = misfit(self.cache, recipe)
        if not why:
            return recipe, self.cache
        if not self.doubts and source not in self.chosen.tokens:  # else it has been told why
            text = f"{CACHE_KEY}: {self.cache} is left as it is: {why}. The tokens are in {keyed}"
            self.doubts[text] = Doubt(CACHE_KEY, text)
        return recipe, keyed

    def _recipe_of_tokens(
        self, source: Source, columns: TokenColumns, *, keep: bool = True
    ) -> Recipe:
        """The same of tokens that were made elsewhere: neither template nor columns of text decide
        them."""
        from expert.data.examples.remembered import remembered_content_hash
        from expert.data.tokens.prepare import Recipe

        return Recipe(
            data=remembered_content_hash(source, self.beside, keep=keep),
            tokenizer=self.encoder.fingerprint,
            template="tokens made elsewhere",
            columns=str(columns),
            learn_prompt=False,
            max_samples=source.max_samples,
        )

    def _converted(self, source: Source, columns: TokenColumns) -> Path:
        """Where tokens that were made elsewhere are, once they are converted."""
        from expert.data.tokens.prepare import misfit, tokens_folder

        recipe = self._recipe_of_tokens(source, columns, keep=False)
        fits = self.explicit and self.cache.is_dir() and not misfit(self.cache, recipe)
        return self.cache if fits else self.beside / tokens_folder(recipe.key())

    def _pays_for_a_helper(self, source: Source) -> bool:
        """Two processes where words are encoded under Python's lock and there is enough to do."""
        size = sum(file.stat().st_size for file in source.files if file.is_file())
        return getattr(self.encoder, "by_words", False) and size > ENOUGH_FOR_TWO

    def rows_of(self, source: Source) -> Iterator[Row | BadRow]:
        """The rows of a source; one that is a single text comes in two parts where its end is held
        out for validation."""
        from expert.data.read.sources import iterate
        from expert.data.records import Row

        if source in self.chosen.tokens:
            yield from self.chosen.tokens[source].rows()
            return
        if not self.holds_out_the_end(source):
            yield from iterate(source)
            return
        column = "text" if self.template is None else self.columns_in(source)[0].text
        for row in iterate(source):
            if isinstance(row, Row):
                text = str(row.values.get(column, ""))
                cut = int(len(text) * (1 - self.spec.validation_split))
                if self.template is not None:  # between two lines or words, not inside of one
                    cut = max(text.rfind("\n", cut // 2, cut), text.rfind(" ", cut // 2, cut)) + 1
                yield Row({column: text[:cut]}, row.file, row.line)
                yield Row({column: text[cut:]}, row.file, row.line)
            else:
                yield row

    def holds_out_the_end(self, source: Source) -> bool:
        """True for a source that is one text and has no validation text of its own: other rows are
        held out one by one, but of one text only a part can be, and that is its end."""
        if source not in self._end_apart:
            self._end_apart[source] = self._is_one_text(source)
        return self._end_apart[source]

    def _is_one_text(self, source: Source) -> bool:
        from itertools import islice

        from expert.data.examples.formats import example_of
        from expert.data.read.sources import iterate
        from expert.data.records import Example, Row

        own = self.sources.validation is not None or source is not self.sources.train
        if own or not self.spec.validation_split or self.spec.streaming:
            return False
        if source in self.chosen.tokens:
            return False
        rows = list(islice(iterate(source), 2))
        if len(rows) != 1 or self.template is None:
            return len(rows) == 1
        columns, _ = self.columns_in(source)
        if (
            not isinstance(rows[0], Row)
            or columns.kind != "text"
            or self.plan.data.overlong != "split"
        ):
            return False
        made = example_of(rows[0], columns)  # one with turns is a conversation
        return isinstance(made, Example) and len(made.text) >= LONG_TEXT

    def formatter(self, source: Source) -> tuple[Any, str]:
        """How a row of this source becomes segments, and what decides it, as text."""
        if source in self.chosen.tokens:
            tokens = self.chosen.tokens[source]
            return tokens.segments_of, str(tokens.columns)
        from expert.data.examples.checks import RowFilter
        from expert.data.examples.formats import example_of
        from expert.data.records import BadRow, Dropped, Segment
        from expert.data.template.templates import TemplateError

        template = self.template
        if template is None:
            part = self.spec.validation_split if self.holds_out_the_end(source) else 0
            return (
                lambda row: [Segment(row.values["text"], True)],
                f"characters, {part:g} at the end apart",
            )
        columns, seen = self.columns_in(source)
        rows, read = RowFilter(self.spec.validation), set(columns.used().values())
        learn_prompt = self.plan.data.train_on_prompt

        def segments_of(row: Row) -> list[Segment] | BadRow | Dropped:
            late = seen.surprise(row.values) if self.spec.streaming and not seen.whole else ""
            if late and late not in read:  # one that the manifest names may come late
                return BadRow(row.file, row.line, LATE_COLUMN.format(late, seen.rows))
            example = example_of(row, columns)
            if isinstance(example, BadRow | Dropped):
                return example
            reason = rows.reason(example)
            if reason:
                return Dropped(reason)
            try:
                return template.segments(example, learn_prompt=learn_prompt)
            except TemplateError as error:
                return BadRow(row.file, row.line, str(error))

        apart = f", {self.spec.validation_split:g} at the end apart"
        return segments_of, str(columns) + (apart if self.holds_out_the_end(source) else "")

    def columns_in(self, source: Source) -> tuple[Columns, ColumnSurvey]:
        """The columns of a source, and what was seen of them: in all of its rows, or in the first
        window of a stream."""
        from expert.data.examples.columns import columns_of
        from expert.data.examples.remembered import remembered_survey
        from expert.data.feed.streaming import WINDOW_ROWS
        from expert.data.read.sources import first_row

        if source not in self._columns:
            streamed = self.spec.streaming and source is self.sources.train
            most = WINDOW_ROWS if streamed else self.most_rows
            seen = remembered_survey(source, self.beside, most, keep=self._keeps)
            if not seen.rows:
                first_row(source)  # raises, with the reason
            self._columns[source] = columns_of(seen, self.spec), seen
        return self._columns[source]

    def doubts_about_columns(self) -> list[Doubt]:
        """Columns of the training rows that promise a part of what is said and are not read."""
        found = []
        for source in self._text_sources():
            columns, seen = self.columns_in(source)
            told = columns.worth_a_warning(seen)
            if told:
                found.append(Doubt("training.dataset.field_mapping", f"{source.name}: {told}"))
        return found

    def columns_read(self) -> tuple[str, ...]:
        """For each source of training rows: which columns are read, and which are not."""
        read = ((source, *self.columns_in(source)) for source in self._text_sources())
        return tuple(f"{source.name}: {columns.told(seen)}" for source, columns, seen in read)

    def _text_sources(self) -> list[Source]:
        """Sources of training rows with columns: neither one text of characters nor tokens."""
        if self.template is None:
            return []
        return [each for each in self._sources_of("train") if each not in self.chosen.tokens]

    def _sources_of(self, name: str) -> list[Source]:
        """Where the rows of a split come from: a source for each task, or the only one."""
        of_tasks = [getattr(task, name) for task in self.sources.tasks]
        found = of_tasks or [getattr(self.sources, name)]
        return [source for source in found if source is not None]

    def _given(self, name: str) -> PreparedSplit | None:
        """A split that has files of its own."""
        import numpy as np

        found = self._sources_of(name)
        if not found:
            return None
        tokens = tuple(self._tokenise(source, name) for source in found)
        count = sum(prepared.statistics.documents for prepared in tokens)
        return self._pack(name, tokens, np.arange(count))

    def _pack(
        self,
        name: str,
        tokens: tuple[Prepared, ...],
        documents: npt.NDArray[np.integer[Any]],
        *,
        drawn_beside: PreparedSplit | None = None,
    ) -> PreparedSplit:
        from dataclasses import replace

        import numpy as np

        from expert.data.pack.pack_index import PackIndex
        from expert.data.tokens.documents import DocumentStore

        data, seed = self.plan.data, self.plan.optim.seed
        # Only the lengths are kept while packing: this is where preparing takes most memory a row.
        store = DocumentStore(*(prepared.folder for prepared in tokens))
        rows = self._rows_to_pack(store, documents)
        del store
        packing = self._packing(name, rows)
        named = IndexName(
            split=name,
            tokens=tuple(prepared.key for prepared in tokens),
            documents=hashlib.sha256(np.ascontiguousarray(documents).data).hexdigest(),
            packing=data.packing,
            length=packing.length,
            overlong=data.overlong,
            soft_tokens=soft_tokens(self.plan),
            seed=seed,
            most_rows=packing.most_rows,
            leaves_out=bool(len(rows.unlearnt)),
        )
        file = self._index_file(named)
        hit = file.is_file()
        if not hit:
            made = self._index(name, rows, seed, packing)
            del rows
            made = replace(made, piece_document=documents[made.piece_document].astype("int32"))
            made.save(file)
        index = PackIndex.open(file)
        split = PreparedSplit(name, tokens, index, file, hit, len(documents))
        return not_empty(self.plan, split, drawn_beside)

    def _index_file(self, named: IndexName) -> Path:
        """Where the index is or goes to; that of the run which asks for it, where an earlier
        version packed the same rows for it: the order of a run never changes."""
        if named.split == "train" and self.own_indexes and named.file not in self.own_indexes:
            before = named.before(
                self.own_indexes,
                longest=self.plan.data.max_seq_length,
                most=2 * self.plan.batch.examples_per_update,
            )
            self.packed_before = before is not None
            if before is not None and (self.beside / before).is_file():
                return self.beside / before
        return self.beside / named.file

    def _index(self, name: str, rows: RowsToPack, seed: int, packing: Packing) -> PackIndex:
        return packed(self.plan, name, rows, seed, packing, is_text=self.template is not None)

    def _packing(self, name: str, rows: RowsToPack) -> Packing:
        return packing_for(
            self.plan,
            name,
            rows,
            is_text=self.template is not None,
            streaming=self.spec.streaming,
        )


def refuse_links_of_cache(cache: Path, folder: Path, *, explicit: bool) -> None:
    """Raise where the cache of an expert's folder, which may come from somebody else, is a link or
    holds one. Beside a cache that was named lies what is not Expert's."""
    elsewhere = "tokens go to another disk with training.config.pretokenized_cache: FOLDER"
    refuse_links(cache, below=folder, instead=elsewhere)
    if not explicit:
        refuse_links_inside(cache, instead=elsewhere)


def _only(source: Source | None) -> Source:
    assert source is not None, "a data set without tasks has a training source"
    return source
