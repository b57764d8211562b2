"""Tables -> one HTML page that stands alone, and the metrics as plain text."""

from traceage.report.page import write_report as write_report
from traceage.report.table import summary_table as summary_table

__all__ = ["summary_table", "write_report"]
