"""Interventions on a running model: attention knockout (ablation), steering, ARM.

Each is a `with` block that leaves the model as it was.
"""
