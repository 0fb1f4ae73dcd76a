"""The measures: each file has the function of one quantity and its declaration."""
