"""The trainer: from a cache to batches, a model, checkpoints and metrics."""
