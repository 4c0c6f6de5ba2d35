"""From checkpoints to evidence: export and its gate, validation, benchmarks, diagnostics, tidy tables."""
