"""The meaning of each field of `TrainingArguments` for a private run: kept, compared with the method, or refused.

A field that is in no table of this module is refused at any value except its default: additions of another version
of transformers are never silently ignored.
"""

from dataclasses import fields
from typing import Any, Final

from dpcore.errors import ArgumentError
from dpcore.stages.method import Method
from dpcore.torch import groups

# fmt: off
KEPT: Final = frozenset({
    # Length, schedule and seed of the initial weights.
    "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "seed",
    "full_determinism", "use_cache", "resume_from_checkpoint",
    # Read by Trainer before or outside the loop.
    "output_dir", "overwrite_output_dir", "activation_checkpointing", "activation_checkpointing_kwargs",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "remove_unused_columns", "label_names",
    "dataloader_num_workers", "do_train", "do_eval", "do_predict",
    # make_private(precision="bf16").
    "bf16",
    # Logging.
    "logging_strategy", "logging_steps", "logging_first_step", "logging_dir", "log_on_each_node", "log_level",
    "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
    "trackio_static_space_id",
    # Evaluation, on data that was not trained on, with its own loaders.
    "eval_strategy", "evaluation_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size",
    "prediction_loss_only", "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object",
    "eval_accumulation_steps", "include_for_metrics", "include_inputs_for_metrics", "batch_eval_metrics",
    "accelerator_config", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order",
    # Saving.
    "save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit", "save_safetensors",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "restore_callback_states_from_checkpoint", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id",
    "hub_always_push", "hub_revision",
    # Machines. The configuration of fsdp has no effect without it.
    "fsdp_config", "use_cpu", "no_cuda", "use_mps_device", "local_rank", "ddp_backend", "ddp_timeout",
})
# fmt: on
"""Fields with the same meaning as in `Trainer`."""

COUNTED: Final = ("num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "hub_strategy")
"""Fields with a rule of their own, in this module."""

OF_THE_METHOD: Final = {
    "learning_rate": "lr",
    "max_grad_norm": "max_grad_norm",
    "weight_decay": "weight_decay",
    "adam_beta1": "betas[0]",
    "adam_beta2": "betas[1]",
    "adam_epsilon": "eps",
}
"""Fields that the method has, under its own name: at their default they say nothing; else they must say the same."""

_REASONS: Final = {
    "optim optim_args optim_target_modules adafactor": "the update is the method's, as in dpcore.methods.dp_adam(...)",
    "label_smoothing_factor": "give compute_loss_func, as with cross_entropy(..., label_smoothing=0.1)",
    "average_tokens_across_devices": "each example's loss is the mean over its own tokens",
    "fp16": "its loss scale follows from gradients, which are private; take bf16=True",
    "tf32": "the bounds on norms are those of float32 products",
    "bf16_full_eval fp16_full_eval": "it would change the model that is trained; evaluate a copy of it",
    "torch_compile": "pass a model that is compiled already",
    "use_liger_kernel": "its kernels have no gradient for each example",
    "neftune_noise_alpha": "it adds noise to embeddings, and none of it counts for privacy",
    "auto_find_batch_size": "batches are part of the guarantee; memory is limited by max_memory",
    "include_num_input_tokens_seen skip_memory_metrics debug": "it would reveal facts on batches, which are private",
    "logging_nan_inf_filter": "no loss of training data is logged",
    "enable_jit_checkpoint": "processes would not save at the same step; save often (save_steps)",
    "data_seed": "batches are drawn from the run's secret key",
    "parallelism_config fsdp deepspeed": "every process has the whole model, and dpcore shares out batches, noise and "
    "state by itself",
    "dataloader_drop_last": "batches are drawn by sampling=, which drops nothing unseen",
    "train_sampling_strategy": "batches are drawn by sampling=",
    "ignore_data_skip": "a resumed run draws fresh batches; there is none to skip",
    "group_by_length": "batches are drawn by sampling=; lengths would decide which examples share a batch",
}
REASONS: Final = {name: reason for names, reason in _REASONS.items() for name in names.split()}
"""The reason to refuse a field at any value except its default, or the remedy."""


def check_arguments(args: Any, known: type, method: Method, *, processes: int) -> None:
    """Refuse training arguments that contradict the private run, or would be ignored, each with a remedy.

    `known` is `transformers.TrainingArguments`: fields that a subclass adds are ignored. A value that equals its
    default is taken as not given, since the two cannot be distinguished.
    """
    ours, defaults = _settings_of(method), {entry.name: entry.default for entry in fields(known)}
    for name, default in defaults.items():
        value = getattr(args, name)
        # After it was made, "" is [] in some fields, None False, and False "no".
        unchanged = value == default or all(not each or each == "no" for each in (value, default))
        if unchanged or name in KEPT or name in COUNTED or name.startswith("_"):  # n_gpu is checked below
            continue
        if name not in OF_THE_METHOD:
            reason = REASONS.get(name, "a private run does not know it")
            raise ArgumentError(f"{name}={_shown(value)}: must be left at {_shown(default)}; {reason}")
        setting = OF_THE_METHOD[name]
        if value != ours.get(setting):
            wanted = f"the method's {setting}={ours[setting]!r}" if setting in ours else f"a method with {setting}"
            raise ArgumentError(f"{name}={value!r}: must be {wanted}, or be left out ({default!r}); the method decides")
    _check_counts(args, defaults, method, processes)


def _check_counts(args: Any, defaults: dict[str, Any], method: Method, processes: int) -> None:
    given = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if given != (defaults["per_device_train_batch_size"], defaults["gradient_accumulation_steps"]):
        size = given[0] * given[1] * processes
        if size != method.batch_size:
            raise ArgumentError(
                f"per_device_train_batch_size={given[0]}, gradient_accumulation_steps={given[1]}: must give the "
                f"method's batch_size={method.batch_size!r} in {processes} processes, not {size}, or be left out; "
                "memory is limited by max_memory or microbatch_size"
            )
    if args.max_steps <= 0 and args.num_train_epochs != int(args.num_train_epochs):
        raise ArgumentError(f"num_train_epochs={args.num_train_epochs!r}: must be a whole number; or give max_steps")
    if args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) not in ("end", "every_save"):
        raise ArgumentError(
            f"hub_strategy={_shown(args.hub_strategy)}: must be 'end' or 'every_save'; checkpoints have the run's keys "
            "and must stay with the data"
        )
    scheduler = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if method.schedule is not None and scheduler != "constant":
        raise ArgumentError(
            f"lr_scheduler_type={scheduler!r}: must be 'constant' with a method that has a schedule of its own, since "
            "both would be multiplied"
        )
    if args.n_gpu > 1:
        raise ArgumentError(f"n_gpu={args.n_gpu}: must be one in each process; start one process for every GPU")


def _settings_of(method: Method) -> dict[str, Any]:
    own = {**groups.defaults(method.update), "max_grad_norm": method.clip.max_grad_norm}
    return own | {f"betas[{place}]": beta for place, beta in enumerate(own.get("betas", ()))}


def _shown(value: Any) -> str:
    return repr(getattr(value, "value", value))
