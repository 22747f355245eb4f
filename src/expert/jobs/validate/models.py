"""Models of a validation, loaded in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from expert.jobs.validate.answering import GivenAnswer, answer_all
from expert.jobs.validate.row_losses import row_losses
from expert.run.stored.load import load_base, load_trained

if TYPE_CHECKING:
    import torch

    from expert.data.records import Example
    from expert.jobs.sample.decoding import DecodingSettings
    from expert.jobs.validate.held_out import Run
    from expert.run.stored.choose_checkpoint import Choice
    from expert.run.stored.load import Trained
    from expert.training.evaluation import EvalResult

Tell = Callable[[int, int], None]
Note = Callable[[str], None]


class ModelsHere:
    """Loads models; one at a time is in use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device = str(device)

    def trained(self, run: Run, choice: Choice) -> ModelHere:
        return ModelHere(load_trained(run.folder, run.plan, choice, device=self._device))

    def base(self, run: Run) -> ModelHere:
        return ModelHere(load_base(run.plan, device=self._device))


class ModelHere:
    """A state of a run, or its base, ready for questions."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self.name, self.step = trained.choice.name, trained.choice.step
        self.template = trained.template
        """None for the character model, which answers nothing."""

    def losses(self, rows: Sequence[Example], *, tell: Tell, note: Note) -> EvalResult:
        return row_losses(self._trained, rows, tell=tell, note=note)

    def answers(
        self,
        questions: Sequence[Example],
        how: DecodingSettings,
        seed: int,
        *,
        tell: Tell,
        note: Note,
    ) -> list[GivenAnswer]:
        """Its answers to every question, in order."""
        return answer_all(self._trained, questions, how, seed=seed, tell=tell, note=note)
