"""Measures intercepted calls: `watch`, and the `Scope` of results that a user reads."""
