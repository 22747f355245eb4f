"""The probabilities of answers' tokens in a run that learns from them."""

from __future__ import annotations

from functools import partial
from typing import Any

from expert.answer.engine import answer_row
from expert.run.session import groups
from expert.training.objectives.rewarded import RewardedAnswers


def drawn_and_learnt(monkeypatch: Any) -> tuple[list[float], list[float]]:
    """Two lists that fill while a run learns from its answers: the log-probability of every token
    when it was drawn, and in the step that learns from it."""
    drawn, learnt, waiting = list[float](), list[float](), list[Any]()
    answers, laid_out = groups.Sampler.answers, groups.laid_out
    loss_sum = RewardedAnswers.loss_sum
    monkeypatch.setattr(groups, "answer_row", partial(answer_row, logprobs=0))

    def answering(self: Any, *given: Any, **more: Any) -> Any:
        rows = answers(self, *given, **more)
        waiting[:] = rows
        return rows

    def laying(own: Any, count: int, places: int) -> Any:
        rows, mixed = iter(list(waiting)), []
        waiting.clear()
        for _, rewarded in own:
            group = [next(rows) for _ in rewarded]
            mixed += group if len({reward for _, reward in rewarded}) > 1 else []
        waiting[:] = mixed
        return laid_out(own, count, places)

    def losing(self: Any, model: Any, batch: Any) -> Any:
        if batch.reference is not None:
            logps = iter(model.target_logps(batch).detach().tolist())
            for _ in range(int((batch.reference != 0).sum())):
                row = waiting.pop(0)
                found = [next(logps) for _ in row.writer.ids]
                own = [share for _, share, _ in row.scored]  # the end token has none
                drawn.extend(own)
                learnt.extend(found[: len(own)])
        return loss_sum(self, model, batch)

    monkeypatch.setattr(groups.Sampler, "answers", answering)
    monkeypatch.setattr(groups, "laid_out", laying)
    monkeypatch.setattr(RewardedAnswers, "loss_sum", losing)
    return drawn, learnt
