"""The Llama of the experiment."""
