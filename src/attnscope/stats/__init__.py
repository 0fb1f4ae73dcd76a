"""Is it real? Comparisons over prompts, with intervals, tests, claims and their sensitivity.

Right of the wall: reads tables, never loads a model.
"""
