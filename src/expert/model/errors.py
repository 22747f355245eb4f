"""Errors about base models and training on them."""

from __future__ import annotations

from expert.core.errors import ExpertError


class ModelError(ExpertError):
    """A model cannot be loaded or trained as requested: where, what, and what to do."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        self.where, self.what, self.fix = where, what, fix
        super().__init__(f"{where}: {what}  ({fix})")
