"""Builds a trainable model from the plan: weights, adapter and loss."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from expert.core.resources import resource_shortage
from expert.manifest.schema.kinds import ADAPTERS, IN_FLOAT32, QUANTISED
from expert.manifest.schema.manifest import CHAR_GPT, CharGptShape
from expert.model.adapters import AdaLoraRanks, add_adapter, saved_weights
from expert.model.attention import (
    IMPLEMENTATIONS,
    attention_kwargs,
    document_mask,
    register_attention,
)
from expert.model.base_folder import (
    MXFP4,
    first_line,
    inside_of,
    model_folder,
    needs_remote_code,
    quantised_by,
    read_config,
    text_encoder,
)
from expert.model.blocks import find_blocks
from expert.model.chargpt import CharGpt, load_char_gpt
from expert.model.errors import ModelError
from expert.model.inputs import BranchedInput, ModelInput, documents_of
from expert.model.loss import evaluated, kernel_for, summed_loss, target_losses
from expert.model.quantised import (
    prepare_quantised_layers,
    quantization_config,
    quiet_bitsandbytes,
    to_float8,
    to_plain_tensors,
)
from expert.model.recurrent import keep_documents_apart, recurrent_kind
from expert.model.soft_prompts import SoftPrompts, make_soft_prompts
from expert.planning.run_plan import AdapterPlan, KernelPlan, ModelPlan

ShardModel = Callable[[nn.Module, Sequence[nn.Module], set[nn.Parameter]], None]
"""Shards the weights of a model over ranks, block by block, except for some parameters."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to train, with every tensor on the run's device."""

    plan: ModelPlan
    adapter: AdapterPlan
    kernels: KernelPlan
    folder: Path | None
    """The base model's folder; None for a model built from scratch."""
    module: nn.Module
    decoder: nn.Module
    """Computes hidden states: the model without its head."""
    soft_prompts: SoftPrompts | None
    trainable: list[tuple[str, nn.Parameter]]
    """All trainable parameters in the model's order, by stable names."""
    weights: dict[str, Tensor]
    """The weights to save, by the module's names when it was loaded."""
    blocks: list[nn.Module]
    characters: str | None = None
    ranks: AdaLoraRanks | None = None
    is_sharded: bool = False
    """Weights are sharded over ranks and gathered only while the model computes."""

    def hidden(self, batch: ModelInput) -> Tensor:
        """[positions, width]: the input of the head at every position of the batch."""
        if isinstance(self.module, CharGpt):
            mask = None if batch.whole_rows else document_mask(batch.positions)
            return self.module.hidden(batch.tokens, batch.positions, mask).flatten(0, 1)
        inputs: dict[str, Any] = {"input_ids": batch.tokens}
        if self.soft_prompts is not None and batch.soft_mask is not None:
            embedding = self.decoder.get_input_embeddings()  # type: ignore[operator]
            inputs = {
                "inputs_embeds": self.soft_prompts.embed(
                    embedding, batch.tokens, batch.positions, batch.soft_mask
                )
            }
        if recurrent_kind(self.causal_lm.config):
            if getattr(batch, "branch", None) is not None:  # the plan did not know the model yet
                what = "its layers carry a state, and answers to one prompt would see each other"
                raise ModelError("training.config.method", what, "use method: sft")
            inputs["seq_idx"] = documents_of(batch.positions)
        output = self.decoder(
            **inputs,
            position_ids=batch.positions,
            use_cache=False,
            **attention_kwargs(self.kernels.attention, batch),
        )
        states: Tensor = output.last_hidden_state.flatten(0, 1)
        return states

    def head(self) -> Tensor:
        """[vocabulary, width]"""
        return self.module.head() if isinstance(self.module, CharGpt) else self._head.weight

    def spread(self, over_ranks: ShardModel, device: torch.device) -> LoadedModel:
        """The same model with its base (or all of it, if all is trained) sharded over ranks;
        adapters and soft prompts stay whole. Its weights are gathered only during calls."""
        to_plain_tensors(self.module, device)
        trains_all = self.adapter.type == "full"
        whole = set() if trains_all else {parameter for _, parameter in self.trainable}
        self.module.forward = lambda compute: compute()
        over_ranks(self.module, self.blocks, whole)
        return replace(
            self,
            trainable=_trainable(self.module, self.soft_prompts),
            weights=saved_weights(self.module, self.adapter),
            is_sharded=True,
        )

    def _computed(self, compute: Callable[[], Any]) -> Any:
        """Run `compute` with the weights gathered if they are sharded."""
        return self.module(compute) if self.is_sharded else compute()

    def loss_sum(self, batch: ModelInput) -> Tensor:
        """The loss summed over the targets of the batch, float32; AdaLoRA's penalty contributes to
        the gradient but not to the value."""
        loss: Tensor = self._computed(
            lambda: summed_loss(
                *self._loss_inputs(batch),
                fused=self.kernels.fused_loss,
                chunk=self.kernels.loss_chunk,
                kernel=kernel_for(batch.tokens.device),
                **self._head_options(),
            )
        )
        if self.ranks is not None and torch.is_grad_enabled():
            penalty = self.ranks.penalty() * batch.targets
            loss = loss + (penalty - penalty.detach())
        return loss

    def answer_logps(self, batch: BranchedInput) -> tuple[Tensor, Tensor]:
        """For every answer of a batch of documents that branch: the sum of the log-probabilities of
        its tokens (float32), and how many these are. 0 and 0 for answers that are not there."""
        logps = self.target_logps(batch)
        # Answers follow each other, so each is a segment: summed in order, and without atomics.
        numbers = torch.arange(len(batch.reference) + 1, device=logps.device, dtype=torch.int32)
        edges = torch.searchsorted(batch.answers[: len(logps)], numbers)
        sums = torch.segment_reduce(logps, "sum", offsets=edges, initial=0, unsafe=True)
        return sums, edges.diff()

    def target_logps(self, batch: ModelInput) -> Tensor:
        """The log-probability of every target of the batch, in order, float32."""
        losses: Tensor = self._computed(
            lambda: target_losses(
                *self._loss_inputs(batch),
                chunk=self.kernels.loss_chunk,
                kernel=kernel_for(batch.tokens.device),
                **self._head_options(),
            )
        )
        return -losses

    @torch.no_grad()
    def evaluate(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """(loss summed over the targets, number of correct targets), without dropout."""
        with self.answering():
            result: tuple[Tensor, Tensor] = self._computed(
                lambda: evaluated(
                    *self._loss_inputs(batch),
                    chunk=self.kernels.loss_chunk,
                    **self._head_options(),
                )
            )
            return result

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Compute as an expert that answers does: without dropout."""
        was_training = self.module.training
        self.module.train(False)
        try:
            yield
        finally:
            self.module.train(was_training)

    def _loss_inputs(self, batch: ModelInput) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """What a loss is computed from, first of all the hidden states."""
        return self.hidden(batch), self.head(), batch.labels, batch.target_places, batch.targets

    def after_step(self, step: int) -> None:
        """Call after step `step`, counted from 1, before gradients are cleared."""
        if self.ranks is not None:
            self.ranks.after_step(step)

    @property
    def causal_lm(self) -> Any:
        """The transformers model, without the adapter's wrapper."""
        module: Any = self.module
        return module.get_base_model() if self.adapter.type in ADAPTERS else module

    @property
    def _head(self) -> Any:
        return self.causal_lm.get_output_embeddings()

    def _head_options(self) -> dict[str, Any]:
        if isinstance(self.module, CharGpt):
            return {}
        config = self.causal_lm.config
        scale = getattr(config, "logit_scale", None) or 1.0
        return {
            "bias": getattr(self._head, "bias", None),
            "softcap": getattr(config, "final_logit_softcapping", None),
            "scale": scale / (getattr(config, "logits_scaling", None) or 1.0),
        }


def load_model(
    model: ModelPlan,
    adapter: AdapterPlan,
    kernels: KernelPlan,
    *,
    vocabulary: int | str | None,
    device: torch.device | str,
    seed: int,
    total_steps: int | None = None,
    adapter_dtype: torch.dtype | None = None,
    allow_remote_code: bool = False,
) -> LoadedModel:
    """Load the plan's model on `device`; what the plan trains requires gradients.

    `vocabulary`: for the character model, the characters of the corpus or their number.
    `adapter_dtype`: of adapters and soft prompts; None: that of the base.
    """
    quiet_bitsandbytes()
    # A page of C++ frames where a CPU has no bfloat16 matrix products; torch uses another library.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
    folder = model_folder(model, allow_remote_code=allow_remote_code)
    if folder is None or read_config(folder).get("model_type") == CHAR_GPT:
        return _load_char_gpt(model, adapter, kernels, folder, vocabulary, device, seed)
    dtype = DTYPES[kernels.precision] if adapter.type != "full" else torch.float32
    base = _load_base(model, kernels, folder, dtype, device, allow_remote_code)
    blocks, decoder = find_blocks(base), base.get_decoder()
    own_dtype = torch.float32 if adapter.type in IN_FLOAT32 else adapter_dtype or dtype
    if adapter.type == "full" and model.quantization in QUANTISED:
        what = f"{model.quantization} base weights cannot be trained themselves"
        raise ModelError("training.config.adapter_type", what, "use lora, or quantization: none")
    module = add_adapter(
        base,
        adapter,
        quantization=model.quantization,
        dtype=own_dtype,
        total_steps=total_steps,
        seed=seed,
    )
    texts = any(prompt.get("init_method") == "text" for prompt in adapter.soft_prompts)
    prompts = make_soft_prompts(
        adapter.soft_prompts,
        base.get_input_embeddings(),
        seed=seed,
        dtype=own_dtype,
        encode=text_encoder(folder) if texts else None,
    )
    module.train()
    return LoadedModel(
        plan=model,
        adapter=adapter,
        kernels=kernels,
        folder=folder,
        module=module,
        decoder=decoder,
        soft_prompts=prompts,
        trainable=_trainable(module, prompts),
        weights=saved_weights(module, adapter),
        blocks=list(blocks),
        ranks=AdaLoraRanks(module) if adapter.type == "adalora" else None,
    )


def check_vocabulary(loaded: LoadedModel, largest_id: int | None) -> None:
    """Raise if the data has a token without an embedding row, which on a GPU would end in an
    anonymous assertion; None: the largest id is unknown."""
    if isinstance(loaded.module, CharGpt):
        rows = loaded.module.head().shape[0]
    else:
        rows = loaded.causal_lm.get_input_embeddings().weight.shape[0]
    if largest_id is not None and largest_id >= rows:
        what = f"the data has token {largest_id}, and the embedding ends at {rows - 1}"
        fix = "the tokenizer has more tokens than the model: use the model's own tokenizer"
        raise ModelError(str(loaded.folder or loaded.plan.name), what, fix)


def _load_char_gpt(
    model: ModelPlan,
    adapter: AdapterPlan,
    kernels: KernelPlan,
    folder: Path | None,
    vocabulary: int | str | None,
    device: torch.device | str,
    seed: int,
) -> LoadedModel:
    if adapter.type != "full" or adapter.soft_prompts:
        what = "the character model trains all weights, without adapter or soft prompts"
        raise ModelError("training.config.adapter_type", what, "write adapter_type: full")
    characters = vocabulary if isinstance(vocabulary, str) else None
    if folder is not None:
        module, characters = load_char_gpt(folder, device)
    elif vocabulary is None:
        raise ValueError("the character model needs the number of characters")
    else:
        count = len(vocabulary) if isinstance(vocabulary, str) else vocabulary
        shape = CharGptShape(**(model.architecture or {}))
        module = CharGpt(shape, count, seed=seed, device=device)
    module.train()
    return LoadedModel(
        plan=model,
        adapter=adapter,
        kernels=kernels,
        folder=folder,
        module=module,
        decoder=module,
        soft_prompts=None,
        trainable=list(module.named_parameters()),
        weights=dict(module.named_parameters()),
        blocks=list(module.blocks),
        characters=characters,
    )


def _trainable(module: nn.Module, prompts: SoftPrompts | None) -> list[tuple[str, nn.Parameter]]:
    own = [
        # Without the adapter's name, like tensors in PEFT's files.
        (name.replace(".default", ""), parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    if prompts is None:
        return own
    named = zip(prompts.names, prompts.prompts, strict=True)
    return own + [(f"soft_prompts.{name}", parameter) for name, parameter in named]


def _load_base(
    model: ModelPlan,
    kernels: KernelPlan,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    allow_remote_code: bool,
) -> Any:
    """The transformers model, with every weight read directly to the device."""
    transformers: Any = importlib.import_module("transformers")
    register_attention()
    remote_code = needs_remote_code(model, folder, allowed=allow_remote_code)
    quantization = quantization_config(model.quantization, dtype)
    if packed := quantised_by(read_config(folder)) == MXFP4:  # experts of gpt-oss, in 4 bits
        if quantization is not None:
            what = f"its experts are stored in {MXFP4}, and trained in 16 bits"
            raise ModelError(str(folder), what, "use quantization: none")
        quantization = transformers.Mxfp4Config(dequantize=True)
    reading: dict[str, Any] = {"trust_remote_code": remote_code, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **reading)
        if inside_of(folder):
            config = config.get_text_config()
            # Of the whole and its part, either config may leave it out.
            names = (name for file in folder.glob("*.safetensors") for name in _names_in(file))
            config.tie_word_embeddings = not any(name.endswith("lm_head.weight") for name in names)
            reading["key_mapping"] = OUT_OF_WHOLE
        _refuse_other_mixing(config, folder)
        without_own_kernels(config)
        config.use_cache = False
        with without_progress_bar(), _without_list_of(inside_of(folder)):
            base, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                device_map={"": "cpu" if model.quantization == "fp8" else str(device)},
                attn_implementation=IMPLEMENTATIONS[kernels.attention],
                quantization_config=quantization,
                use_safetensors=True,
                output_loading_info=True,
                **reading,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError) or resource_shortage(error):
            raise
        what = f"it could not be loaded: {first_line(error)}"
        fix = "check that the folder is complete and that transformers knows its model_type"
        raise ModelError(str(folder), what, fix) from error
    missing = sorted(info["missing_keys"])
    if inside_of(folder) or packed:
        base._weight_conversions = []  # saved under its own names: these cannot be turned back
    if packed:  # saved as it is now
        base.hf_quantizer, base.is_quantized = None, False
        vars(base.config).pop("quantization_config", None)
        base.to(dtype)  # they come in bfloat16
    if recurrent_kind(base.config):
        keep_documents_apart(base)
    if missing:  # transformers would continue with random weights
        shown = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
        what = f"{len(missing)} weights are missing from its files: {shown}"
        raise ModelError(str(folder), what, "fetch the model again; the folder is incomplete")
    prepare_quantised_layers(base, model.quantization)
    if model.quantization == "fp8":
        to_float8(base, find_blocks(base), device)
    return base


def without_own_kernels(config: Any) -> None:
    """Remove from a config, including nested ones, the kernels that a model's folder requests by
    name: transformers would download and run some of them."""
    for value in list(vars(config).values()):
        if hasattr(value, "_attn_implementation_internal"):
            without_own_kernels(value)
    config._attn_implementation_internal = config._experts_implementation_internal = None
    for name in ("attn_implementation", "experts_implementation"):
        vars(config).pop(name, None)


def _refuse_other_mixing(config: Any, folder: Path) -> None:
    """Refuse models with a custom attention, or with layers that carry a state in another way than
    recurrent.py knows: documents of a packed row would silently leak into each other."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    if type(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return  # not a causal LM, which transformers reports; or a class that comes with the model
    model_class = auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kinds = set(getattr(config, "layer_types", None) or [])
    unsupported = sorted(kinds - _ATTENTION_LAYERS)
    if unsupported and unsupported == [recurrent_kind(config)]:
        return
    if unsupported or model_class._is_stateful or not model_class._supports_attention_backend:
        how = ", ".join(unsupported) or "a custom attention"
        what = (
            f"{model_class.__name__} mixes positions by {how}, which cannot keep packed documents "
            "apart"
        )
        raise ModelError(str(folder), what, "use a model with standard attention layers")


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


OUT_OF_WHOLE = {
    r"^(model\.)?language_model\.(model\.)?(?!lm_head)": "model.",
    r"^language_model\.lm_head": "lm_head",
}
"""Names of weights in a model that also reads images, old and new, and in its language model."""


@contextlib.contextmanager
def _without_list_of(left_out: str) -> Iterator[None]:
    """Hide transformers' list of the weights that are left out on purpose, if there are some."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    before = logging.get_verbosity()
    if left_out:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def without_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar: a run has its own display."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
