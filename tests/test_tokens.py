"""The tokens table, token by token against the reference, and what is laid out from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl
import pytest
import reference as ref
from compare import assert_same_frame, assert_same_streams, write_lines, write_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import Extras, Record, Stored, TokenRow
from store_writer import StoreWriter
from strategies import STAMPED, Style, stored_records, styles

import traceage as ta
from traceage.cli import main

Weighting = Literal["nodes", "branches"]

few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
weightings: st.SearchStrategy[Weighting] = st.sampled_from(("nodes", "branches"))


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of one example."""
    with TemporaryDirectory() as name:
        yield Path(name)


def expected(stored: list[Stored], weighting: Weighting) -> list[TokenRow]:
    rows = ref.token_rows(stored)
    return ref.sample_rows(stored, rows) if weighting == "branches" else rows


def at_step(step: int, *records: Record) -> list[Stored]:
    return [Stored(record, step, {}) for record in records]


def scan(path: Path, *records: Record, **options: Any) -> pl.DataFrame:
    """The tokens of some records, written to `path`, a batch of step 7."""
    write_lines(path, records)
    return ta.scan_tokens(path, step=7, **options).collect()


def labels(*runs: tuple[str, int]) -> list[Record]:
    """(label, number of tokens) one after the other."""
    spans = []
    at = 0
    for label, count in runs:
        spans.append({"version": label, "start": at, "end": at + count})
        at += count
    return spans


def node(mask: str, spans: list[Record] | None = None, **more: Any) -> Record:
    """`"..s.s"`: which of the node's tokens were sampled."""
    return {
        "sampled": "s" in mask,
        "token_ids": [100 * len(mask) + i for i in range(len(mask))],
        "mask": [letter == "s" for letter in mask],
        "weight_versions": spans,
        **more,
    }


def trace(*nodes: Record, trace_id: str = "t") -> Record:
    return {"id": trace_id, "nodes": list(nodes)}


# --- against the reference ------------------------------------------------------------------------


@few
@given(stored_records(), weightings, st.sampled_from(["", ".gz", ".zst"]), styles)
def test_every_token_and_stream(
    stored: list[Stored], weighting: Weighting, suffix: str, style: Style
) -> None:
    with folder() as root:
        write_steps(root, stored, suffix=suffix, style=style)
        lazy = ta.scan_tokens(root, weighting=weighting)
        tokens = lazy.collect()
    assert tokens.schema == lazy.collect_schema()
    assert_same_streams(tokens, expected(stored, weighting))
    assert set(tokens["kind"]) <= {"train"}
    assert set(tokens["subset"]) <= {"effective"}
    assert_together(tokens)


def assert_together(tokens: pl.DataFrame) -> None:
    """Sample after sample, node after node, and the tokens of a node in order."""
    keys = ["episode_id", "trace_id", "branch", "node"]
    for width in (2, 3, 4):
        runs = tokens.select(pl.struct(keys[:width]).rle()).to_series()
        assert runs.len() == tokens.select(keys[:width]).n_unique()
    steps = tokens.select(pl.col("index").diff().over(keys)).to_series().drop_nulls()
    assert set(steps) <= {1}


@few
@given(stored_records())
def test_frozen_agents_on_request(stored: list[Stored]) -> None:
    with folder() as root:
        write_steps(root, stored)
        tokens = ta.scan_tokens(root, include_frozen=True).collect()
    assert_same_streams(tokens, ref.token_rows(stored, include_frozen=True))


@few
@given(stored_records(), weightings)
def test_labelled_tokens_alone(stored: list[Stored], weighting: Weighting) -> None:
    with folder() as root:
        write_steps(root, stored)
        tokens = ta.scan_tokens(root, labelled_only=True, weighting=weighting).collect()
    rows = [row for row in expected(stored, weighting) if row.version is not None]
    assert_same_streams(tokens, rows)


@few
@given(stored_records(), st.integers(0, 3))
def test_ages_may_be_negative(stored: list[Stored], version: int) -> None:
    with folder() as root:
        write_steps(root, stored)
        tokens = ta.scan_tokens(root, training_version=version).collect()
    extras: Extras = {"training_version": version}
    assert_same_streams(tokens, ref.token_rows([one._replace(extras=extras) for one in stored]))


@few
@given(stored_records(), weightings, st.data())
def test_pushdown_changes_nothing(
    stored: list[Stored], weighting: Weighting, data: st.DataObject
) -> None:
    """Columns, filters and row limits asked of the scan give what they give of the table."""
    with folder() as root:
        write_steps(root, stored)
        lazy = ta.scan_tokens(root, weighting=weighting)
        whole = lazy.collect()
        columns = data.draw(st.lists(st.sampled_from(whole.columns), min_size=1, unique=True))
        predicate = data.draw(
            st.sampled_from(
                [
                    pl.col("step") == stored[0].step,
                    pl.col("version").is_null(),
                    pl.col("age") > 3,
                    pl.col("context_age") > pl.col("age"),
                    pl.col("context_age").is_null() & (pl.col("step") > 3),
                    (pl.col("completion_tokens") > 4) & (pl.col("context_age") != 2),
                    (pl.col("index") == 0) | (pl.col("position") > 4),
                    pl.col("logprob") < -1.0,
                    pl.col("is_content") & (pl.col("env") == "math"),
                    pl.col("entropy").is_not_null(),
                    pl.col("token_id") % 2 == 0,
                    pl.col("trace_id").is_in(["t-0-0", "bare-1"]),
                    pl.lit(False),
                ]
            )
        )
        limit = data.draw(st.integers(0, 9))
        picked = lazy.filter(predicate).select(columns).collect()
        named = ta.scan_tokens(root, columns, weighting=weighting).collect()
        started = lazy.head(limit).collect()
        some = lazy.filter(predicate).head(limit).select(columns).collect()
        length = lazy.select(pl.len()).collect().item()
    assert_same_frame(picked, whole.filter(predicate).select(columns))
    assert_same_frame(named, whole.select(columns))
    assert started.equals(whole.head(limit))
    assert some.height == min(limit, picked.height)
    assert length == whole.height


# --- worked by hand -------------------------------------------------------------------------------


def test_a_mask_with_holes_and_a_branch_point(tmp_path: Path) -> None:
    """
    0 (2 tokens) - 1 (5, three sampled) - 2 (3, two sampled)    leaf 0
                                        - 3 (2, one sampled)    leaf 1
    """
    tokens = scan(
        tmp_path / "traces.jsonl",
        trace(
            node(".."),
            node(".s.ss", labels(("3", 1), ("9", 2)), parent=0, logprobs=[-1.0, None, -3.0]),
            node("s.s", labels(("default", 2)), parent=1, entropies=[0.5, 1.5]),
            node(".s", None, parent=1, is_content=[False, True]),
        ),
        weighting="branches",
    )
    names = ["branch", "branch_tokens", "node", "turn", "index", "position", "token_id"]
    assert tokens.select(names).rows() == [
        (0, 10, 1, 0, 0, 3, 501),
        (0, 10, 1, 0, 1, 5, 503),
        (0, 10, 1, 0, 2, 6, 504),
        (0, 10, 2, 1, 0, 7, 300),
        (0, 10, 2, 1, 1, 9, 302),
        (1, 9, 1, 0, 0, 3, 501),
        (1, 9, 1, 0, 1, 5, 503),
        (1, 9, 1, 0, 2, 6, 504),
        (1, 9, 3, 2, 0, 8, 201),
    ]
    shared = [(3, 3, -1.0), (9, -3, None), (9, -3, -3.0)]
    assert tokens.select("version", "age", "logprob").rows() == [
        *shared,
        *[(None, None, None)] * 2,
        *shared,
        (None, None, None),
    ]
    assert tokens["label"].to_list() == ["3", "9", "9", "default", "default", "3", "9", "9", None]
    assert tokens["entropy"].to_list() == [None, None, None, 0.5, 1.5, *[None] * 4]
    assert tokens["is_content"].to_list() == [*[None] * 8, True]
    assert tokens["branches"].to_list() == [2, 2, 2, 1, 1, 2, 2, 2, 1]


def contexts(tokens: pl.DataFrame) -> list[tuple[Any, ...]]:
    """(node, age, completion_tokens, context_age) of each token."""
    return tokens.select("node", "age", "completion_tokens", "context_age").rows()


def test_the_oldest_token_of_the_context(tmp_path: Path) -> None:
    """Down a chain: nothing before the first token, then whatever was sampled earliest of all."""
    tokens = scan(
        tmp_path / "traces.jsonl",
        trace(
            node("..", labels(("0", 2))),  # labelled, but not sampled
            node(".sss", labels(("4", 2), ("5", 1)), parent=0),
            node("..", parent=1),
            node("ss", labels(("3", 1), ("6", 1)), parent=2),
            node("s", labels(("6", 1)), parent=3),
        ),
        trace(node("s", labels(("6", 1))), trace_id="u"),
    )
    assert contexts(tokens) == [
        (1, 2, 3, None),
        (1, 2, 3, 2),
        (1, 1, 3, 2),
        (3, 3, 2, 2),
        (3, 0, 2, 3),
        (4, 0, 1, 3),
        (0, 0, 1, None),  # another trace
    ]
    assert tokens.schema["completion_tokens"] == tokens.schema["context_age"] == pl.Int32


BRANCH_POINT = trace(
    node(".s", labels(("4", 1))),
    node("s", labels(("2", 1)), parent=0),
    node("ss", labels(("5", 2)), parent=0),
    node("s", labels(("6", 1)), parent=2),
    node("..", parent=3),
    node("..", parent=3),
    node("ss", labels(("1", 2))),
)
"""
0 - 1                leaf 0
  - 2 - 3 - 4        leaf 1
          - 5        leaf 2
6                    leaf 3
"""


def test_the_context_is_that_of_the_branch(tmp_path: Path) -> None:
    """What was sampled on another branch, before or after, was not in the context."""
    path = tmp_path / "traces.jsonl"
    write_lines(path, [BRANCH_POINT])
    ta.write_dump(path, tmp_path / "dump", step=7)
    root, left = [(0, 2, 1, None)], [(1, 4, 1, 2)]
    right, other = [(2, 1, 2, 2), (2, 1, 2, 2), (3, 0, 1, 2)], [(6, 5, 2, None), (6, 5, 2, 5)]
    for source in (path, tmp_path / "dump"):
        tokens = ta.scan_tokens(source, step=7).collect()
        assert contexts(tokens) == root + left + right + other
        tokens = ta.scan_tokens(source, step=7, weighting="branches").collect()
        assert contexts(tokens) == [*root, *left, *root, *right, *root, *right, *other]


def test_what_has_no_version_has_a_context(tmp_path: Path) -> None:
    """A run labelled `default` or not at all adds nothing and hides nothing."""
    tokens = scan(
        tmp_path / "traces.jsonl",
        trace(
            node("s" * 6, labels(("default", 2), ("5", 1), ("default", 2), ("4", 1))),
            node("", [], parent=0, sampled=True),
            node("ss", None, parent=1),
        ),
    )
    assert contexts(tokens) == [
        *[(0, None, 6, None)] * 2,
        (0, 1, 6, None),
        *[(0, None, 6, 1)] * 2,
        (0, 2, 6, 1),
        *[(2, None, 2, 2)] * 2,
    ]


def test_a_context_of_the_future(tmp_path: Path) -> None:
    """Labels newer than the batch give negative ages, here as elsewhere."""
    path = tmp_path / "traces.jsonl"
    tokens = scan(path, trace(node("sss", labels(("9", 1), ("8", 2)))))
    assert contexts(tokens) == [(0, -3, 3, None), (0, -2, 3, -3), (0, -2, 3, -2)]


def test_no_context_age_without_a_batch(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path)
    store.append(trace(node("ss", labels(("3", 2)))), arrival=7)
    tokens = ta.scan_tokens(tmp_path, subset="all", quiet=True).collect()
    assert contexts(tokens) == [(0, None, 2, None)] * 2


def test_an_empty_completion_has_a_length(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    write_lines(path, [{"id": "e", "traces": []}, trace(node(".s"), node("..", [], sampled=True))])
    ta.write_dump(path, tmp_path / "dump", step=7)
    for source in (path, tmp_path / "dump"):
        spans = ta.scan_spans(source, step=7).select("node", "length", "completion_tokens")
        assert set(spans.collect().rows()) == {(None, 0, None), (0, 1, 1), (1, 0, 0)}


def test_context_age_alone(tmp_path: Path) -> None:
    """By itself, filtered on, of labelled tokens, from the start: as in the whole table."""
    path = tmp_path / "traces.jsonl"
    mixed = trace(node("sss", labels(("default", 1), ("4", 1), ("3", 1))), trace_id="u")
    write_lines(path, [BRANCH_POINT, mixed])
    ta.write_dump(path, tmp_path / "dump", step=7)
    for source in (path, tmp_path / "dump"):
        tokens = ta.scan_tokens(source, step=7)
        ages = [None, 2, 2, 2, 2, None, 5, None, None, 2]
        assert tokens.select("context_age").collect().to_series().to_list() == ages
        assert tokens.head(3).select("context_age").collect().to_series().to_list() == ages[:3]
        older = tokens.filter(pl.col("context_age") > 2).select("trace_id", "node").collect()
        assert older.rows() == [("t", 6)]
        labelled = ta.scan_tokens(source, ["context_age"], step=7, labelled_only=True).collect()
        assert labelled.to_series().to_list() == [*ages[:7], *ages[8:]]


@pytest.mark.parametrize("nothing", [{}, None, []])
def test_a_stream_that_was_not_stamped_is_null(tmp_path: Path, nothing: Any) -> None:
    absent = {} if nothing == {} else dict.fromkeys([*STAMPED, "logprobs", "is_content"], nothing)
    tokens = scan(tmp_path / "traces.jsonl", trace(node(".ss", labels(("3", 2)), **absent)))
    assert tokens["position"].to_list() == [1, 2]
    for name in (*ref.PER_SAMPLED, "is_content"):
        assert tokens[name].to_list() == [None, None], name


def test_a_null_or_a_nan_in_a_stream_is_null(tmp_path: Path) -> None:
    streams: Record = {key: [0.0, None, float("nan"), -0.5] for key in (*STAMPED, "logprobs")}
    path = tmp_path / "traces.jsonl"
    tokens = scan(path, trace(node("ssss", labels(("3", 4)), **streams)))
    assert b"NaN" in path.read_bytes()
    for name in ref.PER_SAMPLED:
        assert tokens[name].to_list() == [0.0, None, None, -0.5], name
        assert tokens.schema[name] == pl.Float32


def test_token_ids_that_are_not_there_are_null(tmp_path: Path) -> None:
    """A record may keep the labels and logprobs, and no token ids."""
    own = {"sampled": True, "logprobs": [-1.0, -2.0], "weight_versions": labels(("3", 2))}
    for mask in ({}, {"mask": [True, True]}, {"mask": [True, True], "token_ids": []}):
        tokens = scan(tmp_path / "traces.jsonl", trace({**own, **mask}))
        names = ["token_id", "position", "logprob", "age"]
        assert tokens.select(names).rows() == [(None, None, -1.0, 3), (None, None, -2.0, 3)], mask


@pytest.mark.parametrize("count_by", [{"logprobs": [-1.0, -2.0]}, {}])
def test_without_a_mask_all_may_be_sampled(tmp_path: Path, count_by: Record) -> None:
    """As many token ids as sampled tokens, however those are counted: they are the same ones."""
    own = {"sampled": True, "token_ids": [8, 9], "weight_versions": labels(("3", 2)), **count_by}
    tokens = scan(tmp_path / "traces.jsonl", trace(own))
    assert tokens.select("token_id", "position").rows() == [(8, 0), (9, 1)]


def test_no_training_sample_holds_a_token(tmp_path: Path) -> None:
    """A compaction attempt that nothing resumed: read well, and nothing in it."""
    attempt = node("ss", labels(("3", 2)))
    attempt["semantic_parents"] = [{"node": 0, "type": "compaction_attempt"}]
    assert scan(tmp_path / "traces.jsonl", trace(attempt)).height == 2
    assert scan(tmp_path / "traces.jsonl", trace(attempt), weighting="branches").height == 0


def test_an_empty_completion_has_no_tokens(tmp_path: Path) -> None:
    tokens = scan(
        tmp_path / "traces.jsonl",
        trace(
            node(".s", labels(("3", 1)), logprobs=[-1.0]),
            node("..", [], parent=0, sampled=True, logprobs=[]),
            node(".s", labels(("4", 1)), parent=1, logprobs=[-2.0]),
        ),
        {"id": "e", "traces": []},
        trace(trace_id="u"),
    )
    names = ["node", "turn", "index", "position", "logprob"]
    assert tokens.select(names).rows() == [(0, 0, 0, 1, -1.0), (2, 2, 0, 5, -2.0)]


def test_where_a_token_was_read(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    tokens = scan(path, trace(node("s")), trace(node("ss"), trace_id="u"))
    assert tokens["line"].to_list() == [1, 2, 2]
    assert set(tokens["file"]) == {str(path)}


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    write_lines(tmp_path / "traces.jsonl", [trace(node("s"))])
    with pytest.raises((ta.TraceError, pl.exceptions.ColumnNotFoundError), match="logprobs"):
        ta.scan_tokens(tmp_path / "traces.jsonl", ["logprobs"], step=7).collect()
    with pytest.raises(ValueError, match="samples"):
        ta.scan_tokens(tmp_path / "traces.jsonl", step=7, weighting="samples")  # type: ignore[arg-type]


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("key", [*STAMPED, "logprobs", "is_content"])
def test_a_stream_of_the_wrong_length(tmp_path: Path, key: str, count: int) -> None:
    """Three sampled tokens among five, and a stream of another length than its own."""
    path = tmp_path / "traces.jsonl"
    values: list[Any] = [True] * count if key == "is_content" else [-0.5] * count
    good = node("s", labels(("3", 1)), logprobs=[-1.0])
    bad = node("..sss", labels(("3", 3)), parent=0, logprobs=[-1.0] * 3)
    bad[key] = values
    records = [trace(good, trace_id="good"), trace(good, bad, trace_id="bad-trace")]
    write_lines(path, records)
    column = {stream: name for name, stream in ref.PER_SAMPLED.items()}.get(key, key)

    with pytest.raises(ta.TraceError) as caught:
        ta.scan_tokens(path, step=7).collect()
    assert f"{path}:2" in str(caught.value)
    assert "bad-trace" in str(caught.value)
    assert "node 1" in str(caught.value)
    assert key in str(caught.value)
    # Who does not ask for the stream does not stumble over it.
    assert ta.scan_tokens(path, ["age", "trace_id"], step=7).collect().height == 5

    summary = ta.ReadSummary()
    with pytest.warns(ta.TraceWarning):
        tokens = ta.scan_tokens(path, step=7, on_error="skip", summary=summary).collect()
    assert summary.skipped == 1
    assert "bad-trace" in str(summary.examples)
    in_bad = tokens.filter(trace_id="bad-trace", node=1)
    assert in_bad[column].to_list() == [None] * 3
    assert in_bad["age"].to_list() == [3] * 3
    if key != "is_content":
        assert_same_streams(tokens, ref.token_rows(at_step(7, *records)))


def test_a_mask_that_does_not_fit_the_tokens(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    own = node("..ss", labels(("3", 2)), logprobs=[-1.0, -2.0])
    own["token_ids"] = [5, 6, 7]
    write_lines(path, [trace(own)])
    with pytest.raises(ta.TraceError, match=r"trace t, node 0.*mask"):
        ta.scan_tokens(path, ["position"], step=7).collect()
    with pytest.warns(ta.TraceWarning):
        tokens = ta.scan_tokens(path, step=7, on_error="skip").collect()
    assert tokens.select("position", "token_id").rows() == [(None, None)] * 2
    assert tokens["logprob"].to_list() == [-1.0, -2.0]


# --- verifiers' own branches ----------------------------------------------------------------------


def test_positions_are_those_of_verifiers_branches(tmp_path: Path) -> None:
    """Every trainable branch: its token ids, its mask and its spread streams, place by place."""
    made = pytest.importorskip("test_verifiers")
    traces = [
        made.chat(),
        made.forked(),
        made.compacted(accepted=True),
        made.compacted(accepted=False),
        made.unlabelled(),
    ]
    rng = Random(5)
    for one in traces:
        for own in one.nodes:
            count = int(np.sum(own.mask))
            for key in {"logprobs", *STAMPED} - {"mismatch_kl"}:
                # Sixteenths survive the rounding of records.
                own.__dict__[key] = np.array([rng.randrange(99) / 16 for _ in range(count)])
    path = made.write(tmp_path / "traces.jsonl", [made.episode("e", *traces)])
    tokens = ta.scan_tokens(path, step=7, weighting="branches").collect()

    places = ta.to_numpy(tokens, "position")
    ids = ta.to_numpy(tokens, "token_id", fill=-1)
    samples = {
        (one.id, index): branch
        for one in traces
        for index, branch in enumerate(one.branches)
        if branch.trainable and branch.sampled_mask.any()
    }
    assert set(places) == set(samples)
    assert len(samples) == 11
    for sample, branch in samples.items():
        mask = branch.sampled_mask
        assert len(places[sample]) == len(branch.token_ids)
        assert (places[sample][mask] == np.flatnonzero(mask)).all()
        assert (ids[sample] == np.where(mask, branch.token_ids, -1)).all()
    for name, stream in ref.PER_SAMPLED.items():
        if stream == "mismatch_kl":
            continue  # verifiers keeps none
        spread = ta.to_numpy(tokens, name, fill=0.0)
        for sample, branch in samples.items():
            wanted = branch.spread(attrgetter(stream))
            assert (spread[sample] == wanted).all(), (name, sample)


# --- streams learned later ------------------------------------------------------------------------


def with_ids(stored: Stored) -> Stored:
    """The same record, in which every node tells where its sampled tokens stand."""
    record = json.loads(json.dumps(stored.record))
    for one in record.get("traces", [record]):
        for own in one.get("nodes") or []:
            count = ref.sampled_count(own) if ref.is_sampled(own) else 0
            if ref.is_sampled(own) and ref.places_of(own, count) is None:
                own["mask"] = [False, *[True] * count]
            if own.get("mask") is None or len(ref.ids_of(own)) != len(own["mask"]):
                own["mask"] = [True] * count if own.get("mask") is None else own["mask"]
                own["token_ids"] = [40 + at for at in range(len(own["mask"]))]
                own["is_content"] = []
    return Stored(record, stored.step, stored.extras)


LATER = ("advantages", "trainer_logprobs", "entropies", "mismatch_kl")


def stamp(record: Record, rng: Random) -> None:
    """Streams that are whole, on some of the nodes."""
    for one in record.get("traces", [record]):
        for own in one.get("nodes") or []:
            for key in LATER:
                own.pop(key, None)
                if ref.is_sampled(own) and rng.random() < 0.8:
                    count = ref.sampled_count(own)
                    own[key] = [rng.randrange(-64, 64) / 8 for _ in range(count)]


def by_branch(nodes: list[Record], keys: Sequence[str]) -> list[Record]:
    """Stamped streams as a producer writes them: per branch, null outside the sampled tokens."""
    branches = []
    for index, leaf in enumerate(ref.leaves_of(nodes)):
        branch: Record = {"index": index}
        for key in keys:
            values: list[float | None] = []
            for at in ref.path_to(nodes, leaf):
                stamped = iter(nodes[at].get(key) or [])
                values += [
                    next(stamped, None) if sampled else None for sampled in nodes[at]["mask"]
                ]
            branch[key] = values
        branches.append(branch)
    return branches


def without(record: Record, keys: Sequence[str]) -> Record:
    bare: Record = json.loads(json.dumps(record))
    for one in bare.get("traces", [bare]):
        for own in one.get("nodes") or []:
            for key in keys:
                own.pop(key, None)
    return bare


@few
@given(stored_records(), st.integers(0, 1000), st.booleans(), weightings)
def test_annotations_read_as_if_they_had_been_stamped(
    stored: list[Stored], seed: int, sealed: bool, weighting: Weighting
) -> None:
    rng = Random(seed)
    stored = [with_ids(one) for one in stored]
    with folder() as root:
        store = StoreWriter(root / "store")
        for record, step, _ in stored:
            assert step is not None
            stamp(record, rng)
            store.append(without(record, LATER), arrival=step)
            for one in record.get("traces", [record]):
                nodes = one.get("nodes") or []
                info = {"effective": True, "ship": {"step": step, "time": 3.0}}
                said = by_branch(nodes, ["advantages"])
                store.annotate(one["id"], info, branches=said)
                said = by_branch(nodes, ["trainer_logprobs", "entropies", "mismatch_kl"])
                store.annotate(one["id"], {}, producer="trainer", branches=said)
        if sealed:
            for log in (store.stream, *store.producers.values()):
                log.seal(0)
        write_steps(root / "steps", stored)
        names = [c for c in ta.scan_tokens(root / "steps").collect_schema() if c not in PLACE]
        tokens = ta.scan_tokens(root / "store", weighting=weighting).collect()
        stamped = ta.scan_tokens(root / "steps", names, weighting=weighting).collect()
    rows = [
        replace(row, shipped=True) for row in expected(stored, weighting) if row.index is not None
    ]
    assert_same_streams(tokens, rows)
    assert_same_frame(tokens.select(names), stamped)


# What a place on disk tells of a token, and not the token itself.
PLACE = ("kind", "subset", "shipped", "file", "line")


def test_the_newest_word_on_a_node_wins(tmp_path: Path) -> None:
    """Two branches share a node; what was stamped comes first, then word after word."""
    shared = node(".ss", labels(("3", 2)), advantages=[9.0, 9.0])
    first, second = node(".s", parent=0), node("s", parent=0)
    store = StoreWriter(tmp_path)
    store.append(trace(shared, first, second), arrival=3)

    def values() -> list[float | None]:
        return ta.scan_tokens(tmp_path, ["advantage"]).collect()["advantage"].to_list()

    ship = {"effective": True, "ship": {"step": 3, "time": 1.0}}
    store.annotate("t", ship, branches=[])
    assert values() == [9.0, 9.0, None, None]
    left = {"index": 0, "advantages": [None, 1.0, 2.0, None, 3.0]}
    store.annotate("t", {}, branches=[left])
    assert values() == [1.0, 2.0, 3.0, None]
    right = {"index": 1, "advantages": [None, 4.0, 5.0, 6.0]}
    store.annotate("t", {}, branches=[right])
    assert values() == [4.0, 5.0, 3.0, 6.0]
    # A node takes a stream whole or not at all.
    store.annotate("t", {}, branches=[{"index": 1, "advantages": [None, None, 7.0, 8.0]}])
    assert values() == [4.0, 5.0, 3.0, 8.0]


# --- ages and exploding of a frame of one's own ---------------------------------------------------


def test_age_on_a_frame_of_ones_own() -> None:
    frame = pl.DataFrame(
        {
            "training_version": [7, 7, None, 0],
            "version": [5, 9, 1, None],
            "reward": [0.1, 0.2, 0.3, 0.4],
        }
    )
    aged = frame.with_columns(ta.age())
    assert aged.columns == [*frame.columns, "age"]
    assert aged["age"].to_list() == [2, -2, None, None]
    assert aged.schema["age"] == pl.Int32
    assert frame.lazy().filter(ta.age() < 0).collect().height == 1


def test_explode_by_hand() -> None:
    spans = pl.DataFrame(
        {
            "start": [0, 2, 2, 5],
            "length": [2, 0, 3, 1],
            "label": ["3", "4", None, "default"],
            "flag": [True, None, False, None],
            "reward": [0.5, 1.0, None, float("nan")],
            "training_version": [7, 7, 7, 7],
            "version": [3, 4, None, 9],
        },
        schema_overrides={"start": pl.Int32, "length": pl.Int32},
    )
    rows = ta.explode(spans, ["age", "label", "index", "flag", "reward"]).rows()
    assert rows[:-1] == [
        (4, "3", 0, True, 0.5),
        (4, "3", 1, True, 0.5),
        (None, None, 2, False, None),
        (None, None, 3, False, None),
        (None, None, 4, False, None),
    ]
    assert rows[-1][:4] == (-2, "default", 5, None)
    assert np.isnan(rows[-1][4])


def naive(spans: pl.DataFrame, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    rows = []
    for span in spans.iter_rows(named=True):
        for index in range(span["start"], span["start"] + span["length"]):
            age = None
            if span["training_version"] is not None and span["version"] is not None:
                age = span["training_version"] - span["version"]
            context = [span["context_version"]]
            if index > span["start"]:
                context.append(span["version"])
            context = [version for version in context if version is not None]
            context_age = None
            if span["training_version"] is not None and context:
                context_age = span["training_version"] - min(context)
            values = {**span, "index": index, "age": age, "context_age": context_age}
            rows.append(tuple(values[name] for name in columns))
    return rows


numbers = st.one_of(st.none(), st.integers(0, 9))
runs = st.fixed_dictionaries(
    {
        "start": st.integers(0, 5),
        "length": st.sampled_from([0, 0, 1, 2, 7]),
        "training_version": numbers,
        "version": numbers,
        "context_version": numbers,
        "label": st.sampled_from([None, "", "3", "a longer label than twelve bytes \u2028"]),
        "flag": st.sampled_from([None, True, False]),
        "reward": st.sampled_from([None, 0.0, -1.5]),
    }
)
RUNS: dict[str, Any] = {
    "start": pl.Int32,
    "length": pl.Int32,
    "training_version": pl.Int32,
    "version": pl.Int32,
    "context_version": pl.Int32,
    "label": pl.String,
    "flag": pl.Boolean,
    "reward": pl.Float64,
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(runs, max_size=8),
    st.lists(st.sampled_from([*RUNS, "index", "age", "context_age"]), unique=True, min_size=1),
    st.integers(0, 2),
)
def test_explode_against_loops(drawn: list[Record], columns: list[str], skip: int) -> None:
    spans = pl.DataFrame(drawn, RUNS)
    # A frame that begins inside its buffers, and one of several chunks.
    spans = pl.concat([spans[skip:], spans[:skip]], rechunk=False)
    found = ta.explode(spans, columns)
    assert found.columns == columns
    assert found.rows() == naive(spans, columns)
    for name in columns:
        assert found.schema[name] == RUNS.get(name, pl.Int32)


def test_explode_of_many_tokens() -> None:
    """More tokens than one thread is given."""
    lengths = [300_000, 0, 1, 700_000, 262_144, 5]
    count = len(lengths)
    spans = pl.DataFrame(
        {
            "start": pl.Series([0, 3, 300_000, 0, 7, 11], dtype=pl.Int32),
            "length": pl.Series(lengths, dtype=pl.Int32),
            "training_version": [9] * count,
            "version": [1, 2, None, 3, 4, 12],
            "label": ["1", "2", None, "3", "4", "12"],
            "flag": [True, True, None, False, True, None],
        }
    )
    columns = ["label", "index", "flag", "age", "version"]
    found = ta.explode(spans, columns)
    assert found.height == sum(lengths) > 1 << 20
    for name in ("label", "flag", "version"):
        wanted = spans[name].gather(np.repeat(np.arange(count), lengths))
        assert found[name].equals(wanted, check_names=True), name
    wanted = pl.concat([pl.arange(s, s + n, dtype=pl.Int32, eager=True) for s, n in starts(spans)])
    assert found["index"].to_list() == wanted.to_list()
    tallied = found.group_by("age").len().sort("age").rows()
    assert tallied == [(None, 1), (-3, 5), (5, 262_144), (6, 700_000), (8, 300_000)]


def starts(spans: pl.DataFrame) -> list[tuple[int, int]]:
    return spans.select("start", "length").rows()


# --- arrays a training sample ---------------------------------------------------------------------


class Layout(NamedTuple):
    """What is laid out, the value of a row of the reference, and what stands elsewhere."""

    column: str | pl.Expr
    value: str
    fill: float | bool | None
    elsewhere: Any
    dtype: str


LAYOUTS = [
    Layout("age", "age", None, -2147483648, "int32"),
    Layout("age", "age", -1, -1, "int32"),
    Layout("version", "version", 0, 0, "int32"),
    Layout("logprob", "logprob", None, np.nan, "float32"),
    Layout("entropy", "entropy", 0.0, 0.0, "float32"),
    Layout("is_content", "is_content", None, False, "bool"),
    Layout(pl.col("age") <= 2, "fresh", None, False, "bool"),
    Layout(pl.col("age") <= 2, "fresh", True, True, "bool"),
]


def laid_out(rows: list[TokenRow], layout: Layout) -> dict[tuple[str, int], NDArray[Any]]:
    arrays: dict[tuple[str, int], NDArray[Any]] = {}
    for row in rows:
        assert row.trace_id is not None
        assert row.branch is not None
        assert row.branch_tokens is not None
        array = arrays.setdefault(
            (row.trace_id, row.branch),
            np.full(row.branch_tokens, layout.elsewhere, layout.dtype),
        )
        value = (
            None if row.age is None else row.age <= 2
        ) if layout.value == "fresh" else getattr(row, layout.value)  # fmt: skip
        if value is not None:
            array[row.position] = value
    return arrays


@few
@given(stored_records(), st.sampled_from(LAYOUTS), st.booleans(), st.integers(0, 99))
def test_arrays_are_aligned_with_the_branches(
    stored: list[Stored], layout: Layout, shuffled: bool, seed: int
) -> None:
    stored = [with_ids(one) for one in stored]
    wanted = laid_out(expected(stored, "branches"), layout)
    with folder() as root:
        write_steps(root, stored)
        lazy = ta.scan_tokens(root, weighting="branches")
        if shuffled:
            tokens = lazy.collect().sample(fraction=1.0, shuffle=True, seed=seed)
            found = ta.to_numpy(tokens, layout.column, layout.fill)
        else:
            found = ta.to_numpy(lazy, layout.column, layout.fill)
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert found[key].dtype == array.dtype, layout
        np.testing.assert_array_equal(found[key], array)


def test_arrays_of_some_of_the_tokens(tmp_path: Path) -> None:
    """Filtered tokens give the arrays of the samples that are left, at their full length."""
    path = tmp_path / "traces.jsonl"
    one, other = (
        trace(node(".s", labels((str(at), 1))), node("..s", labels(("5", 1)), parent=0))
        for at in (1, 2)
    )
    other["id"] = "u"
    write_lines(path, [one, other])
    tokens = ta.scan_tokens(path, step=7, weighting="branches")
    found = ta.to_numpy(tokens.filter(pl.col("version") < 2), "age", -1)
    assert {key: array.tolist() for key, array in found.items()} == {("t", 0): [-1, 5, -1, -1, -1]}
    assert ta.to_numpy(tokens.filter(pl.lit(False)), "age") == {}


def test_arrays_need_branches(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    tokens = scan(path, trace(node("ss", labels(("3", 2)))))
    with pytest.raises(ValueError, match="weighting='branches'"):
        ta.to_numpy(tokens, "age")


def test_tensors_share_the_memory_of_the_arrays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "traces.jsonl"
    tokens = scan(path, trace(node(".ss", labels(("3", 1), ("5", 1)))), weighting="branches")
    tensors = ta.to_torch(tokens, "age", fill=-1)
    assert tensors["t", 0].tolist() == [-1, 3, 1]
    assert tensors["t", 0].dtype == torch.int32
    fresh = ta.to_torch(tokens, pl.col("age") <= 2)
    assert fresh["t", 0].tolist() == [False, False, True]
    assert fresh["t", 0].dtype == torch.bool


# --- the command line -----------------------------------------------------------------------------


def test_the_command_writes_what_the_scan_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(Path(__file__).parent.parent / "data" / "real-dump")
    out = tmp_path / "tokens.parquet"
    assert main(["tokens", source, "-o", str(out)]) == 0
    names = ["step", "env", "trace_id", "node", "index", "age", "version"]
    assert_same_frame(pl.read_parquet(out), ta.scan_tokens(source, names).collect())

    chosen = "trace_id,branch,position,logprob,trainer_logprob"
    options = ["--columns", chosen, "--labelled-only", "--weighting", "branches", "--quiet"]
    assert main(["tokens", source, "-o", str(out), *options]) == 0
    wanted = ta.scan_tokens(source, chosen.split(","), labelled_only=True, weighting="branches")
    assert_same_frame(pl.read_parquet(out), wanted.collect())
    assert list(tmp_path.iterdir()) == [out]

    capsys.readouterr()
    assert main(["tokens", source, "-o", str(out), "--columns", "context_age", "--quiet"]) == 0
    assert_same_frame(pl.read_parquet(out), ta.scan_tokens(source, ["context_age"]).collect())
    assert main(["tokens", source, "-o", str(out), "--columns", "age,logprobs"]) == 2
    assert "logprobs" in capsys.readouterr().err


def test_a_frame_of_tokens_stays_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many runs come at once, as they do from a dump, tokens come in pieces."""
    from traceage import scan as module

    monkeypatch.setattr(module, "TOKENS_PER_BATCH", 1_000)
    run = Path(__file__).parent.parent / "data/real-dump"
    ta.write_dump(run, tmp_path)
    whole = ta.scan_tokens(run).collect()
    tokens = ta.scan_tokens(tmp_path)
    keys = ["trace_id", "node", "index"]
    assert tokens.collect().sort(keys).equals(whole.sort(keys))
    longest = ta.scan_spans(run).select(pl.col("length").max()).collect().item()
    reader = module.reader_of(tmp_path)
    sizes = [frame.height for frame in module.token_batches(reader, ["age", "logprob"])]
    assert sum(sizes) == whole.height
    assert max(sizes) <= max(1_000, longest)
