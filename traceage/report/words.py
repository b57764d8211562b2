"""A study -> what it says, in sentences: the answers that the page opens with."""

from __future__ import annotations

import math
from typing import NamedTuple

import polars as pl

from traceage.counts import age_figures, merge_counts
from traceage.figures.style import percent
from traceage.report.table import mean
from traceage.study import LOOKED_AT, Study


class Finding(NamedTuple):
    """One answer."""

    question: str
    answer: str
    """Its first words, which can stand alone."""
    why: str
    fault: bool = False
    """Whether it tells of something that is wrong."""


def findings(study: Study) -> list[Finding]:
    """The answers of a study: how stale, getting worse, mismatch, the cost of a limit, the labels.

    >>> from traceage import read_study
    >>> for finding in findings(read_study("data/capture")):
    ...     print(f"{finding.question} {finding.answer}")
    How stale were the tokens? 1.16 policy versions in the mean.
    Is it getting worse? No.
    Does mismatch grow with age? Yes.
    What would a limit cost? max_age = 2 would keep 96.6% of the tokens.
    Is anything wrong with the labels? No.
    """
    return [_stale(study), _worse(study), _mismatch(study), _limit(study), _labels(study)]


def _stale(study: Study) -> Finding:
    question = "How stale were the tokens?"
    ages = merge_counts(study.counts.select("age", "tokens"))
    if ages.is_empty():
        return Finding(question, "Not told.", "No token has an age.")
    figures = age_figures(ages, []).row(0, named=True)
    fresh = int(ages.filter(pl.col("age") == 0)["tokens"].sum()) / int(ages["tokens"].sum())
    why = [
        f"{percent(fresh)} of the tokens were on-policy (age 0), half of all were at most"
        f" {figures['off_policy/token/p50']} old, 95% at most {figures['off_policy/token/p95']},"
        f" the oldest {figures['off_policy/token/max']}."
    ]
    metrics = study.metrics
    if completions := int(metrics["sampled_nodes"].sum()):
        mixed = int(metrics["mixed_nodes"].sum()) / completions
        why.append(f"{percent(mixed)} of the completions mix versions.")
    weight = pl.col("episodes").filter(pl.col("off_policy/mean").is_not_null())
    of_all, flight = metrics.select(
        (pl.col(name).drop_nulls() * weight).sum() / weight.sum()
        for name in ("off_policy/mean", "off_policy/in_flight/mean")
    ).row(0)
    if of_all is not None and math.isfinite(of_all):
        share = f", {percent(flight / of_all)} of it in flight" if of_all > 0 else ""
        why.append(f"Episodes were {mean(of_all)} versions stale in the mean{share}.")
    answer = f"{mean(figures['off_policy/token/mean'])} policy versions in the mean."
    return Finding(question, answer, " ".join(why))


def _worse(study: Study) -> Finding:
    question = "Is it getting worse?"
    means = (
        study.metrics.filter(pl.col("step").is_not_null()).sort("step")["off_policy/token/mean"]
        if "step" in study.metrics.columns
        else pl.Series([], dtype=pl.Float64)
    ).drop_nulls()
    # A run starts with nothing in flight: its first third says little.
    third = len(means) // 3
    if third < 3:
        why = f"It takes nine steps that have tokens with ages; the run has {len(means)}."
        return Finding(question, "Too early to tell.", why)
    middle, last = means[third : 2 * third], means[-third:]
    before, after = (float(part.to_numpy().mean()) for part in (middle, last))
    spread = math.sqrt(sum(float(part.to_numpy().var(ddof=1)) / third for part in (middle, last)))
    said = (
        f"The mean token age of a step was {mean(before)} over the middle third of the steps and"
        f" {mean(after)} over the last."
    )
    if abs(after - before) <= max(3 * spread, 0.05 * abs(before)):
        return Finding(question, "No.", f"{said} That is within what steps differ by.")
    return Finding(question, "Yes." if after > before else "No, it is getting better.", said)


def _mismatch(study: Study) -> Finding:
    question = "Does mismatch grow with age?"
    if study.mismatch is None:
        return Finding(question, "Not told.", NO_TRAINER)
    rows = study.mismatch.filter(pl.col("age").is_not_null(), pl.col("tokens") > 0)
    # What little of the oldest tokens says is in the figure, and not quoted.
    many = rows.filter(pl.col("tokens") >= 0.01 * pl.col("tokens").sum()).sort("age")
    if study.trend is None or rows.height < 2:
        return Finding(question, "Not told.", "The tokens have one age, or are of one episode.")
    ends = many if many.height > 1 else rows.sort("age")
    first, last = ends.row(0, named=True), ends.row(-1, named=True)
    slope, low, high = (f"{value:.2g}" for value in study.trend)
    said = (
        f"Mismatch KL is {first['mismatch_kl']:.2g} nats a token at age {first['age']} and"
        f" {last['mismatch_kl']:.2g} at age {last['age']}; the slope over all tokens is {slope} a"
        f" policy version (99% interval over episodes: {low} to {high})."
    )
    if study.trend.low > 0:
        return Finding(question, "Yes.", said)
    if study.trend.high < 0:
        return Finding(question, "No, it falls.", said)
    return Finding(question, "No.", f"{said} The interval holds 0.")


NO_TRAINER = (
    f"No trainer's logprobs stand among the first {LOOKED_AT:,} sampled tokens. A trainer can stamp"
    " them on nodes (trainer_logprobs), append them as annotations of a trace store, or export them"
    " to token_exports beside rollouts."
)


def _limit(study: Study) -> Finding:
    question = "What would a limit cost?"
    if study.masking is None or not study.masking["tokens"].sum():
        return Finding(question, "Not told.", "There are no tokens that a batch trained on.")
    tokens = study.masking.filter(pl.col("policy") == "token").sort("max_age")
    enough = tokens.filter(pl.col("kept_share") >= 0.9)["max_age"]
    k = int(enough.item(0)) if len(enough) else int(tokens["max_age"].item(-1))
    rows = {row["policy"]: row for row in study.masking.filter(pl.col("max_age") == k).to_dicts()}
    kept = percent(rows["token"]["kept_share"])
    if rows["token"]["kept_share"] == rows["trace"]["kept_share"] == 1:
        return Finding(question, "Nothing.", f"No token is older than {k}.")
    trace, episode = rows["trace"], rows["episode"]
    groups = f" and {trace['lost_groups']:,} of {trace['groups']:,} groups"
    said = [
        f"Dropping whole traces that hold an older token would keep {percent(trace['kept_share'])}"
        f" of the tokens and lose {trace['lost_traces']:,} of {trace['traces']:,} traces"
        f"{groups if trace['groups'] else ''}; dropping episodes that were dispatched earlier would"
        f" keep {percent(episode['kept_share'])}."
    ]
    if None not in (trace["reward/kept"], trace["reward/all"]):
        said.append(
            f"The mean reward is {trace['reward/all']:.3f}, and {trace['reward/kept']:.3f} among"
            " the traces that would be kept."
        )
    return Finding(question, f"max_age = {k} would keep {kept} of the tokens.", " ".join(said))


def _labels(study: Study) -> Finding:
    question = "Is anything wrong with the labels?"
    sums = study.metrics.select(
        pl.col("sampled_tokens", "labelled_tokens", "default_tokens", "unlabelled_tokens").sum()
    ).row(0, named=True)
    newer = study.counts.filter(pl.col("age") < 0)["tokens"].sum()
    said = []
    if newer:
        said.append(
            f"{newer:,} tokens are labelled with a newer policy than the one that their batch"
            " trained (a negative age)."
        )
    if missing := sums["sampled_tokens"] - sums["labelled_tokens"]:
        said.append(
            f"{percent(missing / sums['sampled_tokens'])} of the sampled tokens carry no version"
            f" ({sums['default_tokens']:,} are labelled default, {sums['unlabelled_tokens']:,} not"
            " at all): they have no age, and are in no figure of ages."
        )
    if said:
        return Finding(question, "Yes.", " ".join(said), fault=True)
    if not sums["sampled_tokens"]:
        return Finding(question, "Not told.", "There are no sampled tokens.")
    return Finding(
        question,
        "No.",
        f"Every one of the {sums['sampled_tokens']:,} sampled tokens carries a version, and none is"
        " newer than the policy that its batch trained.",
    )
