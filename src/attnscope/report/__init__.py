"""The report of a run as one self-contained HTML file.

This package reads tables and never loads a model.
"""

from attnscope.report.build import build
from attnscope.report.cache import report, write_report

__all__ = ["build", "report", "write_report"]
