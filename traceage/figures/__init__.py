"""The tables -> matplotlib figures.

Every function takes a table of the library, draws into `ax` where one is given, and returns the
figure. Colours are from colour-blind safe sets and differ in lightness.
"""

from traceage.figures.ages import age_heatmap as age_heatmap
from traceage.figures.ages import staleness as staleness

__all__ = ["age_heatmap", "staleness"]
