"""Watching a model while it runs: from its attention calls to a `Scope` of results."""
