"""tipbench: find the small local model and the prompt that write the best short productivity tips."""

__version__ = "0.1.0"
