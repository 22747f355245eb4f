"""The job behind `expert sample` without a prompt: an expert is loaded once and asked again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.data.records import Turn
    from expert.jobs.sample.answer_writer import Tell
    from expert.jobs.sample.sample import Ready, Sample


class Conversation:
    """What was said so far; a text that is continued as it stands has nothing before it."""

    def __init__(self, loaded: Ready, *, system: str = "") -> None:
        self._loaded = loaded
        self._system = system
        self._turns: list[Turn] = []
        self.anew()

    @property
    def remembers(self) -> bool:
        """Whether an answer depends on what was said before."""
        return not self._loaded.plain and self._loaded.trained.template is not None

    def anew(self) -> None:
        """Forget what was said."""
        from expert.data.records import Turn

        self._turns = [Turn("system", self._system)] if self._system else []

    def ask(
        self,
        prompt: str,
        *,
        begin: Callable[[str, bool], None] = lambda prompt, plain: None,
        tell: Tell = lambda piece: None,
    ) -> Sample:
        """The answer to a prompt after all that was said; one that fails was not said."""
        from expert.data.records import Turn
        from expert.jobs.sample.sample import Work, answer, generate

        loaded = self._loaded
        work = Work(seed=loaded.seed, plain=loaded.plain, begin=begin, tell=tell)
        template = loaded.trained.template
        if loaded.plain or template is None:
            return answer(loaded.trained, prompt, loaded.decoding, work)
        asked = [*self._turns, Turn("user", prompt)]
        text = template.prompt(asked, loaded.tools)
        said = generate(loaded.trained, prompt, text, loaded.decoding, work)
        self._turns = [*asked, Turn("assistant", said.text)]
        return said
