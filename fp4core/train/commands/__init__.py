"""Command lines of the training stages: options in, functions called, marker written."""
