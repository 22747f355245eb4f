"""The row checks of a manifest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from expert.core.install import pip_install
from expert.data.records import DataError, Example
from expert.manifest.schema.dataset import RowChecks


class RowFilter:
    """Why an example is left out, if it is. Remembers examples, to find duplicates."""

    def __init__(self, checks: RowChecks | None) -> None:
        self.checks = checks or RowChecks()
        self._seen: set[bytes] = set()

    def reason(self, example: Example) -> str:
        checks = self.checks
        said = (turn for turn in example.turns if turn.role == "assistant")
        answer = example.text or " ".join(turn.text or turn.extra for turn in said)
        if len(answer) < checks.min_length:
            return f"answer shorter than {checks.min_length} characters"
        if checks.max_length is not None and len(answer) > checks.max_length:
            return f"answer longer than {checks.max_length} characters"
        if checks.validate_json or checks.validate_schema:
            try:
                value = json.loads(answer)
            except (ValueError, RecursionError):
                return "answer is not JSON"
            if checks.validate_schema and not _is_schema(value):
                return "answer is not a JSON Schema"
        if checks.deduplicate:
            turns = (f"{turn.role}\0{turn.text}{turn.extra}{turn.learn}" for turn in example.turns)
            whole = "\0".join([example.text, example.tools, *turns])
            digest = hashlib.blake2b(whole.encode("utf-8"), digest_size=16).digest()
            if digest in self._seen:
                return "occurred before"
            self._seen.add(digest)
        return ""


def _is_schema(value: Any) -> bool:
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
    except ImportError:
        what = "training.dataset.validation.validate_schema needs the package 'jsonschema'"
        raise DataError(f"{what}  ({pip_install('validate')})") from None
    try:
        if isinstance(value, dict):
            validator_for(value).check_schema(value)
    except (SchemaError, RecursionError):
        return False
    return isinstance(value, dict)
