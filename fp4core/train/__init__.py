"""Training: data, loop, checkpoints, probes."""
