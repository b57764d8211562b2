"""Metrics and age counts -> one HTML page that stands alone, and the same table as plain text.

The page holds everything it shows: no script runs and nothing is requested. Equal input gives
equal bytes.
"""

from __future__ import annotations

import html
import json
import math
import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from traceage.figures.ages import draw_heatmap, draw_staleness
from traceage.figures.style import (
    DARK,
    LIGHT,
    Theme,
    by_columns,
    inline_svg,
    percent,
)
from traceage.output import replacing

__all__ = ["summary_table", "write_report"]

Row = dict[str, Any]


# --- the table's columns ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column of the table: its heading, the value of a row, and how that value is written."""

    group: str  # heading over several columns; "" for none
    name: str
    value: Callable[[Row], Any]
    write: Callable[[Any], str]
    hint: str
    text: bool = False  # left-aligned

    def cell(self, row: Row) -> str:
        value = self.value(row)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "-"
        return self.write(value)


def _get(key: str) -> Callable[[Row], Any]:
    return lambda row: row.get(key)


def _ratio(part: str, whole: str) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        top, bottom = row.get(part), row.get(whole)
        return None if top is None or not bottom else float(top / bottom)

    return value


def _integer(value: Any) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def _mean(value: Any) -> str:
    return f"{value:,.2f}"


def _plain(value: Any) -> str:
    """Any value as text on one line; control characters are written out."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(value)
    )


_AGE = "token age"
_EPISODE = "episode staleness"

_COLUMNS = (
    _Column("", "episodes", _get("episodes"), _integer, "episodes with tokens in this batch"),
    _Column(
        "",
        "not shipped",
        _get("not_shipped"),
        _integer,
        "episodes that arrived at this step and that no batch took",
    ),
    _Column("", "sampled tokens", _get("sampled_tokens"), _integer, "tokens that a policy sampled"),
    _Column("", "coverage", _get("coverage"), percent, "labelled share of the sampled tokens"),
    _Column(_AGE, "mean", _get("off_policy/token/mean"), _mean, "mean over the labelled tokens"),
    _Column(
        _AGE,
        "min",
        _get("off_policy/token/min"),
        _integer,
        "below 0: a token labelled with a newer policy than the one its batch trained",
    ),
    _Column(_AGE, "p50", _get("off_policy/token/p50"), _integer, "half of the tokens are no older"),
    _Column(_AGE, "p95", _get("off_policy/token/p95"), _integer, "95% of the tokens are no older"),
    _Column(_AGE, "max", _get("off_policy/token/max"), _integer, "age of the oldest token"),
    _Column(_EPISODE, "mean", _get("off_policy/mean"), _mean, "mean over the episodes"),
    _Column(_EPISODE, "max", _get("off_policy/max"), _integer, "the stalest episode"),
    _Column(
        _EPISODE,
        "in-flight",
        _ratio("off_policy/in_flight/mean", "off_policy/mean"),
        percent,
        "share of the mean that passed while the episodes were generated",
    ),
    _Column(
        _EPISODE,
        "in-queue",
        _ratio("off_policy/in_queue/mean", "off_policy/mean"),
        percent,
        "share of the mean that passed while the episodes waited for a batch",
    ),
    _Column(
        "",
        "mixed",
        _ratio("mixed_nodes", "sampled_nodes"),
        percent,
        "share of the completions that more than one policy sampled",
    ),
)


def _columns(metrics: pl.DataFrame) -> list[_Column]:
    """The columns of the table; the lowest age only where it shows a fault."""
    keys = [
        _Column("", _plain(name), _get(name), _plain, "", text=metrics[name].dtype == pl.String)
        for name in by_columns(metrics)
    ]
    columns = [c for c in _COLUMNS if c.name != "min" or _lowest(metrics) < 0]
    return keys + columns


def _lowest(metrics: pl.DataFrame) -> int:
    """The lowest token age, 0 if none is below."""
    if "off_policy/token/min" not in metrics.columns:
        return 0
    lowest: int = min([0, *metrics["off_policy/token/min"].drop_nulls()])
    return lowest


# --- plain text ---------------------------------------------------------------------------------


def summary_table(metrics: pl.DataFrame) -> str:
    """The metrics as a plain-text table, one line a row, without a trailing newline.

    `metrics` is what `off_policy_metrics` returns. The columns are those it is grouped by, then:
    episodes, episodes not shipped, sampled tokens, coverage (labelled share of them), token age
    in policy versions (mean, p50, p95, max; also min when one is below 0), episode staleness in
    policy versions (mean, max, and the shares of the mean in flight and in queue), and the share
    of completions that mix versions. `-` stands for null. About 110 columns wide by step.

    >>> import polars as pl
    >>> table = summary_table(pl.DataFrame({
    ...     "step": [1, 2], "episodes": [8, 8], "sampled_tokens": [4151, 5335],
    ...     "coverage": [1.0, 0.5], "off_policy/token/mean": [0.0, 0.71],
    ... }))
    >>> for line in table.splitlines():
    ...     print(line[:43].rstrip())
                        not  sampled
    step  episodes  shipped   tokens  coverage
       1         8        -    4,151      100%
       2         8        -    5,335     50.0%
    """
    columns = _columns(metrics)
    rows = [[column.cell(row) for column in columns] for row in metrics.iter_rows(named=True)]
    heads = [_two_lines(column.name) for column in columns]
    widths = [max(map(_width, [*head, *(row[i] for row in rows)])) for i, head in enumerate(heads)]
    upper: list[str] = []
    for start, stop, group in _spans(columns):
        if group:
            whole = sum(widths[start:stop]) + 2 * (stop - start - 1)
            upper.append(f" {group} ".center(whole, "-"))
        else:
            upper += [_pad(heads[i][0], widths[i], columns[i].text) for i in range(start, stop)]
    lines = ["  ".join(upper)]
    for cells in [[head[1] for head in heads], *rows]:
        padded = zip(cells, widths, columns, strict=True)
        lines.append("  ".join(_pad(cell, width, c.text) for cell, width, c in padded))
    return "\n".join(line.rstrip() for line in lines)


def _two_lines(name: str) -> tuple[str, str]:
    upper, _, lower = (
        name.rpartition(" ") if name in ("not shipped", "sampled tokens") else ("", "", name)
    )
    return upper, lower


def _width(text: str) -> int:
    """Columns that `text` takes in a terminal."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _pad(text: str, width: int, left: bool) -> str:
    fill = " " * (width - _width(text))
    return text + fill if left else fill + text


def _spans(columns: Sequence[_Column]) -> list[tuple[int, int, str]]:
    """Neighbouring columns of one group as (start, stop, group)."""
    spans: list[tuple[int, int, str]] = []
    for index, column in enumerate(columns):
        if spans and spans[-1][2] == column.group:
            spans[-1] = (spans[-1][0], index + 1, column.group)
        else:
            spans.append((index, index + 1, column.group))
    return spans


# --- the page -----------------------------------------------------------------------------------


def write_report(
    path: str | os.PathLike[str],
    metrics: pl.DataFrame,
    counts: pl.DataFrame,
    *,
    title: str,
    sources: Iterable[str | os.PathLike[str]],
    notes: Iterable[str] = (),
) -> None:
    """Write one self-contained HTML page about the metrics to `path`.

    `metrics` is what `off_policy_metrics` returns and `counts` what `age_counts` returns, both by
    step; `metrics` may have further group columns. `sources` names what was read, `notes` says
    what a reader has to know about it ("2 lines skipped: ...").

    The page shows the table of `summary_table`, a heat map of token age, and token age and
    episode staleness over the steps. It holds the metrics and counts as JSON in the element
    `traceage-data`: `{"title", "sources", "notes", "metrics": [{column: value}, ...],
    "age_counts": {column: [value, ...]}}`, NaN as null.

    The file appears whole or not at all: a failure leaves an older file as it was. Its folder has
    to exist. Returns None; raises `OSError` when it cannot write.

    >>> import pathlib, tempfile
    >>> import polars as pl
    >>> metrics = pl.DataFrame({
    ...     "step": [1], "episodes": [8], "sampled_tokens": [400], "labelled_tokens": [400],
    ...     "coverage": [1.0], "off_policy/token/mean": [0.25], "off_policy/token/min": [0],
    ...     "off_policy/token/p50": [0], "off_policy/token/p95": [1], "off_policy/token/max": [1],
    ...     "off_policy/mean": [1.0], "off_policy/in_flight/mean": [0.75],
    ...     "off_policy/in_queue/mean": [0.25],
    ... })
    >>> counts = pl.DataFrame({"step": [1, 1], "age": [0, 1], "tokens": [300, 100]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = pathlib.Path(folder, "report.html")
    ...     write_report(page, metrics, counts, title="run 7", sources=["runs/7"])
    ...     page.read_text(encoding="utf-8").splitlines()[0]
    '<!doctype html>'
    """
    page = _page(metrics, counts, title, [os.fspath(s) for s in sources], list(notes))
    # A lone surrogate (an undecodable file name) cannot be UTF-8: it is written out.
    with replacing(path) as part:
        part.write_bytes(page.encode("utf-8", "backslashreplace"))


def _page(
    metrics: pl.DataFrame,
    counts: pl.DataFrame,
    title: str,
    sources: list[str],
    notes: list[str],
) -> str:
    parts = [
        f"<h1>{_text(title)}</h1>",
        _tiles(metrics, counts),
        _faults(metrics, counts),
        '<div class="intro">',
        _read(sources, notes),
        _HOW_TO_READ,
        "</div>",
        _figures(metrics, counts),
        _table(metrics),
        _data(metrics, counts, title, sources, notes),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(title)}</title>",
            '<link rel="icon" href="data:,">',
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            *parts,
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _text(value: Any) -> str:
    return html.escape(_plain(value))


def _tiles(metrics: pl.DataFrame, counts: pl.DataFrame) -> str:
    """The whole run in a line. Only what adds up exactly over the rows is in it."""
    tiles: list[tuple[str, str, str]] = []
    if "step" in metrics.columns and (steps := metrics["step"].drop_nulls().unique().sort()).len():
        low, high = steps[0], steps[-1]
        span = f"{low}" if low == high else f"{low} to {high}"
        tiles.append(("steps", f"{len(steps):,}", span))
    sampled = int(metrics["sampled_tokens"].sum() or 0)
    labelled = int(metrics["labelled_tokens"].sum() or 0)
    tiles.append(("sampled tokens", f"{sampled:,}", ""))
    if sampled:
        tiles.append(("coverage", percent(labelled / sampled), f"{labelled:,} labelled"))
    ages = (
        counts.group_by("age").agg(pl.col("tokens").sum()).filter(pl.col("tokens") > 0).sort("age")
    )
    if not ages.is_empty():
        tokens = int(ages["tokens"].sum())
        mean = float((ages["age"].cast(pl.Float64) * ages["tokens"]).sum()) / tokens
        reached = ages.filter(pl.col("tokens").cum_sum() >= -(-95 * tokens // 100))
        low = f", lowest {ages['age'][0]}" if ages["age"][0] < 0 else ""
        tiles.append(("token age, mean", _mean(mean), "policy versions"))
        tiles.append(("token age, p95", str(reached["age"][0]), "policy versions"))
        tiles.append(("token age, max", str(ages["age"][-1]), f"policy versions{low}"))
    cells = "\n".join(
        f"<div><dt>{name}</dt><dd>{value}</dd>" + (f"<dd>{more}</dd></div>" if more else "</div>")
        for name, value, more in tiles
    )
    return f'<dl class="tiles">\n{cells}\n</dl>'


def _faults(metrics: pl.DataFrame, counts: pl.DataFrame) -> str:
    """What is wrong with the labels, said before any figure."""
    said: list[str] = []
    negative = counts.filter(pl.col("age") < 0, pl.col("tokens") > 0)
    if not negative.is_empty():
        steps = negative["step"].n_unique() if "step" in negative.columns else 0
        lowest: Any = negative["age"].min()
        said.append(
            f"<strong>Fault in the labelling.</strong> {negative['tokens'].sum():,} tokens"
            + (f" in {steps:,} step{'s' if steps != 1 else ''}" if steps else "")
            + f" have a negative age (lowest {lowest}): they are labelled with a"
            " newer policy than the one that their batch trained. They are counted as they stand."
        )
    sampled = int(metrics["sampled_tokens"].sum() or 0)
    labelled = int(metrics["labelled_tokens"].sum() or 0)
    if sampled and not labelled:
        said.append(
            "<strong>No token carries a policy version.</strong> Ages cannot be told; the engine"
            " that sampled them was never labelled, or the labels were not stored."
        )
    return "\n".join(f'<p class="fault" role="note">{text}</p>' for text in said)


def _read(sources: list[str], notes: list[str]) -> str:
    listed = "".join(f"<li><code>{_text(source)}</code></li>" for source in sources)
    many = len(sources) > 8
    what = f"<ul>{listed}</ul>" if listed else "<p>Nothing named.</p>"
    if many:
        what = f"<details><summary>{len(sources):,} sources</summary>{what}</details>"
    said = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return "\n".join(
        [
            '<section aria-labelledby="read">',
            '<h2 id="read">What was read</h2>',
            what,
            *([f'<ul class="notes">{said}</ul>'] if said else []),
            "</section>",
        ]
    )


def _figures(metrics: pl.DataFrame, counts: pl.DataFrame) -> str:
    by = by_columns(metrics)
    steps = metrics["step"].drop_nulls() if "step" in by else None
    blocks = []
    if "step" in counts.columns:
        blocks.append(
            _figure(
                lambda theme: draw_heatmap(counts, steps=steps, theme=theme),
                "heat",
                _describe_ages(counts),
                "Of the labelled tokens of a step, the share that has each age. A column adds up"
                " to 100%. The colour scale is a square root, so that a thin old tail stays"
                " visible.",
            )
        )
    if steps is not None:
        caption = (
            "Above, the mean of each group. Below, the mean staleness of its episodes, and the part"
            " of it that passed in the queue."
            if len(by) > 1
            else "Above, the age of the tokens of each step: the mean, the band from the median to"
            " the 95th percentile, and the oldest. Below, the mean staleness of its episodes,"
            " split into the time in flight and the time in the queue."
        )
        blocks.append(
            _figure(
                lambda theme: draw_staleness(metrics, theme=theme),
                "steps",
                _describe_steps(metrics),
                f"{caption} A gap means that there is no value.",
            )
        )
    else:
        blocks.append("<p>Group by step to see the metrics over the run.</p>")
    return "\n".join(
        [
            '<section aria-labelledby="figures">',
            '<h2 id="figures">Figures</h2>',
            *blocks,
            "</section>",
        ]
    )


def _figure(draw: Callable[[Theme], Any], key: str, label: str, caption: str) -> str:
    """A figure in both colour schemes; the style sheet shows one."""
    return "\n".join(
        [
            "<figure>",
            *(
                f'<div class="{name}">'
                + inline_svg(draw, theme, key=f"{key}-{name}", label=label)
                + "</div>"
                for name, theme in (("light", LIGHT), ("dark", DARK))
            ),
            f"<figcaption>{caption}</figcaption>",
            "</figure>",
        ]
    )


def _describe_ages(counts: pl.DataFrame) -> str:
    ages = counts.filter(pl.col("tokens") > 0)
    if ages.is_empty():
        return "Heat map of token age by training step; no token has an age."
    ends = ages.select(
        *(pl.col(name).min().alias(f"first {name}") for name in ("step", "age")),
        *(pl.col(name).max().alias(f"last {name}") for name in ("step", "age")),
    ).row(0, named=True)
    age, tokens = ages.group_by("age").agg(pl.col("tokens").sum()).sort("tokens", "age").row(-1)
    return (
        f"Heat map of token age by training step, steps {ends['first step']} to"
        f" {ends['last step']}, ages {ends['first age']} to {ends['last age']} policy versions."
        f" The most frequent age is {age}, with {percent(tokens / ages['tokens'].sum())} of the"
        " labelled tokens."
    )


def _describe_steps(metrics: pl.DataFrame) -> str:
    def span(column: str, write: Callable[[Any], str]) -> str:
        values = metrics[column].drop_nulls()
        if values.is_empty():
            return "unknown"
        low, high = write(values.min()), write(values.max())
        return low if low == high else f"{low} to {high}"

    return (
        "Token age and episode staleness over the training steps."
        f" Mean token age of a step: {span('off_policy/token/mean', _mean)} policy versions;"
        f" oldest token: {span('off_policy/token/max', _integer)};"
        f" mean episode staleness: {span('off_policy/mean', _mean)};"
        f" coverage: {span('coverage', percent)}. The table has the figures."
    )


def _table(metrics: pl.DataFrame) -> str:
    columns = _columns(metrics)
    upper: list[str] = []
    lower: list[str] = []
    for start, stop, group in _spans(columns):
        if group:
            upper.append(f'<th colspan="{stop - start}" scope="colgroup">{group}</th>')
        for column in columns[start:stop]:
            hint = f' title="{html.escape(column.hint)}"' if column.hint else ""
            side = ' class="text"' if column.text else ""
            rows = "" if group else ' rowspan="2"'
            cell = f'<th scope="col"{rows}{side}{hint}>{html.escape(column.name)}</th>'
            (lower if group else upper).append(cell)
    keys = len(by_columns(metrics))
    body = []
    for row in metrics.iter_rows(named=True):
        cells = []
        for index, column in enumerate(columns):
            tag, scope = ("th", ' scope="row"') if index < keys else ("td", "")
            names = ["text"] if column.text else []
            if column.name == "min" and (column.value(row) or 0) < 0:
                names.append("bad")
            if column.name == "coverage" and (column.value(row) or 0.0) < 1:
                names.append("part")
            side = f' class="{" ".join(names)}"' if names else ""
            cells.append(f"<{tag}{scope}{side}>{html.escape(column.cell(row))}</{tag}>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    if not body:
        body = [f'<tr><td colspan="{len(columns)}" class="text">Nothing was read.</td></tr>']
    tall = " tall" if len(body) > 30 else ""
    return "\n".join(
        [
            '<section aria-labelledby="table">',
            f'<h2 id="table">By {_text(", ".join(by_columns(metrics)))}</h2>',
            f'<div class="scroll{tall}" tabindex="0" role="region" aria-labelledby="table">',
            "<table>",
            "<thead>",
            f"<tr>{''.join(upper)}</tr>",
            f"<tr>{''.join(lower)}</tr>",
            "</thead>",
            "<tbody>",
            *body,
            "</tbody>",
            "</table>",
            "</div>",
            f'<p class="key">{_TABLE_KEY}</p>',
            "</section>",
        ]
    )


def _data(
    metrics: pl.DataFrame,
    counts: pl.DataFrame,
    title: str,
    sources: list[str],
    notes: list[str],
) -> str:
    content = {
        "title": title,
        "sources": sources,
        "notes": notes,
        "metrics": [
            {name: _strict(value) for name, value in row.items()}
            for row in metrics.iter_rows(named=True)
        ],
        "age_counts": {c.name: [_strict(value) for value in c] for c in counts.iter_columns()},
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), default=str)
    # In an HTML script element only "<" can end or nest anything; the rest is for old parsers.
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return f'<script type="application/json" id="traceage-data">{text}</script>'


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


_HOW_TO_READ = """<section aria-labelledby="how">
<h2 id="how">How to read this</h2>
<p>The <em>age</em> of a token is the policy version that its batch trained, less the version that
sampled the token: 0 is on-policy, 3 means that three updates came in between. A negative age is a
fault in the labelling. <em>Coverage</em> is the share of the sampled tokens that carry a version;
tokens without one have no age and are in no mean, so read every figure beside its coverage. The
<em>staleness</em> of an episode counts updates since its first token: those <em>in flight</em>
came while it was still being generated, those <em>in queue</em> came while it was finished and
waited for its batch. A completion is <em>mixed</em> when more than one policy sampled it.</p>
</section>"""

_TABLE_KEY = (
    "Ages and staleness in policy versions. Token ages are over the labelled tokens. Not shipped:"
    " episodes that arrived at this step and that no batch took. In-flight, in-queue: shares of the"
    " mean episode staleness. Mixed: share of the completions. A dash: no value."
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--ink:#1f2430;--muted:#5a6272;
--rule:#e3e6eb;--head:#fafbfc;--fault:#a53806;--fault-card:#fdf1ea;--part:#8a5a00}
@media(prefers-color-scheme:dark){:root{--page:#101319;--card:#171a21;--ink:#e6e9ef;
--muted:#a2abba;--rule:#2c323d;--head:#1d212a;--fault:#ff9a5c;--fault-card:#2b1c13;--part:#e5b454}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 24px 48px}
h1{font-size:26px;line-height:1.25;margin:0 0 20px;overflow-wrap:anywhere}
h2{font-size:17px;margin:32px 0 10px}
p{margin:0 0 12px;max-width:76ch}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
ul{margin:0 0 8px;padding-left:20px}
.intro{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,2fr);gap:0 48px}
em{font-style:normal;font-weight:600}
.notes{color:var(--part)}
.tiles{display:flex;flex-wrap:wrap;gap:1px;margin:0;
background:var(--rule);border:1px solid var(--rule);border-radius:8px;overflow:hidden}
.tiles div{flex:1 1 140px;background:var(--card);padding:12px 16px}
.tiles dt{font-size:13px;color:var(--muted)}
.tiles dd{margin:0;font-size:13px;color:var(--muted);font-variant-numeric:tabular-nums}
.tiles dt+dd{font-size:23px;line-height:1.3;color:var(--ink)}
.fault{margin:16px 0 0;padding:10px 16px;max-width:none;border-left:4px solid var(--fault);
background:var(--fault-card);border-radius:0 8px 8px 0}
.fault strong{color:var(--fault)}
figure{margin:0 0 16px;padding:16px 20px;background:var(--card);border:1px solid var(--rule);
border-radius:8px;overflow-x:auto}
figure svg{display:block;width:100%;min-width:540px;max-width:900px;height:auto;margin:0 auto}
figure text{font-family:inherit}
figcaption{margin:10px auto 0;max-width:900px;font-size:13px;color:var(--muted)}
.key{margin:10px 0 0;max-width:none;font-size:13px;color:var(--muted)}
.dark{display:none}
@media(prefers-color-scheme:dark){.light{display:none}.dark{display:block}}
@media print{.tall{max-height:none!important}}
.scroll{overflow:auto;background:var(--card);border:1px solid var(--rule);border-radius:8px}
.tall{max-height:34rem}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:13.5px;
font-variant-numeric:tabular-nums}
th,td{padding:5px 11px;text-align:right;white-space:nowrap;border-top:1px solid var(--rule)}
thead{position:sticky;top:0;z-index:1}
thead th{background:var(--head);color:var(--muted);font-weight:600;vertical-align:bottom;
white-space:normal;border-top:0}
thead th[colspan]{text-align:center;border-bottom:1px solid var(--rule)}
tbody th{font-weight:600;background:var(--card)}
tr>:first-child[scope]{position:sticky;left:0}
tbody tr:hover>*{background:var(--head)}
th.text,td.text{text-align:left}
.bad{color:var(--fault);font-weight:700}
.part{color:var(--part)}
:focus-visible{outline:2px solid #2f86bd;outline-offset:2px}
@media(max-width:760px){.intro{display:block}main{padding:20px 14px 32px}figure{padding:12px}
th,td{padding:4px}table{font-size:11.5px}}
"""
