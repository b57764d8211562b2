"""Each answer of a study in each of its cases, from frames made by hand and from stored runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from test_report import Step, counts_of, metrics_of, negative, ten, unlabelled

import traceage as ta
from traceage.figures.costs import NAMES
from traceage.mismatch import MismatchTally, Trend
from traceage.report.words import NO_TRAINER, Finding, findings
from traceage.study import Study, read_study

RUN = Path(__file__).parent.parent / "data" / "capture"

STALE, WORSE, MISMATCH, LIMIT, LABELS = range(5)


def study_of(steps: list[Step], **more: Any) -> Study:
    return Study(metrics_of(steps), counts_of(steps), **more)


def say(question: int, study: Study) -> Finding:
    return findings(study)[question]


def test_the_questions_are_always_the_same() -> None:
    for study in (study_of(ten()), study_of([]), read_study(RUN, quiet=True)):
        assert [found.question for found in findings(study)] == [
            "How stale were the tokens?",
            "Is it getting worse?",
            "Does mismatch grow with age?",
            "What would a limit cost?",
            "Is anything wrong with the labels?",
        ]


# --- how stale ----------------------------------------------------------------------------------


def test_how_stale() -> None:
    steps = [
        Step(1, {0: 60, 1: 20}, flight=(0, 0, 1, 1), queue=(0, 0, 0, 0), mixed=3),
        Step(2, {1: 15, 9: 5}, flight=(2, 2, 2, 2), queue=(1, 1, 1, 1), mixed=6),
    ]
    assert say(STALE, study_of(steps)) == Finding(
        "How stale were the tokens?",
        "0.80 policy versions in the mean.",
        "60.0% of the tokens were on-policy (age 0), half of all were at most 0 old, 95% at most 1,"
        " the oldest 9. 37.5% of the completions mix versions. Episodes were 1.75 versions stale in"
        " the mean, 71.4% of it in flight.",
    )


def test_how_stale_without_episodes_that_tell_their_policies() -> None:
    found = say(STALE, study_of([Step(1, {2: 10}, flight=None)]))
    assert found.answer == "2.00 policy versions in the mean."
    assert found.why.startswith("0% of the tokens were on-policy (age 0)")
    assert "Episodes" not in found.why


def test_how_stale_of_a_run_on_policy() -> None:
    found = say(STALE, study_of([Step(1, {0: 10}, flight=(0,) * 4, queue=(0,) * 4, mixed=0)]))
    assert found.answer == "0.00 policy versions in the mean."
    assert found.why.startswith("100% of the tokens were on-policy")
    assert found.why.endswith("Episodes were 0.00 versions stale in the mean.")


@pytest.mark.parametrize("steps", [[], unlabelled()])
def test_how_stale_cannot_be_told(steps: list[Step]) -> None:
    found = say(STALE, study_of(steps))
    assert (found.answer, found.why) == ("Not told.", "No token has an age.")


# --- getting worse ------------------------------------------------------------------------------


def over_time(means: Sequence[float]) -> Study:
    """Steps whose mean token ages are these, to 1%."""
    steps = [
        Step(n, {0: round(1000 * (10 - mean)), 10: round(1000 * mean)})
        for n, mean in enumerate(means, 1)
    ]
    return study_of(steps)


BEGIN = [0.0, 0.5, 1.0, 1.0]
"""A run starts with nothing in flight: this part has no say."""


@pytest.mark.parametrize(
    ("means", "answer"),
    [
        ([*BEGIN, 1.0, 1.1, 0.9, 1.0, 3.0, 3.1, 2.9, 3.0], "Yes."),
        ([*BEGIN, 3.0, 3.1, 2.9, 3.0, 1.0, 1.1, 0.9, 1.0], "No, it is getting better."),
        ([*BEGIN, 1.0, 1.1, 0.9, 1.0, 1.1, 1.0, 1.0, 0.9], "No."),
        ([*BEGIN, 1.0, 3.0, 0.5, 2.0, 2.0, 4.0, 0.5, 2.0], "No."),  # steps differ more than that
        ([*BEGIN, 2.0, 2.0, 2.0, 2.0, 2.04, 2.04, 2.04, 2.04], "No."),  # less than a twentieth
        ([0, 9, 0, 9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], "No."),
        ([9.0] * 3 + [1.0] * 3 + [2.0] * 3, "Yes."),
    ],
)
def test_getting_worse(means: list[float], answer: str) -> None:
    found = say(WORSE, over_time(means))
    third = len(means) // 3
    before, after = (sum(part) / third for part in (means[third : 2 * third], means[-third:]))
    assert found.answer == answer
    assert f"was {before:.2f} over the middle third of the steps" in found.why
    assert f"and {after:.2f} over the last." in found.why
    assert found.why.endswith("That is within what steps differ by.") == (answer == "No.")


@pytest.mark.parametrize("n", [0, 1, 8])
def test_too_early_to_tell(n: int) -> None:
    found = say(WORSE, over_time([0.5] * n))
    assert found.answer == "Too early to tell."
    assert found.why == f"It takes nine steps that have tokens with ages; the run has {n}."


def test_steps_without_ages_have_no_say() -> None:
    """Nor has the order in which the rows stand."""
    aged = [Step(n, {n // 7: 100}) for n in range(1, 21)]
    bare = [Step(n, unlabelled=5) for n in range(21, 40)]
    found, again = (
        say(WORSE, study_of(steps)) for steps in ([*aged, *bare], [*reversed(bare), *aged[::-1]])
    )
    assert found == again
    assert found.answer == "Yes."
    assert say(WORSE, study_of([*aged[:8], *bare])).why.endswith("the run has 8.")


def test_without_steps_it_is_too_early() -> None:
    metrics = metrics_of(ten()).drop("step", "training_version")
    assert say(WORSE, Study(metrics, counts_of(ten()))).answer == "Too early to tell."


# --- mismatch -----------------------------------------------------------------------------------


def mismatch_of(tokens: dict[int | None, int]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "age": list(tokens),
            "tokens": list(tokens.values()),
            "mismatch_kl": [1e-4 * (k + 1) for k in range(len(tokens))],
        },
        schema_overrides={"age": pl.Int32},
    )


AGES: dict[int | None, int] = {0: 500, 1: 400, 2: 100}


@pytest.mark.parametrize(
    ("trend", "answer"),
    [
        (Trend(1e-3, 1e-4, 2e-3), "Yes."),
        (Trend(1e-3, -1e-4, 2e-3), "No."),
        (Trend(0.0, 0.0, 0.0), "No."),
        (Trend(-1e-3, -2e-3, 1e-4), "No."),
        (Trend(-1e-3, -2e-3, -1e-4), "No, it falls."),
    ],
)
def test_mismatch_by_its_interval(trend: Trend, answer: str) -> None:
    found = say(MISMATCH, study_of(ten(), mismatch=mismatch_of(AGES), trend=trend))
    assert found.answer == answer
    assert "0.0001 nats a token at age 0 and 0.0003 at age 2;" in found.why
    interval = f"{trend.low:.2g} to {trend.high:.2g}"
    assert f"slope over all tokens is {trend.slope:.2g} a policy version" in found.why
    assert f"(99% interval over episodes: {interval})" in found.why
    assert found.why.endswith("The interval holds 0.") == (answer == "No.")


def test_mismatch_is_not_quoted_of_few_tokens() -> None:
    trend = Trend(1e-3, 1e-4, 2e-3)
    few = mismatch_of({None: 900, **AGES, 7: 5, 8: 0})
    assert " at age 2;" in say(MISMATCH, study_of(ten(), mismatch=few, trend=trend)).why
    # Unless there is nothing else to quote.
    fewer = mismatch_of({0: 5000, 1: 3})
    found = say(MISMATCH, study_of(ten(), mismatch=fewer, trend=trend))
    assert found.answer == "Yes."
    assert " at age 0 and 0.0002 at age 1;" in found.why


@pytest.mark.parametrize(
    ("tokens", "trend"),
    [(AGES, None), ({0: 10}, Trend(1.0, 0.5, 2.0)), ({None: 10}, None), ({0: 10, 1: 0}, None)],
)
def test_mismatch_of_one_age_or_one_episode(
    tokens: dict[int | None, int], trend: Trend | None
) -> None:
    found = say(MISMATCH, study_of(ten(), mismatch=mismatch_of(tokens), trend=trend))
    assert found.answer == "Not told."
    assert found.why == "The tokens have one age, or are of one episode."


def test_mismatch_without_a_trainer() -> None:
    found = say(MISMATCH, study_of(ten()))
    assert (found.answer, found.why) == ("Not told.", NO_TRAINER)


def test_mismatch_of_a_trained_run_grows() -> None:
    assert say(MISMATCH, read_study(RUN, quiet=True)).answer == "Yes."


@pytest.fixture(scope="module")
def tokens() -> pl.DataFrame:
    columns = ["age", "episode_id", "logprob", "trainer_logprob", "trainer_mismatch_kl"]
    order = ["trace_id", "node", "index"]
    return ta.scan_tokens(RUN, [*columns, *order], quiet=True).collect().sort(order)


@pytest.mark.parametrize("seed", range(5))
def test_mismatch_of_meaningless_ages_does_not_grow(tokens: pl.DataFrame, seed: int) -> None:
    """The same run, each token with the age of any other."""
    ages = np.random.default_rng(seed).permutation(tokens["age"].to_numpy())
    tally = MismatchTally()
    tally.add(tokens.with_columns(pl.Series("age", ages)))
    trend = tally.trend(confidence=0.99)
    assert trend is not None
    found = say(MISMATCH, study_of(ten(), mismatch=tally.table(), trend=trend))
    assert found.answer == "No."


# --- limits -------------------------------------------------------------------------------------


def masking_of(
    kept: dict[str, list[float]], *, groups: int = 5, reward: float | None = 0.5
) -> pl.DataFrame:
    """A table of `masking` whose policies keep these shares at the thresholds 0, 1, 2, ..."""
    rows = [
        {
            "policy": policy,
            "max_age": k,
            "tokens": 1000,
            "kept_tokens": round(1000 * share),
            "kept_share": share,
            "traces": 40,
            "lost_traces": round(40 * (1 - share)),
            "groups": groups,
            "lost_groups": round(groups * (1 - share)),
            "reward/all": reward,
            "reward/kept": None if reward is None else reward - k / 100,
        }
        for policy in NAMES
        for k, share in enumerate(kept[policy])
    ]
    return pl.DataFrame(rows)


SOME = {"token": [0.4, 0.85, 0.95, 1.0], "trace": [0.1, 0.3, 0.6, 1.0], "episode": [0.0] * 4}


def test_a_limit_costs_some() -> None:
    found = say(LIMIT, study_of(ten(), masking=masking_of(SOME)))
    assert found.answer == "max_age = 2 would keep 95.0% of the tokens."
    assert found.why == (
        "Dropping whole traces that hold an older token would keep 60.0% of the tokens and lose 16"
        " of 40 traces and 2 of 5 groups; dropping episodes that were dispatched earlier would keep"
        " 0%. The mean reward is 0.500, and 0.480 among the traces that would be kept."
    )
    assert not found.fault


def test_a_limit_without_groups_and_rewards_does_not_speak_of_them() -> None:
    found = say(LIMIT, study_of(ten(), masking=masking_of(SOME, groups=0, reward=None)))
    assert "lose 16 of 40 traces; dropping" in found.why
    assert "group" not in found.why
    assert "reward" not in found.why


def test_a_limit_that_keeps_a_tenth_short() -> None:
    """Nine tenths are enough; where no threshold keeps them, the highest is named."""
    enough = {**SOME, "token": [0.9, 0.95, 1.0, 1.0]}
    assert say(LIMIT, study_of([], masking=masking_of(enough))).answer.startswith("max_age = 0 ")
    never = {**SOME, "token": [0.1, 0.2, 0.3, 0.4]}
    found = say(LIMIT, study_of([], masking=masking_of(never)))
    assert found.answer == "max_age = 3 would keep 40.0% of the tokens."


def test_nothing_is_older() -> None:
    ones = {policy: [1.0] for policy in NAMES}
    found = say(LIMIT, study_of(ten(), masking=masking_of(ones)))
    assert (found.answer, found.why) == ("Nothing.", "No token is older than 0.")


@pytest.mark.parametrize(
    "masking", [None, masking_of(SOME).with_columns(tokens=pl.lit(0, pl.Int64))]
)
def test_a_limit_of_nothing(masking: pl.DataFrame | None) -> None:
    assert say(LIMIT, study_of(ten(), masking=masking)).answer == "Not told."


def test_a_limit_of_a_stored_run_is_in_its_table() -> None:
    study = read_study(RUN, quiet=True)
    assert study.masking is not None
    found = say(LIMIT, study)
    row = study.masking.filter(pl.col("policy") == "trace", pl.col("max_age") == 2).to_dicts()[0]
    assert found.answer == "max_age = 2 would keep 96.6% of the tokens."
    assert f"lose {row['lost_traces']:,} of {row['traces']:,} traces" in found.why
    assert f"{row['lost_groups']:,} of {row['groups']:,} groups" in found.why


# --- labels -------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_the_labels() -> None:
    found = say(LABELS, study_of([Step(1, {0: 1200}), Step(2, {1: 34})]))
    assert not found.fault
    assert found.answer == "No."
    assert found.why.startswith("Every one of the 1,234 sampled tokens carries a version,")


def test_negative_ages_are_wrong() -> None:
    found = say(LABELS, study_of(negative()))
    assert found.fault
    assert found.answer == "Yes."
    assert found.why == (
        "90 tokens are labelled with a newer policy than the one that their batch trained (a"
        " negative age)."
    )


@pytest.mark.parametrize(("default", "bare"), [(30, 0), (0, 30), (10, 20)])
def test_tokens_without_a_version_are_wrong(default: int, bare: int) -> None:
    study = study_of([Step(1, {0: 70}, unlabelled=30)])
    numbers = {"default_tokens": default, "unlabelled_tokens": bare}
    metrics = study.metrics.with_columns(pl.lit(n).alias(name) for name, n in numbers.items())
    found = say(LABELS, replace(study, metrics=metrics))
    assert found.fault
    assert found.answer == "Yes."
    assert found.why == (
        f"30.0% of the sampled tokens carry no version ({default} are labelled default, {bare} not"
        " at all): they have no age, and are in no figure of ages."
    )


def test_both_faults_are_told() -> None:
    why = say(LABELS, study_of([*negative(), Step(9, unlabelled=5)])).why
    assert "90 tokens are labelled with a newer policy" in why
    assert "0.1% of the sampled tokens carry no version" in why


def test_no_tokens_have_no_labels() -> None:
    found = say(LABELS, study_of([]))
    assert (found.answer, found.fault) == ("Not told.", False)
