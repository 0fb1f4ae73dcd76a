"""The live page: type a prompt and see where attention goes. `attnscope serve` starts it."""
