"""Rows to batches; where the files of these tests are."""

from pathlib import Path

FILES = Path(__file__).parent / "files"
SHARED = Path(__file__).parents[3] / "shared" / "data"
"""The real data sets beside the checkout; tests that need them skip where they are not."""
