"""Evaluations: models on tasks with exact answers, under conditions, paired by problem."""
