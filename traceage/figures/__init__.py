"""The tables -> matplotlib figures.

Every function takes a table of the library, draws into `ax` where one is given, and returns the
figure. Colours are from colour-blind safe sets and differ in lightness.
"""

from traceage.figures.ages import age_heatmap as age_heatmap
from traceage.figures.ages import staleness as staleness
from traceage.figures.batches import age_by_index as age_by_index
from traceage.figures.batches import age_distribution as age_distribution
from traceage.figures.batches import batch_timeline as batch_timeline
from traceage.figures.costs import masking_curves as masking_curves
from traceage.figures.costs import mismatch_curve as mismatch_curve

__all__ = [
    "age_by_index",
    "age_distribution",
    "age_heatmap",
    "batch_timeline",
    "masking_curves",
    "mismatch_curve",
    "staleness",
]
