"""Attention within documents: our kernels beside torch's varlen_attn, in microseconds of a call.

    python benchmarks/document_attention.py --out FILE [--tokens 16384]

Documents of one length fill the tokens; random bf16 values. Needs a CUDA card.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from surroundings import environment
from torch.nn.attention.varlen import varlen_attn

from expert.core.files import write_text_atomically
from expert.model.attention import _varlen_options
from expert.model.fused.document_attention import attend_in_documents, tiles_of

HEADS = ((16, 8, 128), (32, 8, 128), (24, 8, 96), (32, 8, 64))
"""Of queries, of keys, and their width."""
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 16384)


def microseconds(run: Callable[[], Any], times: int = 8) -> float:
    for _ in range(3):
        run()
    event: Any = torch.cuda.Event
    began, ended = (event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(times):
        run()
    ended.record()
    torch.cuda.synchronize()
    return float(1000 * began.elapsed_time(ended) / times)


def measured(heads: int, key_heads: int, width: int, length: int, tokens: int) -> dict[str, Any]:
    edges = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    parts: Any = [
        torch.randn(tokens, count, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, key_heads, key_heads)
    ]
    attend: Any = varlen_attn
    upstream, tiles = torch.randn_like(parts[0]), tiles_of(edges, tokens)
    ways: dict[str, Callable[[], Any]] = {
        "microseconds": lambda: attend_in_documents(parts[0], parts[1], parts[2], tiles, None),
        "torch_microseconds": lambda: attend(
            *parts, edges, edges, length, length, **_varlen_options(-1)
        ),
    }
    told: dict[str, Any] = {"heads": heads, "key_heads": key_heads, "width": width}
    told["document_tokens"] = length
    for name, run in ways.items():
        out = run()

        def backward(out: torch.Tensor = out) -> Any:
            return torch.autograd.grad(out, parts, upstream, retain_graph=True)

        told[name] = {"forward": microseconds(run), "backward": microseconds(backward)}
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    args = parser.parse_args()
    results = [
        measured(*heads, length, args.tokens)
        for heads in HEADS
        for length in LENGTHS
        if length <= args.tokens
    ]
    record = {"environment": environment(), "results": results}
    write_text_atomically(args.out, json.dumps(record, indent=1) + "\n")
    for each in results:
        print(each)


if __name__ == "__main__":
    main()
