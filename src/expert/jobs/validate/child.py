"""The process for one card of a validation: it loads models and answers its share.

It reads one JSON object per line: `{"ask": FILE, "to": FILE}`, the pickled name and arguments of a
request, and where the pickled result goes; both are in a folder that only this user can write to.
It writes `{"done": …}` now and then, `{"note": …}`, and at the end `{"result": FILE}`, or
`{"failed": …}` with a message for the user. All other output goes into its log.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import open_regular
from expert.jobs.validate.models import ModelWorker


def main() -> None:
    """Handle the requests on standard input until it ends."""
    # A library's output on standard output would be taken for an answer.
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.Queue[dict[str, str]] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()

    def say(fact: Mapping[str, Any]) -> None:
        said.write(json.dumps(fact) + "\n")
        said.flush()

    worker = ModelWorker()
    while True:
        request = requests.get()
        try:
            with open_regular(Path(request["ask"])) as stream:
                do, asked = pickle.load(stream)
            if do != "load":
                asked["tell"] = lambda done, of: say({"done": done})
                asked["note"] = lambda text: say({"note": text})
            found = getattr(worker, do)(**asked)
            Path(request["to"]).write_bytes(pickle.dumps(found))
            say({"result": request["to"]})
        except ExpertError as error:
            say({"failed": str(error), "exit_code": error.exit_code})


def _listen(requests: queue.Queue[dict[str, str]]) -> None:
    """Runs in a thread: if the parent dies, this process ends in the middle of its work."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
