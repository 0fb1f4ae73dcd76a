"""Execution: from a question to a plan, to batches, to an executor that measures them."""
