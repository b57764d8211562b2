"""A trace store read at every stage of its life, each time against the reference's own fold."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import polars as pl
import pytest
import reference as ref
from compare import assert_same_metrics, assert_same_tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference import Record, TokenRow
from store_writer import StoreWriter, read_seek_table, seekable_zstd, tear
from strategies import HOSTILE_TEXTS, HOSTILE_VALUES

import traceage as ta

DATA = Path(__file__).parent.parent / "data"

Subset = Literal["effective", "all"]


def trace(trace_id: str, *labels: str | None, trainable: bool = True) -> Record:
    """A trace of one completion: three tokens a label, and text that looks like spans."""
    spans = [
        {"version": label, "start": 3 * i, "end": 3 * i + 3}
        for i, label in enumerate(labels)
        if label is not None
    ]
    count = 3 * len(labels)
    return {
        "id": trace_id,
        "agent": {"name": "solver" if trainable else "judge", "trainable": trainable},
        "nodes": [
            {"message": {"role": "user", "content": HOSTILE_TEXTS[2]}, "token_ids": [1, 2]},
            {
                "parent": 0,
                "message": {"role": "assistant", "content": HOSTILE_TEXTS[4]},
                "sampled": True,
                "timestamp": 1.7e9,
                "token_ids": list(range(2 + count)),
                "mask": [False, False] + [True] * count,
                "logprobs": [-0.5] * count,
                "weight_versions": spans,
            },
        ],
        "rewards": {"r": {"score": 0.5, "weight": 1.0}},
        "info": {"note": HOSTILE_VALUES[0]},
    }


def episode(name: str, *traces: Record, policy: tuple[int, int] = (0, 1)) -> Record:
    work = {"type": "train", "step": 1, "policy": {"start": policy[0], "end": policy[1]}}
    return {
        "id": name,
        "env": {"id": "toy", "name": "toy"},
        "group": {"id": "g"},
        "run": {"type": "train", "id": "run", "work": work},
        "traces": list(traces),
    }


def simple(number: int) -> Record:
    """An episode of one trace, `t<number>`, sampled by policies number and number + 1."""
    own = trace(f"t{number}", str(number), str(number + 1))
    return episode(f"e{number}", own, policy=(number, number + 1))


def scan(
    run_dir: Path, subset: Subset | None = None, predicate: pl.Expr | None = None
) -> pl.DataFrame:
    """The library's reading, where half-written lines and the like may be reported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = ta.scan_spans(run_dir, subset=subset)
        return (lazy if predicate is None else lazy.filter(predicate)).collect()


def assert_store_reads_right(run_dir: Path) -> None:
    rows = trained_rows(run_dir)
    spans = scan(run_dir)
    assert_same_tokens(spans, rows)
    assert_same_metrics(ta.off_policy_metrics(spans), ref.metrics_rows(rows))
    everything, rows = scan(run_dir, "all"), trained_rows(run_dir, "all")
    assert_same_tokens(everything, rows)
    # Whether an arrival that no batch took is one of the episodes is a matter of words.
    assert_same_metrics(
        ta.off_policy_metrics(everything),
        ref.metrics_rows(rows),
        without=("episodes", "not_shipped"),
    )


def trained_rows(run_dir: Path, subset: Subset = "effective") -> list[TokenRow]:
    """The reference's rows of the store, evals left out."""
    rows = ref.token_rows(ref.fold_store(run_dir), subset=subset)
    return [row for row in rows if row.kind == "train"]


# --- a whole life, one move at a time -------------------------------------------------------------

MOVES: list[tuple[str, Callable[[StoreWriter], object]]] = [
    ("an episode arrives", lambda w: w.append(simple(0), arrival=1)),
    ("a batch takes it", lambda w: w.ship(1, "t0")),
    ("two more arrive", lambda w: w.append(simple(1), simple(2), arrival=2)),
    ("an eval arrives", lambda w: w.append(simple(90), arrival=2, kind="eval")),
    ("a rollout is in flight", lambda w: w.write_live(trace("t91", "5"))),
    ("metrics are logged", lambda w: w.write_metrics(1, {"off_policy/mean": 0.5})),
    ("metrics of no step", lambda w: w.write_metrics(None, {"setup": 1.0})),
    ("a batch takes one of them", lambda w: w.ship(3, "t2")),
    ("the stream rolls", lambda w: w.stream.roll()),
    ("the next chunk opens", lambda w: w.append(simple(3), arrival=3)),
    ("the old chunk is compressed", lambda w: w.stream.seal(0, stop_at="written")),
    ("it stands there twice", lambda w: w.stream.seal(0, stop_at="renamed")),
    ("it is sealed", lambda w: w.stream.seal(0)),
    ("orch rolls", lambda w: w.producer("orch").roll()),
    ("and says more", lambda w: w.ship(4, "t1", "t3")),
    ("its chunk stands there twice", lambda w: w.producer("orch").seal(0, stop_at="renamed")),
    ("its chunk is sealed", lambda w: w.producer("orch").seal(0)),
    ("a later word on the step", lambda w: w.annotate("t1", {"ship": {"step": 5}})),
    ("a word on something else", lambda w: w.annotate("t3", {"note": {"ship": {"step": 99}}})),
    ("taken back", lambda w: w.annotate("t2", {"effective": False})),
    ("trainer has its say", lambda w: w.annotate("t0", {"loss": 1.0}, producer="trainer")),
    ("the stream rolls again", lambda w: w.stream.roll()),
    ("more arrive", lambda w: w.append(simple(5), simple(6), arrival=5)),
    ("one of them is taken", lambda w: w.ship(6, "t5")),
    ("the run ends: all is sealed", lambda w: w.stream.seal(1, 2)),
    ("orch is sealed too", lambda w: w.producer("orch").seal(1)),
]


def test_every_stage_of_a_life(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    for name, move in MOVES:
        move(writer)
        try:
            assert_store_reads_right(tmp_path)
        except Exception as error:
            error.add_note(f"after: {name}")
            raise
    shipped = scan(tmp_path).filter(pl.col("shipped"))
    steps = shipped.select("trace_id", "step").unique().sort("trace_id").rows()
    assert steps == [("t0", 1), ("t1", 5), ("t3", 4), ("t5", 6)]


FILTERS = [
    pl.col("step") == 2,
    pl.col("step").is_in([1, 7]),
    pl.col("step") > 3,
    pl.col("env") == "maze",
    pl.col("group_id") != "g1",
    pl.col("episode_id") == "e2",
    pl.col("trace_id") == "t1",
    pl.col("shipped"),
    ~pl.col("shipped"),
    pl.col("training_version").is_null(),
    pl.col("kind") == "eval",
    pl.col("length") > 2,
]
SUBSETS: list[Subset | None] = [None, "effective", "all"]


def assert_filters_alike(
    run_dir: Path, whole: pl.DataFrame, predicate: pl.Expr, subset: Subset | None = None
) -> None:
    """The scan, asked with a filter, gives what the filter leaves of the whole."""
    found = scan(run_dir, subset, predicate)
    assert sorted(map(repr, found.rows())) == sorted(map(repr, whole.filter(predicate).rows()))


class AnyLife(RuleBasedStateMachine):
    """The moves of a run in any order; the store has to read right after each."""

    def __init__(self) -> None:
        super().__init__()
        self.run_dir = Path(tempfile.mkdtemp())
        self.count = 0

    @initialize(frame_size=st.sampled_from([64, 700, 1 << 20]))
    def start(self, frame_size: int) -> None:
        self.writer = StoreWriter(self.run_dir, frame_size=frame_size)
        self.writer.append(simple(0), arrival=1)
        self.count = 1

    def teardown(self) -> None:
        shutil.rmtree(self.run_dir)

    @rule(
        arrival=st.integers(1, 4),
        kinds=st.lists(st.booleans(), min_size=1, max_size=3),
        labels=st.lists(st.sampled_from([None, "default", "0", "2", "10"]), max_size=3),
    )
    def arrive(self, arrival: int, kinds: list[bool], labels: list[str | None]) -> None:
        traces = [
            trace(f"t{self.count}-{i}" if i else f"t{self.count}", *labels, trainable=trainable)
            for i, trainable in enumerate(kinds)
        ]
        made = episode(f"e{self.count}", *traces)
        made["env"]["name"] = "toy" if self.count % 2 else "maze"
        made["group"]["id"] = f"g{self.count % 3}"
        self.writer.append(made, arrival=arrival)
        self.count += 1

    @rule(arrival=st.integers(1, 4))
    def arrive_for_an_eval(self, arrival: int) -> None:
        self.writer.append(simple(self.count), arrival=arrival, kind="eval")
        # Nothing ships an eval.
        self.count += 1

    def trained(self) -> list[str]:
        return [
            trace["id"]
            for record, _, _ in ref.fold_store(self.run_dir)
            for trace in record["traces"]
            if trace["agent"]["trainable"] and trace["info"]["kind"] == "train"
        ]

    @rule(step=st.integers(1, 12), data=st.data())
    def ship(self, step: int, data: st.DataObject) -> None:
        known = self.trained()
        if known:
            self.writer.ship(step, data.draw(st.sampled_from(known)))

    @rule(data=st.data())
    def say_more(self, data: st.DataObject) -> None:
        known = self.trained()
        if known:
            infos: list[Record] = [{"effective": False}, {"advantage": 1.0}, {}]
            info = data.draw(st.sampled_from(infos))
            self.writer.annotate(data.draw(st.sampled_from(known)), info)

    @rule(producer=st.sampled_from(["orch", "trainer"]))
    def roll(self, producer: str) -> None:
        self.writer.producer(producer).roll()

    @rule()
    def roll_the_stream(self) -> None:
        self.writer.stream.roll()

    @rule(
        which=st.sampled_from(["stream", "orch"]),
        stop_at=st.sampled_from(["written", "renamed", "done"]),
    )
    def seal(self, which: str, stop_at: Literal["written", "renamed", "done"]) -> None:
        log = self.writer.stream if which == "stream" else self.writer.producer(which)
        for chunk in range(log.chunk):
            if log.plain(chunk).exists():
                log.seal(chunk, stop_at=stop_at)

    @rule()
    def relaunch(self) -> None:
        self.writer = self.writer.relaunch()

    @precondition(lambda self: self.writer.stream.plain().exists())
    @rule(drop=st.integers(2, 300))
    def read_while_a_line_is_written(self, drop: int) -> None:
        path = self.writer.stream.plain()
        whole = path.read_bytes()
        tear(path, drop)
        assert_store_reads_right(self.run_dir)
        path.write_bytes(whole)

    @rule(
        wanted=st.lists(st.sampled_from(FILTERS), min_size=1, max_size=2),
        subset=st.sampled_from(SUBSETS),
        behind=st.integers(0, 2),
        torn=st.booleans(),
    )
    def ask_for_a_part(
        self, wanted: list[pl.Expr], subset: Subset | None, behind: int, torn: bool
    ) -> None:
        """A filter gives what it gives of the whole, even while the stream's index lags behind."""
        whole = scan(self.run_dir, subset)
        index = self.writer.stream.index
        kept = index.read_bytes()
        lines = kept.splitlines(keepends=True)
        lines = lines[: max(0, len(lines) - behind)]
        if lines and torn:
            lines[-1] = lines[-1][:-5]
        index.write_bytes(b"".join(lines))
        for predicate in (*wanted, pl.all_horizontal(wanted), pl.any_horizontal(wanted)):
            assert_filters_alike(self.run_dir, whole, predicate, subset)
        index.write_bytes(kept)

    @invariant()
    def reads_right(self) -> None:
        assert_store_reads_right(self.run_dir)


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


# --- the corners, by name -------------------------------------------------------------------------


def test_a_chunk_plain_and_sealed_is_read_once(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    for i in range(3):
        writer.append(simple(i), arrival=1)
    writer.ship(2, "t0", "t1", "t2")
    writer.stream.roll()
    writer.producer("orch").roll()
    writer.stream.seal(0, stop_at="renamed")
    writer.producer("orch").seal(0, stop_at="renamed")
    assert writer.stream.plain(0).exists()
    assert writer.stream.sealed(0).exists()
    spans = scan(tmp_path)
    assert spans["length"].sum() == 18
    assert spans["trace_id"].n_unique() == 3


def test_an_unfinished_seal_is_not_read(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.append(simple(0), arrival=1)
    writer.ship(1, "t0")
    writer.stream.roll()
    writer.stream.seal(0, stop_at="written")
    unfinished = writer.stream.folder / "00000.jsonl.zst.tmp"
    unfinished.write_bytes(unfinished.read_bytes()[:20])
    assert scan(tmp_path)["length"].sum() == 6


def test_lines_cross_frames(tmp_path: Path) -> None:
    """A frame can end anywhere: inside a line, inside a character."""
    for frame_size in (1, 7, 64, 1000, 1 << 20):
        run_dir = tmp_path / str(frame_size)
        writer = StoreWriter(run_dir, frame_size=frame_size)
        for i in range(3):
            writer.append(simple(i), arrival=1)
            writer.ship(i + 1, f"t{i}")
        writer.stream.roll()
        writer.stream.seal(0)
        table = read_seek_table(writer.stream.sealed(0).read_bytes())
        assert sum(table.content) == len(ref.read_bytes(writer.stream.sealed(0)))
        assert max(table.content) <= frame_size
        assert_store_reads_right(run_dir)


@pytest.mark.parametrize("frame_size", [1, 200, 3000, 1 << 20])
def test_single_lines_of_a_sealed_chunk(tmp_path: Path, frame_size: int) -> None:
    """A filter that leaves some lines of a chunk, wherever its frames end."""
    writer = StoreWriter(tmp_path, frame_size=frame_size)
    for i in range(8):
        made = simple(i)
        made["env"]["name"] = "toy" if i % 3 else "maze"
        writer.append(made, arrival=i)
        if i != 3:
            writer.ship(1 + i // 2, f"t{i}")
        if i == 5:
            writer.stream.roll()
    writer.stream.seal(0)
    whole = scan(tmp_path)
    for number in range(8):
        assert_filters_alike(tmp_path, whole, pl.col("episode_id") == f"e{number}")
    for predicate in FILTERS:
        assert_filters_alike(tmp_path, whole, predicate)


@pytest.mark.parametrize("sealed", [False, True])
def test_the_index_of_the_stream_lags_behind(tmp_path: Path, sealed: bool) -> None:
    """Episodes that the index does not list yet, or lists by half, are read all the same."""
    writer = StoreWriter(tmp_path)
    for i in range(4):
        writer.append(simple(i), arrival=i)
        writer.ship(i + 1, f"t{i}")
    if sealed:
        writer.stream.seal(0)
    whole = scan(tmp_path)
    index = writer.stream.index.read_bytes()
    ends = [0, *(at + 1 for at, byte in enumerate(index) if byte == ord("\n"))]
    for end in [*ends, *(end - 9 for end in ends[1:])]:
        writer.stream.index.write_bytes(index[:end])
        for number in range(4):
            assert_filters_alike(tmp_path, whole, pl.col("step") == number + 1)
            assert_filters_alike(tmp_path, whole, pl.col("episode_id") == f"e{number}")
    writer.stream.index.unlink()
    assert_filters_alike(tmp_path, whole, pl.col("step") == 2)


def test_a_filter_does_not_trust_an_index_that_knows_less(tmp_path: Path) -> None:
    """An env without a name goes by its id, which the index need not repeat."""
    writer = StoreWriter(tmp_path)
    for i in range(3):
        made = simple(i)
        if i != 1:
            made["env"] = {"id": "only-an-id"}
        writer.append(made, arrival=1)
        writer.ship(2, f"t{i}")
    whole = scan(tmp_path)
    assert set(whole.filter(env="only-an-id")["trace_id"]) == {"t0", "t2"}
    assert_filters_alike(tmp_path, whole, pl.col("env") == "only-an-id")


def test_sealed_chunks_are_like_the_real_ones() -> None:
    paths = sorted(DATA.glob("real-dump/monitors/**/*.zst"))
    assert paths
    for path in paths:
        data = path.read_bytes()
        real = read_seek_table(data)
        content = ref.read_bytes(path)
        assert sum(real.content) == len(content)
        ours = read_seek_table(seekable_zstd(content, real.content[0]))
        assert ours.content == real.content


def test_a_torn_word_of_orch_has_not_been_said(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    for i in range(2):
        writer.append(simple(i), arrival=1)
        writer.ship(3, f"t{i}")
    orch = writer.producer("orch")
    tear(orch.plain(), 5)
    tear(orch.index, 5)
    assert_store_reads_right(tmp_path)
    steps = scan(tmp_path).select("episode_id", "shipped", "step").unique().sort("episode_id")
    assert steps.rows() == [("e0", True, 3), ("e1", False, 1)]


def test_a_torn_index_row_is_no_error(tmp_path: Path) -> None:
    """The log has the word, its index not yet: the trace ships when the index says so."""
    writer = StoreWriter(tmp_path)
    for i in range(2):
        writer.append(simple(i), arrival=1)
        writer.ship(3, f"t{i}")
    whole = writer.producer("orch").index.read_bytes()
    tear(writer.producer("orch").index, 5)
    spans = scan(tmp_path)
    assert spans.filter(pl.col("shipped"))["trace_id"].unique().to_list() == ["t0"]
    writer.producer("orch").index.write_bytes(whole)
    assert_store_reads_right(tmp_path)


def test_a_torn_line_then_a_relaunch(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    for i in range(3):
        writer.append(simple(i), arrival=1)
        writer.ship(2, f"t{i}")
    tear(writer.stream.plain(), 40)
    with pytest.warns(ta.TraceWarning, match="00000.jsonl"):
        ta.scan_spans(tmp_path).collect()
    assert_store_reads_right(tmp_path)
    assert set(scan(tmp_path)["trace_id"]) == {"t0", "t1"}
    writer = writer.relaunch()
    writer.append(simple(3), arrival=4)
    writer.ship(5, "t3")
    assert writer.stream.chunk == 0
    assert_store_reads_right(tmp_path)
    assert set(scan(tmp_path)["trace_id"]) == {"t0", "t1", "t3"}


def test_the_newest_word_wins(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.append(simple(0), arrival=1)
    writer.ship(2, "t0")
    writer.annotate("t0", {"ship": {"step": 7}})
    spans = scan(tmp_path)
    assert set(spans["step"]) == {7}
    assert set(spans["training_version"]) == {6}
    writer.annotate("t0", {"ship": {"time": 9.0}})
    assert set(scan(tmp_path)["step"]) == {7}


def test_taken_back_is_not_shipped(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    for i in range(2):
        writer.append(simple(i), arrival=1)
        writer.ship(2, f"t{i}")
    writer.annotate("t1", {"effective": False})
    found = ta.off_policy_metrics(scan(tmp_path)).to_dicts()
    assert [(row["step"], row["episodes"], row["not_shipped"]) for row in found] == [
        (1, 0, 1),
        (2, 1, 0),
    ]
    writer.annotate("t1", {"effective": True})
    (row,) = ta.off_policy_metrics(scan(tmp_path)).to_dicts()
    assert (row["step"], row["episodes"], row["not_shipped"]) == (2, 2, 0)


def test_dispatch_and_arrival_are_not_the_batch(tmp_path: Path) -> None:
    """`run.work.step` and the arrival's step differ from the step that shipped."""
    writer = StoreWriter(tmp_path)
    own = trace("t", "4")
    writer.append(episode("e", own, policy=(4, 5)), arrival=6)
    writer.ship(9, "t")
    (row,) = ta.off_policy_metrics(scan(tmp_path)).to_dicts()
    assert row["step"] == 9
    assert row["off_policy/token/mean"] == 4.0
    assert (row["off_policy/mean"], row["off_policy/in_flight/mean"]) == (4.0, 1.0)


def test_what_never_shipped_is_counted_and_has_no_age(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    for i in range(4):
        writer.append(simple(i), arrival=3)
    writer.ship(3, "t0")
    spans = scan(tmp_path)
    left = spans.filter(~pl.col("shipped"))
    assert left.select("episode_id", "trace_id", "node", "length", "training_version").rows() == [
        (f"e{i}", None, None, 0, None) for i in (1, 2, 3)
    ]
    assert left["step"].to_list() == [3, 3, 3]
    (row,) = ta.off_policy_metrics(spans).to_dicts()
    assert (row["episodes"], row["traces"], row["sampled_tokens"]) == (1, 1, 6)
    assert (row["training_version"], row["not_shipped"]) == (2, 3)
    # Only the shipped episode's staleness is averaged: policy 0 to 1, trained at version 2.
    assert (row["off_policy/mean"], row["off_policy/in_flight/mean"]) == (2.0, 1.0)

    everything = scan(tmp_path, "all")
    assert everything["length"].sum() == 24
    unshipped = everything.filter(~pl.col("shipped"))
    assert set(unshipped["trace_id"]) == {"t1", "t2", "t3"}
    assert unshipped["training_version"].null_count() == unshipped.height
    counts = ta.age_counts(everything)
    assert counts["tokens"].sum() == 6


def test_nothing_shipped_yet(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    for i in range(2):
        writer.append(simple(i), arrival=i + 1)
    assert_store_reads_right(tmp_path)
    rows = ta.off_policy_metrics(scan(tmp_path)).to_dicts()
    assert [(row["step"], row["episodes"], row["not_shipped"]) for row in rows] == [
        (1, 0, 1),
        (2, 0, 1),
    ]


def test_two_traces_of_an_episode_ship_at_different_steps(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    pair = [trace("ta", "1"), trace("tb", "1", "2"), trace("tj", "default", trainable=False)]
    writer.append(episode("pair", *pair, policy=(1, 2)), arrival=2)
    writer.ship(3, "ta")
    assert_store_reads_right(tmp_path)
    writer.ship(5, "tb")
    assert_store_reads_right(tmp_path)
    three, five = ta.off_policy_metrics(scan(tmp_path)).to_dicts()
    assert (three["step"], three["episodes"], three["sampled_tokens"]) == (3, 1, 3)
    assert (five["step"], five["episodes"], five["sampled_tokens"]) == (5, 1, 6)
    assert (three["off_policy/mean"], five["off_policy/mean"]) == (1.0, 3.0)
    assert (three["not_shipped"], five["not_shipped"]) == (0, 0)
    whole = scan(tmp_path)
    for step in (2, 3, 5):
        assert_filters_alike(tmp_path, whole, pl.col("step") == step)
    # A frozen agent's trace goes with the first batch that took any of the episode.
    frozen = ta.scan_spans(tmp_path, include_frozen=True).filter(pl.col("trace_id") == "tj")
    assert frozen.collect()["step"].to_list() == [3]


def test_the_trace_of_a_shipped_episode_that_was_not(tmp_path: Path) -> None:
    """What trained is read: the other trace is left out, and not counted as an episode."""
    writer = StoreWriter(tmp_path)
    writer.append(episode("pair", trace("ta", "1"), trace("tb", "1")), arrival=2)
    writer.ship(3, "tb")
    spans = scan(tmp_path)
    assert spans["trace_id"].to_list() == ["tb"]
    (row,) = ta.off_policy_metrics(spans).to_dicts()
    assert (row["step"], row["episodes"], row["not_shipped"]) == (3, 1, 0)
    everything = scan(tmp_path, "all").sort("trace_id")
    assert everything.select("trace_id", "step", "shipped", "training_version").rows() == [
        ("ta", 2, False, None),
        ("tb", 3, True, 2),
    ]


def test_evals_stand_beside_and_are_not_counted(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.append(simple(0), arrival=1)
    writer.append(simple(1), arrival=1, kind="eval")
    writer.ship(1, "t0")
    (row,) = ta.off_policy_metrics(scan(tmp_path)).to_dicts()
    assert (row["episodes"], row["not_shipped"]) == (1, 0)


def test_live_rollouts_and_side_files_are_not_traces(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.append(simple(0), arrival=1)
    writer.ship(1, "t0")
    before = scan(tmp_path)
    writer.write_live(trace("t7", "3", "4"))
    writer.write_metrics(1, {"loss": 0.1})
    assert scan(tmp_path).equals(before)


@pytest.mark.parametrize("indexed", [True, False])
def test_the_one_file_layout(tmp_path: Path, indexed: bool) -> None:
    writer = StoreWriter(tmp_path, one_file=True, indexed=indexed)
    for i in range(3):
        writer.append(simple(i), arrival=1)
    writer.ship(2, "t0", "t1")
    writer.annotate("t1", {"effective": False})
    assert not (tmp_path / "monitors/file/traces/stream").exists()
    assert_store_reads_right(tmp_path)
    assert scan(tmp_path).filter(pl.col("shipped"))["trace_id"].unique().to_list() == ["t0"]
    writer = writer.relaunch()
    writer.append(simple(3), arrival=4)
    writer.ship(5, "t3")
    assert_store_reads_right(tmp_path)
    tear(writer.stream.plain(), 9)
    assert_store_reads_right(tmp_path)


def test_a_relaunch_after_everything_was_sealed_opens_a_new_chunk(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.append(simple(0), arrival=1)
    writer.ship(1, "t0")
    writer.stream.seal(0)
    writer.producer("orch").seal(0)
    writer = writer.relaunch()
    writer.append(simple(1), arrival=2)
    writer.ship(3, "t1")
    assert writer.stream.chunk == 1
    assert_store_reads_right(tmp_path)
    steps = scan(tmp_path).select("trace_id", "step").unique().sort("trace_id").rows()
    assert steps == [("t0", 1), ("t1", 3)]
