"""The code in a model card that loads an export and answers a question like `expert sample`.

It sets the dtype, the base's quantization, the prompt format of training and the decoding settings:
with the base in another dtype, 60 of 100 answers were right instead of 68. A test runs the code of
a card and compares its answer with that of the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from expert.answer.decoding import resolve_decoding, stop_texts
from expert.core.install import INSTALL_HINT
from expert.jobs.sample.sample import prompt_text
from expert.manifest.schema.kinds import IN_FLOAT32
from expert.manifest.schema.manifest import CHAR_GPT

if TYPE_CHECKING:
    from expert.jobs.export.exported import Exported
    from expert.jobs.export.portable_base import PortableBase
    from expert.planning.run_plan import RunPlan
    from expert.run.stored.load import Trained

FOLDER = "PATH/TO/THIS/FOLDER"
QUESTION = "{question}"
_DTYPES = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}
# `expert sample` uses float32 on a CPU, too.
_HALF = 'torch.float16 if device == "cuda" else torch.float32'
_QUANTISED = {
    "int4": 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, '
    "bnb_4bit_compute_dtype=dtype",
    "int8": "load_in_8bit=True, llm_int8_threshold=0.0",
}


class PromptFormat(NamedTuple):
    """The prompt for a question, and where the answer ends."""

    text: str
    """The prompt, with `QUESTION` in place of the question."""
    plain: bool
    """The model continues text: answers are not stripped."""
    stops: tuple[str, ...] = ()
    """Texts that end an answer, besides the tokens in generation_config.json."""


def prompt_format_of(trained: Trained) -> PromptFormat | None:
    """The prompt that `expert sample` would use; None for the character model."""
    from expert.data.plain_text import FirstRow, trained_on_text
    from expert.data.tokens.encoder import TextEncoder

    template, encoder = trained.template, trained.encoder
    if template is None:
        return None
    assert isinstance(encoder, TextEncoder)
    first = FirstRow(trained.plan)
    plain = trained_on_text(trained.plan, first)
    stops = stop_texts(resolve_decoding(trained.plan, {})[0], encoder, template, plain=plain)
    text = prompt_text(template, QUESTION, plain=plain, tools="" if plain else first.tools)
    # The tokenizer's prefix (bos): the code calls it with add_special_tokens=False.
    before = encoder.decode(encoder.prefix) if encoder.prefix else ""
    return PromptFormat(before + text, plain, tuple(stops))


def loading_code(
    plan: RunPlan, done: Exported, base: PortableBase, prompt_format: PromptFormat | None
) -> str:
    """A Markdown block of Python that loads the export and answers a question."""
    if plan.model.name == CHAR_GPT or prompt_format is None:
        return _fenced(_characters())
    prompts = [prompt["name"] for prompt in plan.adapter.soft_prompts]
    dtype = plan.kernels.precision if done.kind == "adapter" else done.dtype
    adapter = done.kind == "adapter" and plan.adapter.type != "none"
    quantised = _QUANTISED.get(plan.model.quantization, "") if done.kind == "adapter" else ""
    names = ["AutoModelForCausalLM", "AutoTokenizer", "GenerationConfig"]
    names = sorted([*names, *(["BitsAndBytesConfig"] if quantised else [])])
    lines = ["import torch"]
    lines += base.imports if done.kind == "adapter" else ()
    lines += ["from peft import PeftModel"] if adapter else []
    lines += ["from safetensors.torch import load_file"] if prompts else []
    lines += [f"from transformers import {', '.join(names)}", ""]
    lines += [f'folder = "{FOLDER}"']
    lines += base.lines if done.kind == "adapter" else ()
    lines += ['device = "cuda" if torch.cuda.is_available() else "cpu"']
    verb = "trained" if done.kind == "adapter" else "exported"
    lines += [f"dtype = {_DTYPES.get(dtype, _HALF)}  # as it was {verb}: answers depend on it"]
    source = base.arguments if done.kind == "adapter" else "folder"
    lines += ["", *_model(plan, source, quantised=quantised, adapter=adapter), ""]
    lines += _question(prompt_format)
    lines += _answer(prompt_format, [_place(plan, name) for name in prompts])
    return _fenced(lines)


def _model(plan: RunPlan, source: str, *, quantised: str, adapter: bool) -> list[str]:
    call = f"model = AutoModelForCausalLM.from_pretrained({source}, dtype=dtype"
    lines = ["tokenizer = AutoTokenizer.from_pretrained(folder)"]
    if quantised:
        lines += [f"quantization = BitsAndBytesConfig({quantised})"]
        lines += [f"{call}, quantization_config=quantization, device_map=device)"]
    else:
        lines += [f"{call}).to(device)"]
    if adapter:
        own_dtype = ", autocast_adapter_dtype=False" if keeps_adapter_dtype(plan) else ""
        lines += [f"model = PeftModel.from_pretrained(model, folder{own_dtype})"]
    return [*lines, "model.eval()"]


def keeps_adapter_dtype(plan: RunPlan) -> bool:
    """Whether the adapter stays in bfloat16; by default PEFT converts it to float32, which is what
    was trained with a float16 base and with AdaLoRA."""
    return plan.kernels.precision == "bf16" and plan.adapter.type not in IN_FLOAT32


def _question(prompt_format: PromptFormat) -> list[str]:
    if prompt_format.text == QUESTION:
        lines = ['text = "The beginning of a text"']
    else:
        what = "The beginning of a text" if prompt_format.plain else "Your question"
        lines = [
            f"prompt = {_literal(prompt_format.text)}",
            f'question = "{what}"',
            f'text = prompt.replace("{QUESTION}", question)',
        ]
    return [
        *lines,
        'tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids',
        "tokens = tokens.to(device)",
    ]


def _place(plan: RunPlan, name: str) -> str:
    alone = plan.adapter.type == "none" and len(plan.adapter.soft_prompts) == 1
    below = "" if alone else f"/soft_prompts/{name}"
    return f"folder + {_literal(f'{below}/adapter_model.safetensors')}"


def _answer(prompt_format: PromptFormat, prompts: list[str]) -> list[str]:
    lines = ["settings = GenerationConfig.from_pretrained(folder)"]
    if prompts:
        lines += [
            "embedded = model.get_input_embeddings()(tokens)",
            f"files = [{', '.join(prompts)}]",
            'rows = torch.cat([load_file(file)["prompt_embeddings"] for file in files])',
            "inputs = torch.cat([rows[None].to(embedded), embedded], dim=1)",
            "mask = torch.ones(inputs.shape[:2], dtype=torch.long, device=device)",
            "output = model.generate(",
            "    inputs_embeds=inputs, attention_mask=mask, generation_config=settings",
            ")[0]",
        ]
    else:
        lines += [
            "output = model.generate(",
            "    input_ids=tokens, attention_mask=torch.ones_like(tokens), "
            "generation_config=settings",
            ")[0, tokens.shape[1] :]",
        ]
    if not prompt_format.stops:
        lines += ["answer = tokenizer.decode(output, skip_special_tokens=True)"]
    else:
        lines += [
            "output = [token for token in output.tolist() if token not in settings.eos_token_id]",
            "answer = tokenizer.decode(output)",
            f"for stop in [{', '.join(map(_literal, prompt_format.stops))}]:",
            "    answer = answer.partition(stop)[0]",
        ]
    return [*lines, "print(answer)" if prompt_format.plain else "print(answer.strip())"]


def _characters() -> list[str]:
    return [
        "from pathlib import Path",
        "",
        "import torch",
        f"from expert.model.chargpt import load_char_gpt  # {INSTALL_HINT.replace('`', '')}",
        "",
        f'model, characters = load_char_gpt(Path("{FOLDER}"))',
        "model.eval()",
        "text = characters[0]",
        "tokens = torch.tensor([[characters.index(letter) for letter in text]])",
        "seed = torch.Generator().manual_seed(0)",
        "output = model.generate(tokens, 200, 0.8, None, seed)  # length, temperature, top k",
        'print("".join(characters[number] for number in output[0].tolist()))',
    ]


def _literal(text: str) -> str:
    """A Python string literal without backticks, which could end the Markdown block."""
    return repr(text).replace("`", "\\x60")


def _fenced(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```", ""])
