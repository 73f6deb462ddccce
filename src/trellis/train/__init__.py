"""Training runs: configuration, state, step, loop, data, metrics, checkpoints, evaluation."""
