"""A study -> one HTML page that stands alone.

The page holds everything it shows: no script runs and nothing is requested. It answers in words
first, then shows figures, each with its table behind a fold. Equal input gives equal bytes.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

from traceage.figures.ages import draw_heatmap, draw_staleness
from traceage.figures.batches import draw_by_index, draw_distribution, draw_timeline
from traceage.figures.costs import NAMES, draw_masking, draw_mismatch
from traceage.figures.style import DARK, LIGHT, Theme, by_columns, inline_svg, percent, plain
from traceage.output import replacing
from traceage.report.style import POLICY, STYLE
from traceage.report.table import (
    Column,
    columns_of,
    headings_of,
    integer,
    masking_columns,
    mean,
    mismatch_columns,
    reward_columns,
    versions_columns,
)
from traceage.report.words import NO_TRAINER, findings
from traceage.study import Study


def write_report(
    path: str | os.PathLike[str], study: Study, compare: Study | None = None, *, title: str
) -> None:
    """Write one self-contained HTML page about a study to `path`.

    `study` is what `read_study` returns; `compare` is another one, to stand beside it. Sections
    whose tables are missing say what is missing.

    The page holds its numbers as JSON in the element `traceage-data`: `{"title", "sources",
    "notes", "metrics": [{column: value}, ...], "age_counts": {column: [value, ...]}, "masking",
    "mismatch", "findings"}`, NaN as null.

    The file appears whole or not at all: a failure leaves an older file as it was. Its folder has
    to exist. Returns None; raises `OSError` when it cannot write.

    >>> import pathlib, tempfile
    >>> import traceage as ta
    >>> study = ta.read_study("data/real-dump")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = pathlib.Path(folder, "report.html")
    ...     write_report(page, study, title="run 7")
    ...     page.read_text(encoding="utf-8").splitlines()[0]
    '<!doctype html>'
    """
    page = _page(study, title, compare)
    # A lone surrogate (an undecodable file name) cannot be UTF-8: it is written out.
    with replacing(path) as part:
        part.write_bytes(page.encode("utf-8", "backslashreplace"))


def _page(study: Study, title: str, compare: Study | None) -> str:
    sections = [
        ("ages", "How old the tokens were", _ages(study)),
        ("whence", "Where the age comes from", _whence(study)),
        ("mismatch", "Does staleness hurt", _mismatch(study)),
        ("limits", "What a limit would do", _limits(study)),
        ("envs", "By environment", _envs(study)),
        ("read", "What was read", _read(study)),
        ("how", "How to read this", _HOW_TO_READ),
    ]
    if compare is not None:
        sections.insert(0, ("compare", "Two runs side by side", _compare(study, compare)))
    links = "".join(f'<li><a href="#{key}">{name}</a></li>' for key, name, _ in sections)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(title)}</title>",
            '<link rel="icon" href="data:,">',
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{_text(title)}</h1>",
            _tiles(study),
            _faults(study),
            _summary(study),
            f'<nav aria-label="Sections"><ul>{links}</ul></nav>',
            *(
                f'<section aria-labelledby="{key}">\n<h2 id="{key}">{name}</h2>\n{content}\n'
                "</section>"
                for key, name, content in sections
            ),
            _data(study, title),
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


# --- the top ------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    return html.escape(plain(value))


def _tiles(study: Study) -> str:
    """The whole run in a line. Only what adds up exactly over the rows is in it."""
    metrics, counts = study.metrics, study.counts
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
        average = float((ages["age"].cast(pl.Float64) * ages["tokens"]).sum()) / tokens
        reached = ages.filter(pl.col("tokens").cum_sum() >= -(-95 * tokens // 100))
        low = f", lowest {ages['age'][0]}" if ages["age"][0] < 0 else ""
        tiles.append(("token age, mean", mean(average), "policy versions"))
        tiles.append(("token age, p95", str(reached["age"][0]), "policy versions"))
        tiles.append(("token age, max", str(ages["age"][-1]), f"policy versions{low}"))
    cells = "\n".join(
        f"<div><dt>{name}</dt><dd>{value}</dd>" + (f"<dd>{more}</dd></div>" if more else "</div>")
        for name, value, more in tiles
    )
    return f'<dl class="tiles">\n{cells}\n</dl>'


def _faults(study: Study) -> str:
    """What is wrong with the labels, said before any figure."""
    metrics, counts = study.metrics, study.counts
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


def _summary(study: Study) -> str:
    marks = {True: ' class="bad"', False: ""}
    rows = "\n".join(
        f"<div{marks[found.fault]}><dt>{_text(found.question)}</dt>"
        f"<dd><strong>{_text(found.answer)}</strong> {_text(found.why)}</dd></div>"
        for found in findings(study)
    )
    return f'<section aria-label="Summary"><dl class="answers">\n{rows}\n</dl></section>'


# --- sections -----------------------------------------------------------------------------------


def _ages(study: Study) -> str:
    metrics, counts = study.metrics, study.counts
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
                image=True,
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
    named = f"by {', '.join(by)}" if by else "of all tokens"
    blocks.append(_table(metrics, columns_of(metrics), named, "by-step", _TABLE_KEY))
    with_ages = counts.filter(pl.col("tokens") > 0)
    if "step" in counts.columns and not with_ages.is_empty():
        blocks.append(
            _figure(
                lambda theme: draw_distribution(counts, None, theme=theme),
                "last",
                _describe_last(with_ages),
                "The last step alone.",
            )
        )
    batch = study.batch
    if batch is not None and batch["length"].sum():
        blocks.append(
            _figure(
                lambda theme: draw_timeline(batch, theme=theme),
                "batch",
                "The traces of the last batch, a row each: their sampled tokens in order, coloured"
                " by the policy version that sampled them.",
                "The last batch: a row is a trace, its sampled tokens run from left to right, and"
                " the colour says which policy sampled them. Gaps part the completions.",
            )
        )
    return "\n".join(blocks)


_CAPTIONS = {
    "env": "by environment",
    "agent": "by agent",
    "turn": "by turn",
    "index_bin": "by place in the completion",
    "completion_bin": "by length of the completion",
}


def _whence(study: Study) -> str:
    if not study.breakdowns:
        return _missing("Nothing but the steps was counted.")
    blocks = [_waits(study)]
    counts = study.index_counts
    if counts is not None and not counts.is_empty():
        blocks.append(
            _figure(
                lambda theme: draw_by_index(counts, theme=theme),
                "place",
                "Token age by the place of the token in its completion.",
                "The age of a token by its place in the completion: tokens at the end were sampled"
                " later, by newer policies.",
            )
        )
    for name in ("index_bin", "completion_bin", "turn", "agent"):
        table = study.breakdowns.get(name)
        if table is not None and (table.height > 1 or name == "index_bin"):
            blocks.append(_table(table, columns_of(table), _CAPTIONS[name], f"by-{name}"))
    if study.by_reward is not None and study.by_reward["reward_quantile"].count() > 1:
        columns = reward_columns(study.by_reward)
        blocks.append(_table(study.by_reward, columns, "by reward of the trace", "by-reward"))
    elif study.by_reward is not None:
        blocks.append(_missing("Ages by reward: no rewards, or all traces have the same."))
    if study.versions is not None:
        blocks.append(
            _table(study.versions, versions_columns(study.versions), "versions a trace", "versions")
        )
    return "\n".join(blocks)


def _waits(study: Study) -> str:
    """The tokens' age in flight and in queue, in a sentence."""
    table = study.metrics
    known = table.filter(pl.col("off_policy/token/in_flight/mean").is_not_null())
    if known.is_empty():
        return _missing("In flight and in queue: no episode tells its policies.")
    weight = pl.col("labelled_tokens")
    flight, queue = known.select(
        (pl.col(f"off_policy/token/{part}/mean") * weight).sum() / weight.sum()
        for part in ("in_flight", "in_queue")
    ).row(0)
    return (
        f"<p>Of the mean token age, {mean(flight)} versions passed in flight, while the token's"
        f" episode was still being generated, and {mean(queue)} in queue, while it waited for its"
        " batch.</p>"
    )


def _mismatch(study: Study, key: str = "kl") -> str:
    table = study.mismatch
    if table is None:
        return _missing(NO_TRAINER)
    floor = table["kl_floor"].max() or 0.0
    rounded = (
        f" The stored logprobs are rounded: equal policies would show {floor:.1g}."
        if isinstance(floor, float) and floor > 0
        else ""
    )
    figure = _figure(
        lambda theme: draw_mismatch(table, theme=theme),
        key,
        "Mismatch KL between engine and trainer by token age, with intervals. "
        + "; ".join(
            f"age {row['age']}: {row['mismatch_kl']:.3g}"
            for row in table.filter(pl.col("age").is_not_null(), pl.col("tokens") > 0).to_dicts()
        ),
        "The mean of exp(r) - r - 1 over the tokens of an age, r being the trainer's logprob less"
        f" the engine's. Bars: 95% bootstrap intervals over episodes.{rounded}",
    )
    fold = _table(table, mismatch_columns(table), "mismatch by age", f"{key}-table")
    return f"{figure}\n{fold}"


def _limits(study: Study, key: str = "mask") -> str:
    table = study.masking
    if table is None or not table["tokens"].sum():
        return _missing("No tokens that a batch trained on were counted by trace.")
    figure = _figure(
        lambda theme: draw_masking(table, theme=theme),
        key,
        "Share of the tokens that each policy keeps at each threshold, and how reward and length of"
        " what is kept differ from all of it. The table has the figures.",
        "Three policies in use: mask single tokens older than the threshold, drop traces that hold"
        " an older token, drop episodes that were dispatched more versions before their batch."
        " Below, the bias: the mean reward and the length of completions of what is kept, against"
        " those of all.",
    )
    fold = _table(table, masking_columns(table, NAMES), "by policy and threshold", f"{key}-table")
    return f"{figure}\n{fold}"


def _envs(study: Study) -> str:
    table = study.breakdowns.get("env")
    if table is None:
        return _missing("Nothing was counted by environment.")
    blocks = []
    by_env = study.by_env
    if table.height > 1 and by_env is not None:
        blocks.append(
            _figure(
                lambda theme: draw_staleness(by_env, theme=theme),
                "envs",
                "Mean token age and episode staleness of each environment over the steps.",
                "The mean token age of each environment, and the mean staleness of its episodes.",
            )
        )
    blocks.append(_table(table, columns_of(table), "by environment", "by-env", opened=True))
    return "\n".join(blocks)


def _read(study: Study) -> str:
    listed = "".join(
        f"<li><code>{_text(os.fspath(source))}</code></li>" for source in study.sources
    )
    what = f"<ul>{listed}</ul>" if listed else "<p>Nothing named.</p>"
    if len(study.sources) > 8:
        many = f"{len(study.sources):,} sources"
        what = f"<details><summary>{many}</summary>{what}</details>"
    said = "".join(f"<li>{_text(note)}</li>" for note in study.notes)
    return what + (f'\n<ul class="notes">{said}</ul>' if said else "")


# --- two runs -----------------------------------------------------------------------------------


def _compare(one: Study, other: Study) -> str:
    names = _two_names(one, other)
    answers = [
        f"<tr><th scope='row' class='text'>{_text(a.question)}</th>"
        + "".join(f"<td class='text words'>{_text(f.answer)} {_text(f.why)}</td>" for f in (a, b))
        + "</tr>"
        for a, b in zip(findings(one), findings(other), strict=True)
    ]
    heads = "".join(f"<th scope='col' class='text'>{_text(name)}</th>" for name in names)
    blocks = [
        '<div class="scroll" tabindex="0" role="region" aria-label="The answers of both runs">',
        f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(answers)}</tbody></table>",
        "</div>",
    ]
    if "step" in one.metrics.columns and "step" in other.metrics.columns:
        frames = [
            study.metrics.filter(pl.col("step").is_not_null()).select(
                "step", pl.lit(name).alias("run"), pl.exclude("step")
            )
            for name, study in zip(names, (one, other), strict=True)
        ]
        both = pl.concat(frames).sort("step", maintain_order=True)
        blocks.append(
            _figure(
                lambda theme: draw_staleness(both, theme=theme),
                "two",
                "Mean token age and episode staleness of both runs over the steps. The table has"
                " the figures.",
                "The mean token age of each run, and the mean staleness of its episodes.",
            )
        )
        blocks.append(_table(both, columns_of(both), "by step and run", "two-table"))
    for what, key, section in (
        ("Mismatch by age", "kl", _mismatch),
        ("What a limit would do", "mask", _limits),
    ):
        halves = [
            f"<div>\n<h3>{what}: {_text(name)}</h3>\n{section(study, f'two-{key}-{k}')}\n</div>"
            for k, (name, study) in enumerate(zip(names, (one, other), strict=True))
        ]
        blocks += ['<div class="pair">', *halves, "</div>"]
    return "\n".join(blocks)


def _two_names(one: Study, other: Study) -> tuple[str, str]:
    """What two runs are called: their paths, without the folders that both begin with."""
    paths = [
        ", ".join(os.path.normpath(os.fspath(source)) for source in study.sources) or "-"
        for study in (one, other)
    ]
    if paths[0] == paths[1]:
        return f"{paths[0]} (first)", f"{paths[1]} (second)"
    if len(one.sources) == len(other.sources) == 1:
        parts = [path.split(os.sep) for path in paths]
        pairs = enumerate(zip(*parts, strict=False))
        shared = next((k for k, (a, b) in pairs if a != b), min(map(len, parts)) - 1)
        paths = [os.sep.join(part[shared:]) for part in parts]
    return paths[0], paths[1]


# --- parts --------------------------------------------------------------------------------------


def _missing(text: str) -> str:
    return f'<p class="missing">{_text(text)}</p>'


def _figure(
    draw: Callable[[Theme], Any], key: str, label: str, caption: str, image: bool = False
) -> str:
    """A figure in the colours of the page; with an `image`, in both colour schemes."""
    if image:
        both = inline_svg(draw, key=key, label=label, themes=[LIGHT, DARK])
        drawn = [
            f'<div class="{name}">{svg}</div>'
            for name, svg in zip(("light", "dark"), both, strict=True)
        ]
    else:
        drawn = inline_svg(draw, key=key, label=label)
    return "\n".join(["<figure>", *drawn, f"<figcaption>{caption}</figcaption>", "</figure>"])


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


def _describe_last(with_ages: pl.DataFrame) -> str:
    step: Any = with_ages["step"].max()
    ages = with_ages.filter(pl.col("step") == step).group_by("age").agg(pl.col("tokens").sum())
    most = ages.sort("tokens", "age", descending=[True, False]).head(_AGES_SAID)
    shares = [f"age {age}: {percent(n / ages['tokens'].sum())}" for age, n in most.iter_rows()]
    more = f" and {ages.height - len(shares)} more ages" if ages.height > len(shares) else ""
    return f"Share of the labelled tokens of step {step} by age. {'; '.join(shares)}{more}."


_AGES_SAID = 12
"""What a text alternative names of the ages of a step."""


def _describe_steps(metrics: pl.DataFrame) -> str:
    def span(column: str, write: Callable[[Any], str]) -> str:
        values = metrics[column].drop_nulls()
        if values.is_empty():
            return "unknown"
        low, high = write(values.min()), write(values.max())
        return low if low == high else f"{low} to {high}"

    return (
        "Token age and episode staleness over the training steps."
        f" Mean token age of a step: {span('off_policy/token/mean', mean)} policy versions;"
        f" oldest token: {span('off_policy/token/max', integer)};"
        f" mean episode staleness: {span('off_policy/mean', mean)};"
        f" coverage: {span('coverage', percent)}. The table has the figures."
    )


def _table(
    frame: pl.DataFrame,
    columns: Sequence[Column],
    name: str,
    key: str,
    note: str = "",
    opened: bool = False,
) -> str:
    """A table behind a fold."""
    upper: list[str] = []
    lower: list[str] = []
    for start, stop, group in headings_of(columns):
        if group:
            upper.append(f'<th colspan="{stop - start}" scope="colgroup">{group}</th>')
        for column in columns[start:stop]:
            hint = f' title="{html.escape(column.hint)}"' if column.hint else ""
            side = ' class="text"' if column.text else ""
            rows = "" if group else ' rowspan="2"'
            cell = f'<th scope="col"{rows}{side}{hint}>{html.escape(column.name)}</th>'
            (lower if group else upper).append(cell)
    body = []
    for row in frame.iter_rows(named=True):
        cells = []
        for column in columns:
            tag, scope = ("th", ' scope="row"') if column.key else ("td", "")
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
            f"<details{' open' if opened else ''}>",
            f'<summary id="{key}">Table {_text(name)}</summary>',
            f'<div class="scroll{tall}" tabindex="0" role="region" aria-labelledby="{key}">',
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
            *([f'<p class="key">{note}</p>'] if note else []),
            "</details>",
        ]
    )


def _data(study: Study, title: str) -> str:
    def rows(frame: pl.DataFrame | None) -> list[dict[str, Any]] | None:
        if frame is None:
            return None
        return [
            {name: _strict(value) for name, value in row.items()}
            for row in frame.iter_rows(named=True)
        ]

    content = {
        "title": title,
        "sources": [os.fspath(source) for source in study.sources],
        "notes": list(study.notes),
        "findings": [f"{f.question} {f.answer} {f.why}" for f in findings(study)],
        "metrics": rows(study.metrics),
        "age_counts": {c.name: [_strict(v) for v in c] for c in study.counts.iter_columns()},
        "masking": rows(study.masking),
        "mismatch": rows(study.mismatch),
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), default=str)
    # In an HTML script element only "<" can end or nest anything; the rest is for old parsers.
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return f'<script type="application/json" id="traceage-data">{text}</script>'


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


_HOW_TO_READ = """<p>The <em>age</em> of a token is the policy version that its batch trained,
less the version that sampled the token: 0 is on-policy, 3 means that three updates came in between.
A negative age is a fault in the labelling. <em>Coverage</em> is the share of the sampled tokens
that carry a version; tokens without one have no age and are in no mean, so read every figure beside
its coverage. The <em>staleness</em> of an episode counts updates since its first token: those
<em>in flight</em> came while it was still being generated, those <em>in queue</em> came while it
was finished and waited for its batch. A completion is <em>mixed</em> when more than one policy
sampled it. <em>Mismatch KL</em> compares the logprob that the engine sampled a token with to the
one that the trainer gave it: 0 where both agree.</p>"""

_TABLE_KEY = (
    "Ages and staleness in policy versions. Token ages are over the labelled tokens. Not shipped:"
    " episodes that arrived at this step and that no batch took. In-flight, in-queue: shares of the"
    " mean episode staleness. Mixed: share of the completions. A dash: no value."
)
