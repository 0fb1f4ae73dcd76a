"""The report of a run: one HTML file that needs nothing else.

Right of the wall: reads tables, never loads a model.
"""

from attnscope.report.build import build, write_report

__all__ = ["build", "write_report"]
