"""Spans -> what a limit on staleness would leave to train on, and how that differs from all of it.

Three policies are in use: (`token`) mask single tokens that are older than `k`; (`trace`) drop a
trace whose oldest token is older than `k`; (`episode`) drop an episode that was dispatched more
than `k` versions before its batch. All thresholds of all three come from two small tables of one
pass: a row a trace, and the age counts of each trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from traceage.ages import age
from traceage.schema import COUNT
from traceage.traces import TraceTally

POLICIES = ("token", "trace", "episode")

_MOST_THRESHOLDS = 32
"""Thresholds that are tried where none are given."""


def staleness_mask(tokens: pl.DataFrame | pl.LazyFrame, max_age: int) -> pl.Series:
    """Which tokens are no older than `max_age`: what a trainer that masks single tokens keeps.

    `tokens` is a tokens table, or any frame with `age`, or with `training_version` and `version`.
    Returns a Boolean series, a value a row, without nulls: a token that has no age is kept, for
    nothing says that it is old.

    Raises `ValueError` where neither is a column.

    >>> import polars as pl
    >>> staleness_mask(pl.DataFrame({"age": [0, 3, None, -1]}), max_age=2).to_list()
    [True, False, True, True]
    """
    there = tokens.collect_schema().names()
    if "age" not in there and not {"training_version", "version"} <= set(there):
        raise ValueError(
            "the tokens table has neither `age` nor `training_version` and `version`; it has "
            f"{', '.join(there)}"
        )
    of_token = pl.col("age") if "age" in there else age()
    kept = (of_token <= max_age).fill_null(True).alias("staleness_mask")
    return tokens.lazy().select(kept).collect().to_series()


def masking(
    spans: pl.LazyFrame | pl.DataFrame,
    max_age: Sequence[int] | None = None,
    by: Sequence[str] = (),
) -> pl.DataFrame:
    """What each threshold of each policy would keep, and the bias of what it keeps.

    Args:
        spans: a spans table, or a selection of it that keeps traces whole. What no batch took is
            left out: it was not trained on.
        max_age: the thresholds, in policy versions; by default every whole number from 0 to the
            age from which on nothing is lost, up to 32 of them evenly spread.
        by: columns that make a group: any of `traceage.traces.OF_TRACE`, which a
            trace has one value of.

    Returns:
        A row a group, policy and threshold, in that order: the columns of `by`; `policy`, one of
        `token` (mask tokens older than `max_age`), `trace` (drop traces whose oldest token is),
        `episode` (drop episodes whose staleness, `training_version - policy_start`, is);
        `max_age`; then

        - `tokens`, `kept_tokens` (Int64), `kept_share`: sampled tokens. A token without an age
          counts as kept, as does an episode whose record has no `run`; an episode whose `run` names
          no policy (a frozen one) has staleness 0;
        - `traces`, `lost_traces`: those that have tokens, and of them those that keep none;
        - `groups`, `lost_groups`: groups of rollouts of one task in one batch (`step`,
          `group_id`), and those that keep no trace; `small_groups`: those that had two episodes or
          more and are left with fewer than two, lost ones among them. Traces without tokens count
          in no group;
        - `reward/all`, `reward/kept`: means over scored traces; `turns/...` (completions of a
          trace): over traces; `completion_tokens/...` (sampled tokens of a completion): over
          completions. Of what is kept, a trace and its completions count with the share of its
          tokens that is. Null where nothing is kept, or nothing scored.

    Raises:
        ValueError: for any other `by`.

    >>> import traceage as ta
    >>> table = masking(ta.scan_spans("data/real-dump"), max_age=[1, 3])
    >>> table.select("policy", "max_age", pl.col("kept_share").round(3), "lost_traces").rows()
    [('token', 1, 0.721, 0), ('token', 3, 0.986, 0), ('trace', 1, 0.308, 39),
     ('trace', 3, 0.921, 3), ('episode', 1, 0.308, 39), ('episode', 3, 0.921, 3)]
    """
    return masking_of(TraceTally.of(spans, by), max_age)


def masking_of(tally: TraceTally, max_age: Sequence[int] | None = None) -> pl.DataFrame:
    """The table of `masking`."""
    traces, ages = tally.traces(), tally.ages()
    names = [f"by:{name}" for name in tally.by]
    thresholds = thresholds_of(traces) if max_age is None else list(dict.fromkeys(max_age))
    tables = []
    for policy in POLICIES:
        for k in thresholds:
            if policy == "token":
                old = ages.filter(pl.col("age") > k).group_by(":trace")
                masked = old.agg(pl.col("tokens").sum().alias("masked"))
                limited = traces.join(masked, on=":trace", how="left", maintain_order="left")
                kept = pl.col("tokens") - pl.col("masked").fill_null(0)
            else:
                limited = traces
                oldest = pl.col("oldest" if policy == "trace" else "staleness")
                kept = pl.col("tokens") * (oldest <= k).fill_null(True)
            figures = _kept(limited.with_columns(kept.alias("kept")), names)
            said = figures.select(
                *(pl.col(name).alias(name.removeprefix("by:")) for name in names),
                pl.lit(policy).alias("policy"),
                pl.lit(k, pl.Int32).alias("max_age"),
                pl.exclude(names),
            )
            tables.append(said)
    if not tables:
        raise ValueError("max_age holds no threshold")
    order = pl.Enum(POLICIES)
    return pl.concat(tables).sort(
        *tally.by, pl.col("policy").cast(order), "max_age", nulls_last=True
    )


def thresholds_of(traces: pl.DataFrame) -> list[int]:
    """0 and on to the age from which on no policy loses anything, thinned out where too many."""
    most: int = traces.select(pl.max_horizontal(pl.col("oldest", "staleness").max(), 0)).item()
    every = max(1, -(-most // (_MOST_THRESHOLDS - 1)))
    return sorted({*range(0, most + 1, every), most})


def _kept(traces: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """What is left of each group of traces, of which `kept` tokens each are."""
    groups = (
        traces.drop_nulls(":group")
        .group_by(*names, ":group")
        .agg(
            pl.col(":episode").n_unique().alias("members"),
            pl.col(":episode").filter(pl.col("kept") > 0).n_unique().alias("left"),
        )
    )
    all_of_it = pl.col("tokens") / pl.col("tokens")
    share = pl.col("kept") / pl.col("tokens")
    parts = {
        "reward": ("reward", pl.col("reward").is_not_null()),
        "completion_tokens": ("tokens", pl.col("turns")),
        "turns": ("turns", pl.lit(1)),
    }
    of_traces = [
        pl.col("tokens").sum(),
        pl.col("kept").sum().cast(COUNT).alias("kept_tokens"),
        pl.len().cast(COUNT).alias("traces"),
        (pl.col("kept") == 0).sum().cast(COUNT).alias("lost_traces"),
        *(
            _ratio(pl.col(top) * weight, bottom * weight).alias(f"{name}/{of}")
            for name, (top, bottom) in parts.items()
            for of, weight in (("all", all_of_it), ("kept", share))
        ),
    ]
    of_groups = [
        pl.len().cast(COUNT).alias("groups"),
        (pl.col("left") == 0).sum().cast(COUNT).alias("lost_groups"),
        ((pl.col("members") > 1) & (pl.col("left") < 2)).sum().cast(COUNT).alias("small_groups"),
    ]
    if names:
        table = traces.group_by(names).agg(of_traces)
        table = table.join(
            groups.group_by(names).agg(of_groups), on=names, how="left", nulls_equal=True
        ).with_columns(pl.col("groups", "lost_groups", "small_groups").fill_null(0))
    else:
        table = traces.select(of_traces).hstack(groups.select(of_groups))
    share_kept = pl.when(pl.col("tokens") > 0).then(pl.col("kept_tokens") / pl.col("tokens"))
    return table.select(
        *names,
        "tokens",
        "kept_tokens",
        share_kept.alias("kept_share"),
        "traces",
        "lost_traces",
        "groups",
        "lost_groups",
        "small_groups",
        *(f"{n}/{of}" for n in ("reward", "completion_tokens", "turns") for of in ("all", "kept")),
    )


def _ratio(top: pl.Expr, bottom: pl.Expr) -> pl.Expr:
    """`sum(top) / sum(bottom)`; null where that is 0 / 0."""
    return pl.when(bottom.sum() > 0).then(top.sum() / bottom.sum())
