"""How the processes of a run share its work."""

from __future__ import annotations

from expert.planning.draft import PlanDraft


def settle_parallel(draft: PlanDraft) -> None:
    """One process on one device."""
    for key, value in (("engine", "single"), ("ranks", 1), ("nodes", 1)):
        draft.settle(f"parallel.{key}", value, "the default", "preset")
    draft.settle("parallel.link", None, "one process has nothing to send")
    draft.settle("parallel.offload", False, "the default", "preset")
