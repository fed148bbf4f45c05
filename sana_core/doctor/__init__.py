"""Is this machine right? Versions, the GPU, arithmetic against known answers, and the model files that are here.

A report is lines: what was looked at, what was expected, what was got, and a verdict. Whatever fails is a line too.
"""

from .examine import examine
from .report import Line, Report

__all__ = ["Line", "Report", "examine"]
