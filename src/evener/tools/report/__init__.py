"""The report of a run: what its directory tells, reduced to bounded data, with a verdict.

`schema` has the data, and `gather` makes them from a run directory. `verdict` and `stragglers` name the causes of lost
time. `json_file` writes and reads ``report.json``, and `compare` compares two reports.
"""

from evener.tools.report.compare import Comparison, compare
from evener.tools.report.gather import report_of
from evener.tools.report.json_file import json_of, read_report
from evener.tools.report.schema import Report, ReportFile

__all__ = ["Comparison", "Report", "ReportFile", "compare", "json_of", "read_report", "report_of"]
