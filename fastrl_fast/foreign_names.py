"""What settings of other trainers are called here, so that a known name of theirs is answered with ours."""

TRL = {
    "num_generations": "budget.group_size",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "beta": "loss.kl_coef",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "loss_type": "loss.kind",
    "importance_sampling_level": "loss.kind",
    "scale_rewards": "advantage.preset",
    "num_iterations": "updates.epochs",
    "steps_per_generation": "updates.minibatches",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.functions",
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "optimizer.max_grad_norm",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    "num_train_epochs": "epochs",
    "output_dir": "run_dir",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every",
    "report_to": "log.trackers",
    "gradient_checkpointing": "model.activation_checkpointing",
    "bf16": "model.dtype",
    "model_name_or_path": "model.path",
    "dataset_name": "data.path",
    "generation_batch_size": "data.prompts_per_step",
}
"""TRL's GRPOConfig and script arguments -> ours."""

VERL = {
    "rollout.n": "budget.group_size",
    "actor_rollout_ref.rollout.n": "budget.group_size",
    "worker.rollout.n": "budget.group_size",
    "train_batch_size": "data.prompts_per_step",
    "rollout_batch_size": "data.prompts_per_step",
    "max_response_length": "rollout.max_completion_tokens",
    "train_files": "data.path",
    "val_files": "eval.path",
    "prompt_key": "data.prompt_column",
    "answer_key": "data.answer_column",
    "format_prompt": "data.instruction",
    "clip_ratio": "loss.clip_low",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "clip_ratio_c": "loss.dual_clip",
    "clip_ratio_dual": "loss.dual_clip",
    "loss_mode": "loss.kind",
    "loss_agg_mode": "loss.aggregation",
    "loss_avg_mode": "loss.aggregation",
    "kl_loss_coef": "loss.kl_coef",
    "kl_loss_type": "loss.kl_kind",
    "kl_penalty": "loss.kl_kind",
    "adv_estimator": "advantage.preset",
    "norm_adv_by_std_in_grpo": "advantage.preset",
    "ppo_epochs": "updates.epochs",
    "ppo_mini_batch_size": "updates.minibatches",
    "global_batch_size": "updates.minibatches",
    "ppo_max_token_len_per_gpu": "updates.tokens_per_microbatch",
    "grad_clip": "optimizer.max_grad_norm",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "total_epochs": "epochs",
    "total_training_steps": "max_steps",
    "save_freq": "checkpoint.every",
    "save_limit": "checkpoint.keep",
    "test_freq": "eval.every",
    "val_freq": "eval.every",
    "default_local_dir": "run_dir",
    "save_checkpoint_path": "run_dir",
    "reward_function": "reward.functions",
    "custom_reward_function": "reward.functions",
    "logger": "log.trackers",
    "enable_gradient_checkpointing": "model.activation_checkpointing",
}
"""verl's and EasyR1's keys, without their long section prefixes -> ours."""

OPENRLHF = {
    "n_samples_per_prompt": "budget.group_size",
    "micro_train_batch_size": "updates.tokens_per_microbatch",
    "init_kl_coef": "loss.kl_coef",
    "eps_clip": "loss.clip_low",
    "eps_clip_low_high": "loss.clip_high",
    "dual_clip": "loss.dual_clip",
    "advantage_estimator": "advantage.preset",
    "actor_learning_rate": "optimizer.lr",
    "max_epochs": "updates.epochs",
    "num_episodes": "epochs",
    "generate_max_len": "rollout.max_completion_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "prompt_data": "data.path",
    "input_key": "data.prompt_column",
    "label_key": "data.answer_column",
    "pretrain": "model.path",
    "remote_rm_url": "reward.functions",
    "save_path": "run_dir",
}
"""OpenRLHF's command-line flags -> ours."""


def translate(key: str) -> str | None:
    """Return our name of another trainer's setting, or None; `key` may carry that trainer's section prefixes."""
    for start in range(key.count(".") + 1):
        tail = ".".join(key.split(".")[start:])
        for table in (TRL, VERL, OPENRLHF):
            if tail in table:
                return table[tail]
    return None
