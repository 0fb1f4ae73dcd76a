"""The live page: type a prompt, see where the model looks. `attnscope serve` starts it."""
