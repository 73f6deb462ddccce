"""What other trainers call the fields of a run, for the message to a user who writes one of those names."""

# A field, or an option of the command, and the words for it elsewhere, none of which is a field of a run.
_WORDS = {
    "run-dir": "out out_dir output output_dir output_folder save save_dir run_dir log_dir logdir workdir work_dir "
    "checkpoint_dir ckpt_dir default_root_dir results_dir",
    "steps": "max_steps num_steps n_steps train_steps num_train_steps total_steps training_steps iters max_iters "
    "train_iters iterations",
    "batch_size": "bs batch global_batch_size train_batch_size global_batch gbs",
    "microbatches": "gradient_accumulation_steps grad_accum grad_accum_steps grad_acc_steps accumulate_grad_batches",
    "clip_norm": "grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping max_grad_norm max_norm",
    "data.sequence_length": "seq_len seq_length seqlen sequence_length block_size context_length context_len "
    "max_seq_len max_seq_length max_length max_position_embeddings",
    "data.tokenizer": "tokenizer tokenizer_path tokenizer_name",
    "optimizer.learning_rate": "lr max_lr base_lr peak_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.epsilon": "eps adam_eps adam_epsilon",
    "schedule.kind": "lr_scheduler lr_scheduler_type lr_decay_style",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "model.embed": "n_embd d_model dim hidden_dim hidden_size",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads num_query_groups",
    "model.mlp": "d_ff ffn_dim ffn_hidden_size intermediate_size",
    "model.vocab": "vocab_size",
    "precision.compute": "dtype torch_dtype mixed_precision bf16 param_dtype",
    "remat.policy": "activation_checkpointing gradient_checkpointing recompute remat_policy",
    "mesh.model": "tp tp_size tensor_parallel_size tensor_parallel tensor_model_parallel_size",
    "mesh.stage": "pp pp_size pipeline_parallel_size pipeline_parallel pipeline_model_parallel_size",
    "mesh.data": "dp dp_size fsdp data_parallel_size num_gpus gpus",
    "mesh.context": "cp cp_size context_parallel_size sequence_parallel_size",
    "mesh.expert": "ep ep_size expert_parallel_size expert_model_parallel_size",
    "checkpoints.every": "save_steps save_every save_interval save_freq checkpoint_interval checkpoint_every",
    "evaluation.every": "eval_steps eval_every eval_interval eval_freq",
    "evaluation.batches": "eval_iters eval_batches limit_val_batches",
    "logging.every": "log_every log_interval log_freq logging_steps log_every_n_steps",
}
OTHER_NAMES = {word: ours for ours, words in _WORDS.items() for word in words.split()}


def ours(option: str) -> str | None:
    """The name that a run's command has for another trainer's option.

    >>> ours("lr"), ours("optimizer.lr"), ours("output_dir"), ours("steps")
    ('optimizer.learning_rate', 'optimizer.learning_rate', 'run-dir', None)
    """
    parent, _, last = option.rpartition(".")
    found = OTHER_NAMES.get(last)
    return found if found is not None and (not parent or found.startswith(f"{parent}.")) else None
