"""Parity on a real model and real rows: it holds, and every planted difference is seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from expert.jobs.diagnose import parity as parity_numbers
from expert.jobs.diagnose.parity import CannotCompare, Parity, parity
from expert.manifest.reader import read_manifest
from expert.model import attention
from expert.model.load import LoadedModel
from expert.run.open import plan
from tests.jobs.runs import write_expert

LEAK = "packed = unpacked", "documents are isolated"


def compared(folder: Path, base: Path, config: dict[str, Any] | None = None) -> Parity:
    manifest = write_expert(folder, base, {"micro_batch_size": 2, **(config or {})})
    return parity(read_manifest(manifest))


def states(found: Parity) -> dict[str, str]:
    return {each.claim.partition(" (")[0]: each.state for each in found.compared}


def test_a_packed_plan_holds_every_claim(tmp_path, base):
    found = compared(tmp_path, base, {"fused_blocks": True})
    assert states(found) == {
        "accumulated = whole": "equal",
        "packed = unpacked": "equal",
        "documents are isolated": "equal",
        "sdpa attention = eager attention": "equal",
        "compiled = eager": "left out",
        "fused loss = plain loss": "equal",
        "fused blocks = plain blocks": "equal",
        "resumed = uninterrupted": "equal",
    }
    assert found.exit_code == 0
    for each in found.compared:
        assert each.because
    # Not by comparing nothing: the trained weights have gradients, and rounding shows somewhere.
    assert any((each.gradient or 0) > 0 for each in found.compared)


def test_a_padded_plan_is_compared_with_each_row_alone(tmp_path, base):
    found = states(compared(tmp_path, base, {"packing": False}))
    assert found["padded = alone"] == "equal"
    assert found["documents are isolated"] == "left out"


def test_streamed_rows_are_refused(tmp_path, base):
    manifest = write_expert(tmp_path, base, {"max_steps": 2}, dataset={"streaming": True})
    with pytest.raises(CannotCompare, match="streamed rows cannot be read twice"):
        parity(read_manifest(manifest))


def test_documents_that_see_each_other_are_found(tmp_path, base, monkeypatch):
    def causal_only(positions: torch.Tensor) -> torch.Tensor:
        length = positions.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        return mask.expand(positions.shape[0], 1, length, length)

    monkeypatch.setattr(attention, "document_mask", causal_only)
    found = compared(tmp_path, base)
    assert {states(found)[claim] for claim in LEAK} == {"differs"}
    assert found.exit_code == 4


def off(monkeypatch: pytest.MonkeyPatch, *when: Callable[[LoadedModel, Any], bool]) -> None:
    """Make a loss a thousandth too large for each of the cases that it is of."""
    right = LoadedModel.loss_sum

    def loss_sum(self: LoadedModel, batch: Any) -> torch.Tensor:
        return right(self, batch) * 1.001 ** sum(case(self, batch) for case in when)

    monkeypatch.setattr(LoadedModel, "loss_sum", loss_sum)


def test_each_kernel_that_is_off_by_a_thousandth_and_a_lossy_checkpoint_are_found(
    tmp_path, base, monkeypatch
):
    from expert.training import checkpoint

    right = checkpoint.load_checkpoint

    def lossy(path: Path) -> Any:
        groups, saved = right(path)
        model = {name: value * (1 + 2**-20) for name, value in groups["model"].items()}
        return {**groups, "model": model}, saved

    monkeypatch.setattr(checkpoint, "load_checkpoint", lossy)
    off(
        monkeypatch,
        lambda model, batch: model.kernels.fused_loss,
        lambda model, batch: model.kernels.attention == "sdpa",
    )
    assert states(compared(tmp_path, base)) == {
        "accumulated = whole": "equal",
        "packed = unpacked": "equal",
        "documents are isolated": "equal",
        "sdpa attention = eager attention": "differs",
        "compiled = eager": "left out",
        "fused loss = plain loss": "differs",
        "fused blocks = plain blocks": "left out",
        "resumed = uninterrupted": "differs",
    }


def test_accumulation_that_is_off_by_a_thousandth_is_found(tmp_path, base, monkeypatch):
    off(monkeypatch, lambda model, batch: batch.tokens.shape[0] == 1)
    assert states(compared(tmp_path, base))["accumulated = whole"] == "differs"


@pytest.mark.slow  # compiles for a CPU: half a minute
@pytest.mark.filterwarnings("default")  # Dynamo hears what torch warns of itself
def test_compiled_equals_eager(tmp_path, base):
    assert states(compared(tmp_path, base, {"torch_compile": True}))["compiled = eager"] == "equal"


# --- numbers -------------------------------------------------------------------------------------


def test_relative_differences_are_of_all_gradients_together():
    right = [torch.tensor([3.0]), torch.tensor([4.0])]
    ours = [torch.tensor([3.0]), torch.tensor([4.5])]
    assert parity_numbers.relative(ours, right) == pytest.approx(0.1)
    assert parity_numbers.relative([torch.zeros(2)], [torch.zeros(2)]) == 0.0
    assert parity_numbers.relative([torch.ones(2)], [torch.zeros(2)]) == math.inf


def test_a_loss_that_is_small_already_may_be_off_by_as_much_as_a_larger_one():
    assert parity_numbers.off_by(220.0, 200.0, 100) == pytest.approx(0.1)
    assert parity_numbers.off_by(0.6, 0.5, 100) == pytest.approx(0.001)


def test_tolerances_grow_with_depth_and_with_coarser_numbers(tmp_path, base):
    settled = plan(write_expert(tmp_path, base, {}))
    shallow = parity_numbers.tolerance(settled, 1, 64, 100)
    deep = parity_numbers.tolerance(settled, 16, 64, 100)
    assert deep.gradient == pytest.approx(4 * shallow.gradient)
    bf16 = settled.with_values({"kernels.precision": "bf16"}, "a test", "machine")
    assert parity_numbers.tolerance(bf16, 1, 64, 100).gradient > 100 * shallow.gradient
    assert "2^-9" in parity_numbers.tolerance(bf16, 1, 64, 100).because


def test_a_spread_of_the_same_numbers_widens_a_tolerance_and_says_so():
    narrow = parity_numbers.Tolerance(loss=1e-6, gradient=1e-5, because="rounding")
    assert parity_numbers.widened(narrow, 1e-9, 1e-9) is narrow
    wide = parity_numbers.widened(narrow, 1e-6, 1e-4)
    assert (wide.loss, wide.gradient) == (pytest.approx(3e-6), pytest.approx(3e-4))
    assert "measured spread" in wide.because
