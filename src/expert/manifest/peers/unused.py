"""Keys of other trainers without a counterpart here: not used, or refused where leaving them out
would train something else. A key that is empty or false is dropped silently."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from expert.manifest.migrate.aliases import (
    CONFIG_ALIASES,
    CONFIG_KEYS,
    LOOSE_DATASET_KEYS,
    SPECIAL_NAMES,
)
from expert.manifest.migrate.migration import Entries, Migration
from expert.manifest.peers.keys import CONVERTED
from expert.manifest.text.item import shown

# An entry starts at the margin with its kind, the values that change nothing (default: false), the
# reason, and after ">" what to do about refused keys (default: remove it). Its keys follow.
# fsdp_* matches all keys with this prefix that are not in the table; the longest prefix wins.
_TABLE = r"""
not used
    remove_unused_columns dataset_kwargs dataloader_drop_last ignore_pad_token_for_loss strict debug
    logging_first_step logging_nan_inf_filter logging_strategy disable_tqdm skip_memory_metrics
    label_names prediction_loss_only batch_eval_metrics length_column_name torchdynamo use_ipex
    average_tokens_across_devices jit_mode_eval half_precision_backend auto_find_batch_size
    torch_empty_cache_steps gc_steps include_mfu include_tokens_per_second log_peak_memory_stats
    include_num_input_tokens_seen data_seed ignore_data_skip do_train overwrite_output_dir
    save_safetensors save_first_step save_on_each_node accelerator_config use_cpu_offload use_cache
    gradient_checkpointing_use_reentrant task_type lora_task_type peft_type low_cpu_mem_usage
    lora_fan_in_fan_out test_value token hf_hub_token hf_use_auth_token logging_dir plot_loss
    metric_logger profiler profile_steps do_eval eval_on_start eval_delay eval_accumulation_steps
    device_map dynamo_config dynamo_backend bnb_4bit_quant_storage llm_int8_threshold
    llm_int8_enable_fp32_cpu_offload llm_int8_skip_modules upcast_layernorm upcast_lmhead_output
    upcast_sdpa gpu_memory_utilization max_lora_rank float8_kv_cache fast_inference vllm_* infer_*
    sglang_* enable_activation_offloading activation_offloading use_reentrant_gc use_unsloth_gc
    loss_watchdog_threshold loss_watchdog_patience tool_format enable_thinking template_thinking_key
    split_thinking buffer_size image_max_pixels video_max_pixels image_size image_resize_algorithm
    freeze_vision_tower freeze_multi_modal_projector video_fps media_dir finetune_vision_layers
    num_proc dataset_num_proc preprocessing_num_workers dataset_processes dataset_prepared_path
    tokenized_path overwrite_cache skip_prepare_dataset save_only_model save_adapter_weights_only
    model_type tokenizer_type tokenizer_use_fast tokenizer_legacy use_fast_tokenizer
    tokenizer_config tokenizer_name tokenizer_name_or_path tokenizer tokenizer_use_mistral_common
    fix_tokenizer is_llama_derived_model is_mistral_derived_model is_falcon_derived_model
    processor_type special_tokens eot_tokens added_tokens_overrides pad_token eos_token bos_token
    pad_to_sequence_len pad_to_multiple_of padding pad_to_max_length padding_free eval_packing
    sample_packing_group_size sample_packing_bin_size max_packed_sequence_len eval_sample_packing
    context_parallel_size tensor_parallel_size tensor_parallel_dim context_parallel_dim
    sequence_parallel_degree sequence_parallel_size parallelism_config expert_parallel_size
    log_level log_level_replica optimizer_in_bwd eval_table_max_new_tokens low_cpu_ram
not used: expert export --push uploads the result
    push_to_hub push_dataset_to_hub hub_*
not used: trackers has tensorboard, wandb, mlflow and trackio
    comet_* use_comet swanlab_* use_swanlab neptune_* otel_* use_otel*
not used: trackers read accounts from the environment
    wandb_* mlflow_* trackio_* hf_mlflow_log_artifacts
not used: expert train --resume continues a run
    resume_from_checkpoint auto_resume_from_checkpoints resume
not used: expert validate judges answers, as training.decoding says
    do_predict predict_with_generate eval_table_size eval_max_new_tokens eval_causal_lm_metrics
    generation_num_beams eval_num_beams
not used: code runs only with --allow-remote-code
    trust_remote_code
not used: it belongs to preference training
    rl_* kto_* dpo_* orpo_* ppo_* grpo_* pref_* simpo_* reward_* center_rewards_* ref_model* trl_*
refused unless false, 0, 0.0: it is not supported
    label_smoothing_factor neftune_noise_alpha neftune
refused: it is not supported
    tokens new_special_tokens add_special_tokens add_tokens new_special_tokens_config resize_vocab
    sample_packing_sequentially curriculum_sampling disable_shuffling qat layers_to_transform
    lora_layers_to_transform peft_layers_to_transform peft_layers_pattern exclude_modules
    target_parameters layer_replication peft_layer_replication lora_target_parameters rank_pattern
    alpha_pattern train_from_scratch reinit_weights
    lr_quadratic_warmup cosine_constant_lr_ratio lr_groups embedding_lr embedding_lr_scale relora
    relora_* mixture_of_depths use_mod moe_aux_loss_coef use_pose pose_* lisa_* kd_*
    jagged_restart_* use_llama_pro scaling_softmax reward_model process_reward_model num_labels
    loftq_config use_loftq
refused: LoRA+ is not supported > remove it; a higher learning_rate reaches both matrices
    loraplus_*
refused: PiSSA is not supported > remove it, or write adapter_type: dora
    pissa_*
refused unless false, "nll": the loss is the answers' cross-entropy
    loss_type use_dft_loss use_eaft_loss use_asft_loss
refused unless "keep_start": the end of a long row is cut
    truncation_mode
refused: a mixture is written as tasks > write training.dataset.tasks
    dataset_mixer
refused: files and arguments of templates are not read > write its text as chat_template
    chat_template_path tokenizer_chat_template chat_template_kwargs
refused: use betas, adam_epsilon and weight_decay
    optim_args
refused unless true: rows are shuffled with the seed
    shuffle shuffle_merged_datasets shuffle_dataset
not used unless true: int4 has double quantisation
    bnb_4bit_use_double_quant double_quantization use_bnb_nested_quant
not used: the plan chooses fused kernels
    lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel fused_attn_kernel
    flash_optimum xformers_attention s2_attention shift_attn liger_kernel_config torchdistx_path
    liger_* flash_attn_* unsloth_* cut_cross_entropy_*
refused unless "nf4": int4 is NF4
    bnb_4bit_quant_type quantization_type
refused unless "bnb", "bitsandbytes": bases are quantised with bitsandbytes only
    quantization_method
refused: an already quantised base cannot be trained > name the original, with quantization: int4
    gptq gptq_* awq_* hqq_* eetq_* quantization_device_map
refused: training cannot start from a finished adapter > use --resume, or merge the adapter
    lora_model_dir adapter_name_or_path peft_model_id resume_adapter_file
refused: only the adapter can be trained > remove it, or train all weights: adapter_type: full
    lora_modules_to_save modules_to_save additional_target save_embedding_layers
    trainable_token_indices peft_trainable_token_indices freeze_trainable_layers
    freeze_trainable_modules
refused unless true: target_modules sets the adapted layers
    finetune_language_layers finetune_attention_modules finetune_mlp_modules
refused unless true: adapters start without effect > remove it, or write adapter_type: dora
    init_lora_weights lora_init_lora_weights peft_init_lora_weights
refused unless false, "none": biases are not trained
    bias lora_bias
refused: that optimizer is not supported > use optim: adamw_bnb_8bit for little memory
    use_galore use_apollo use_badam use_adam_mini use_muon optim_target_modules galore_* apollo_*
    badam_* adam_mini_* muon_* lion_*
not used: Python classes are not run
    plugins
not used: the loss is the answers' cross-entropy
    loss
not used: max_steps limits the whole run
    max_steps_per_epoch
refused unless false, "turn", "all": the end of answers is trained on
    train_on_eos
refused unless false, 0, 1: every row is trained on
    dataset_shard_num dataset_shard_idx
refused: every answer of a conversation is trained on > use weight: 0 in the messages
    mask_history
refused: system messages come from the rows > put it into the rows, as a column or message
    default_system default_system_message
refused unless false, "concat": data sets are mixed by their weights > give tasks a weight
    mix_strategy interleave_probs
not used: distributed: sharded needs no more
    fsdp_* deepspeed_* megatron_lm_config custom_sharded_layers dp_shard_size dp_replicate_size
    data_parallel_shard_dim data_parallel_replicate_dim downcast_bf16
not used: gradients are summed once per step
    ddp_*
not used: expert train --gpus N starts the processes
    local_rank world_size machine_rank main_process_ip main_process_port rdzv_backend rdzv_endpoint
    same_network main_training_function gpu_ids resources_per_worker placement_strategy use_ray
    ray_* devices num_nodes num_gpus n_gpus nproc_per_node num_processes num_machines
    compute_environment enable_cpu_affinity tpu_*
refused: files of that trainer are not read > write the keys of EXPERT_FORMAT.md
    global_batch_size class_path lora_query lora_key lora_value lora_projection lora_head quantize
    iters fine_tune_type lora_parameters hf_dataset
"""


@dataclass(frozen=True)
class KeyAnswer:
    """The answer to a key of another trainer."""

    reason: str
    refused: bool = False
    fix: str = ""
    """What to write instead of a refused key."""
    agrees: tuple[Any, ...] = (False,)
    """Values that change nothing; null never does."""


def _answers() -> dict[str, KeyAnswer]:
    answers = {}
    for entry in re.split(r"\n(?=\S)", _TABLE.strip()):
        head, *keys = entry.splitlines()
        head, _, fix = head.partition(" > ")
        before, _, reason = head.partition(": ")
        kind, _, unless = before.partition(" unless ")
        refused = kind == "refused"
        agrees = tuple(json.loads(f"[{unless}]")) if unless else (False,)
        answer = KeyAnswer(reason, refused, fix or "remove it" if refused else "", agrees)
        answers.update(dict.fromkeys(" ".join(keys).split(), answer))
    return answers


ANSWERS = _answers()
FAMILIES = {key[:-1]: ANSWERS.pop(key) for key in [*ANSWERS] if key.endswith("*")}
"""Answers to keys by their prefix."""
_READ_KEYS = {*CONFIG_KEYS, *CONFIG_ALIASES, *SPECIAL_NAMES, *LOOSE_DATASET_KEYS, *CONVERTED}
"""Keys that are read, whatever their prefix."""
# At the top level of an Expert manifest, these may be metadata.
_METADATA_WORDS = frozenset(
    (
        *("bias", "debug", "devices", "model_type", "neftune", "padding", "profiler", "plugins"),
        *("qat", "relora", "resume", "run", "shuffle", "strict", "task_type", "tokenizer"),
        *("loss", "tokens", "tool_format", "quantize", "iters"),
    )
)


def answer_to(key: str) -> KeyAnswer | None:
    """The answer to a key of another trainer; None if it is unknown."""
    if key in ANSWERS or key in _READ_KEYS:
        return ANSWERS.get(key)
    prefixes = [prefix for prefix in FAMILIES if key.startswith(prefix)]
    return FAMILIES[max(prefixes, key=len)] if prefixes else None


def report_unused(work: Migration, zone: Entries, *, keep: str = "") -> None:
    """Remove and report the keys of other trainers in a section, except `keep`."""
    has_metadata = zone is work.root and work.is_expert_manifest
    for key in [key for key in zone if key != keep]:
        answer = None if has_metadata and key in _METADATA_WORDS else answer_to(key)
        if answer is None:
            continue
        item = zone.pop(key)
        value = item.plain()
        # In Python 1 == True, so compare types too.
        agrees = any(type(value) is type(known) and value == known for known in answer.agrees)
        if value in (None, "", [], {}) or agrees:
            continue
        if not answer.refused:
            work.unused(item, answer.reason)
            continue
        is_section = isinstance(value, dict | list)
        what = answer.reason if is_section else f"{shown(value)}: {answer.reason}"
        work.problem(item, what, answer.fix)
