"""The process for one card of a validation: it loads models and answers its share.

It reads one JSON object per line: `{"ask": FILE, "to": FILE}`, the pickled name and arguments of a
request, and where the pickled result goes; both are in a folder that only this user can write to.
It writes `{"done": …}` now and then, `{"note": …}`, and at the end `{"result": FILE}`, or
`{"failed": …}` with a message for the user. All other output goes into its log.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.files import open_regular
from expert.core.rundir import RunFolder
from expert.jobs.validate.answering import GeneratedAnswer, answer_all
from expert.jobs.validate.models import load_state
from expert.jobs.validate.row_losses import BatchSums, batch_sums
from expert.run.stored.load import Trained, pick_device, read_plan

if TYPE_CHECKING:
    from expert.data.records import Example
    from expert.jobs.sample.decoding import DecodingSettings
    from expert.run.stored.choose_checkpoint import Choice


def main() -> None:
    """Handle the requests on standard input until it ends."""
    # A library's output on standard output would be taken for an answer.
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.Queue[dict[str, str]] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    server = _Server(said)
    while True:
        request = requests.get()
        try:
            with open_regular(Path(request["ask"])) as stream:
                do, asked = pickle.load(stream)
            found = getattr(server, do)(**asked)
            Path(request["to"]).write_bytes(pickle.dumps(found))
            server.say({"result": request["to"]})
        except ExpertError as error:
            server.say({"failed": str(error), "exit_code": error.exit_code})


def _listen(requests: queue.Queue[dict[str, str]]) -> None:
    """Runs in a thread: if the parent dies, this process ends in the middle of its work."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


class _Server:
    """One model at a time, and the requests it handles."""

    def __init__(self, said: IO[str]) -> None:
        self._output = said
        self._trained: Trained | None = None
        self._callbacks: dict[str, Any] = {
            "tell": lambda done, of: self.say({"done": done}),
            "note": lambda text: self.say({"note": text}),
        }

    def say(self, fact: Mapping[str, Any]) -> None:
        self._output.write(json.dumps(fact) + "\n")
        self._output.flush()

    def load(self, run: Path, choice: Choice | None, device: str) -> dict[str, Any]:
        """Load a state of a run, or its base if there is no choice; the device and tokenizer."""
        self._trained = None  # before the next one needs its memory
        gc.collect()
        folder, own = RunFolder(run), pick_device(device)
        plan = read_plan(folder)
        self._trained = load_state(folder, plan, choice, own)
        return {"device": str(own), "tokenizer": self._trained.tokenizer_folder}

    def losses(self, rows: Sequence[Example], place: int, of: int) -> list[BatchSums]:
        assert self._trained is not None
        return batch_sums(self._trained, rows, place=place, of=of, **self._callbacks)

    def answers(
        self,
        questions: Sequence[Example],
        numbers: Sequence[int],
        how: DecodingSettings,
        seed: int,
    ) -> list[GeneratedAnswer]:
        assert self._trained is not None
        if not numbers:
            return []
        return answer_all(
            self._trained, questions, how, seed=seed, numbers=numbers, **self._callbacks
        )


if __name__ == "__main__":
    main()
