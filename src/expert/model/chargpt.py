"""The built-in character model: a small GPT like nanoGPT, trained from scratch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from expert.core.files import read_json, write_text_atomically
from expert.manifest.schema.manifest import CHAR_GPT, CharGptShape
from expert.model.errors import ModelError

CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "vocabulary.json"
_INIT_STD = 0.02


class Block(nn.Module):
    def __init__(self, size: CharGptShape) -> None:
        super().__init__()
        width = size.width
        self.heads, self.dropout = size.heads, size.dropout
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = hidden + self._drop(self._attention(self.attention_norm(hidden), mask))
        inner = F.gelu(self.mlp_in(self.mlp_norm(hidden)))
        return hidden + self._drop(self.mlp_out(inner))

    def _attention(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        rows, length, width = hidden.shape
        split = (rows, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(hidden).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))
        return out

    def _drop(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden


class CharGpt(nn.Module):
    """Learned positions, no biases, head tied to the embedding. The initial weights depend on the
    seed alone, not on the device."""

    def __init__(
        self,
        size: CharGptShape,
        vocabulary: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.size, self.vocabulary = size, vocabulary
        with torch.device("meta"):
            self.embedding = nn.Embedding(vocabulary, size.width)
            self.positions = nn.Embedding(size.block_size, size.width)
            self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
            self.norm = nn.LayerNorm(size.width, bias=False)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        # Every block adds to the residual stream twice; this keeps the variance of the sum
        # independent of the depth.
        residual_std = _INIT_STD / math.sqrt(2 * self.size.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                std = residual_std if name.endswith("_out.weight") else _INIT_STD
                nn.init.normal_(parameter, std=std, generator=generator)
        self.to(device)

    def hidden(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """[rows, length, width] after the final norm. Without a mask every row is one document; a
        mask (True: visible) is [rows, 1, length, length] or broadcasts to it."""
        length, block_size = tokens.shape[1], self.size.block_size
        if mask is None and length > block_size:
            what = f"a row of {length} characters is longer than block_size {block_size}"
            raise ModelError(CHAR_GPT, what, "raise architecture.block_size or cut the rows")
        if positions is None:
            positions = torch.arange(length, device=tokens.device)[None]
        hidden = self.embedding(tokens) + self.positions(positions)
        if self.size.dropout:
            hidden = F.dropout(hidden, self.size.dropout, self.training)
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16:
            # Embeddings are float32, and so would be every sum they are part of: 31.8 instead of
            # 29.0 ms per step of 512 blocks on an H200.
            hidden = hidden.to(torch.bfloat16)
        for block in self.blocks:
            hidden = block(hidden, mask)
        out: Tensor = self.norm(hidden)
        return out

    def compile_hidden(self, mode: str, backend: str) -> None:
        """Compile all blocks as one graph: they are so small that launching six compiled ones takes
        longer than running them (19 ms per step of 128 blocks on an H200; 16 ms uncompiled)."""
        self.hidden = torch.compile(  # type: ignore[method-assign]
            self.hidden, dynamic=False, mode=mode, backend=backend
        )

    def head(self) -> Tensor:
        """[vocabulary, width]: the token embedding."""
        return self.embedding.weight

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Logits of the next character at every position."""
        return F.linear(self.hidden(tokens, positions, mask), self.head())

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`tokens` with `max_new_tokens` more characters in each row; temperature 0 takes the most
        likely. The context is the last block_size characters."""
        was_training = self.training
        self.eval()
        for _ in range(max_new_tokens):
            seen = tokens[:, -self.size.block_size :]
            logits = F.linear(self.hidden(seen)[:, -1], self.head()).float()
            chosen = sampled(logits, temperature, top_k, generator)
            tokens = torch.cat([tokens, chosen.to(tokens.dtype)], dim=1)
        self.train(was_training)
        return tokens


def sampled(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Draw [rows, 1] tokens from logits [rows, vocabulary]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


def save_char_gpt(
    model: CharGpt, folder: Path, characters: str | None, weights: dict[str, Tensor] | None = None
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights if weights is not None else dict(model.named_parameters())
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    config = {"model_type": CHAR_GPT, **model.size.model_dump(), "vocabulary": model.vocabulary}
    write_text_atomically(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    if characters is not None:
        known = {"type": "characters", "characters": characters}
        write_text_atomically(folder / VOCABULARY, json.dumps(known) + "\n")


def load_char_gpt(folder: Path, device: torch.device | str = "cpu") -> tuple[CharGpt, str | None]:
    """The model of a folder, and its characters if they were saved."""
    try:
        config = read_json(folder / CONFIG)
        size = {name: config[name] for name in CharGptShape.model_fields}
        model = CharGpt(CharGptShape(**size), int(config["vocabulary"]))
        model.load_state_dict(load_file(folder / WEIGHTS))
        file = folder / VOCABULARY
        characters = str(read_json(file)["characters"]) if file.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        what = f"no readable character model: {error}"
        raise ModelError(str(folder), what, "save it again, or train it again") from error
    return model.to(device), characters
