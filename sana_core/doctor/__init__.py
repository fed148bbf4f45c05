"""Checks this machine: versions, the GPU, arithmetic against known results, and the user's model files.

A report consists of lines. Each line has a subject, the expected value, the actual value and a verdict. A check that
raises an error becomes a line too.
"""

from .examine import examine
from .report import Line, Report

__all__ = ["Line", "Report", "examine"]
