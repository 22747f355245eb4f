"""The process that has one card of a validation: it loads models and answers its share.

One JSON object a line in: what to do. Out: `{"done": …}` now and then, `{"note": …}`, and at the
end `{"result": FILE}`, or `{"failed": …}` with a message for the user. Everything else that is
written goes into its log.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.files import read_json
from expert.core.rundir import RunFolder
from expert.data.records import Example, Turn
from expert.jobs.sample.decoding import DecodingSettings
from expert.jobs.validate.answering import answer_all
from expert.jobs.validate.row_losses import batch_sums
from expert.run.stored.choose_checkpoint import Choice
from expert.run.stored.load import load_base, load_trained, pick_device, read_plan

if TYPE_CHECKING:
    from expert.run.stored.load import Trained


def main() -> None:
    """Do what is asked on standard input until it ends."""
    # What a library writes to standard output would be taken for an answer.
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    server = _Server(said)
    while True:
        request = requests.get()
        try:
            server.do(request)
        except ExpertError as error:
            server.say({"failed": str(error), "exit_code": error.exit_code})


def _listen(requests: queue.Queue[dict[str, Any]]) -> None:
    """In a thread: where the process that asks has died, this one ends in the middle of its
    work."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


class _Server:
    """One model at a time, and what is asked of it."""

    def __init__(self, said: IO[str]) -> None:
        self._said = said
        self._trained: Trained | None = None

    def say(self, fact: Mapping[str, Any]) -> None:
        self._said.write(json.dumps(fact) + "\n")
        self._said.flush()

    def do(self, request: dict[str, Any]) -> None:
        """Load a model, or ask the one that is loaded."""
        kind, to = request["do"], Path(request["to"])
        if kind == "load":
            found = self._load(request)
        else:
            ask = self._losses if kind == "losses" else self._answers
            found = ask(request, read_rows(Path(request["rows"])))
        to.write_text(json.dumps(found), encoding="utf-8")
        self.say({"result": str(to)})

    def _load(self, request: dict[str, Any]) -> Any:
        self._trained = None  # before the next one needs its place
        gc.collect()
        run, device = RunFolder(Path(request["run"])), pick_device(request["device"])
        plan, choice = read_plan(run), request["choice"]
        if choice is None:
            self._trained = load_base(plan, device=device)
        else:
            chosen = Choice(name=choice["name"], path=Path(choice["path"]), step=choice["step"])
            self._trained = load_trained(run, plan, chosen, device=device)
        tokens = self._trained.tokenizer_folder
        return {"device": str(device), "tokenizer": str(tokens) if tokens is not None else None}

    def _losses(self, request: dict[str, Any], rows: list[Example]) -> Any:
        assert self._trained is not None
        place, of = request["share"]
        return batch_sums(self._trained, rows, place=place, of=of, tell=self._tell, note=self._note)

    def _answers(self, request: dict[str, Any], rows: list[Example]) -> Any:
        assert self._trained is not None
        numbers = request["numbers"]
        if not numbers:
            return []
        how = dict(request["decoding"])
        how["stop_sequences"] = tuple(how["stop_sequences"])
        found = answer_all(
            self._trained,
            [rows[number] for number in numbers],
            DecodingSettings(**how),
            seed=request["seed"],
            numbers=numbers,
            tell=self._tell,
            note=self._note,
        )
        return [asdict(each) for each in found]

    def _tell(self, done: int, _of: int) -> None:
        self.say({"done": done})

    def _note(self, text: str) -> None:
        self.say({"note": text})


def write_rows(rows: list[Example], file: Path) -> None:
    """Rows for another process."""
    file.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


def read_rows(file: Path) -> list[Example]:
    """What `write_rows` wrote."""
    return [
        Example(
            turns=tuple(Turn(**turn) for turn in row["turns"]),
            text=row["text"],
            tools=row["tools"],
        )
        for row in read_json(file)
    ]


if __name__ == "__main__":
    main()
