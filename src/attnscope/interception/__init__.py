"""Intercepts the attention calls of a model: patches, hooks, masks, call specs."""
