"""Public operations: quantise, multiply, linear layers, conversion."""
