"""Compares measurements over prompts: intervals, tests, claims and their sensitivity.

This package reads tables and never loads a model.
"""
