"""The report of a run as one self-contained HTML file.

This package reads tables and never loads a model.
"""

from attnscope.report.build import build, write_report

__all__ = ["build", "write_report"]
