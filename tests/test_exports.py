"""Token exports: each training sequence finds its branch by its token ids, and stands on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
import reference as ref
from compare import assert_same_frame, assert_same_streams, write_lines, write_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Record, Stored
from strategies import stored_records

import traceage as ta
from traceage.cli import main
from traceage.formats import parts

DATA = Path(__file__).parent.parent / "data"
STEPS = DATA / "real-dump-steps"

few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)

STREAMS = ["trainer_logprob", "entropy", "trainer_mismatch_kl"]
Value = float | None


# --- writing --------------------------------------------------------------------------------------


def node(mask: str, ids: Sequence[int], parent: int | None = None, **more: Any) -> Record:
    """`".ss"`: which of the node's tokens were sampled."""
    count = mask.count("s")
    own: Record = {
        "sampled": count > 0,
        "token_ids": list(ids),
        "mask": [letter == "s" for letter in mask],
        "logprobs": [-1.0] * count,
        "weight_versions": [{"version": "2", "start": 0, "end": count}] if count else None,
        **more,
    }
    return own if parent is None else {"parent": parent, **own}


def trace(*nodes: Record, trace_id: str = "t", **more: Any) -> Record:
    return {"id": trace_id, "nodes": list(nodes), **more}


def sequence(ids: Sequence[int], trained: str, logprobs: Sequence[Value], **more: Any) -> Record:
    """A line of an export: `".ss"` is its loss mask; entropies and KLs follow the logprobs."""
    return {
        "schema_version": 1,
        "step": 3,
        "rank": 0,
        "env_name": "toy \u2028",
        "token_ids": list(ids),
        "position_ids": list(range(len(ids))),
        "loss_mask": [letter == "s" for letter in trained],
        "inference_logprobs": [0.0] * len(ids),
        "trainer_logprobs": list(logprobs),
        "entropy": [None if value is None else -value for value in logprobs],
        "mismatch_kl": [None if value is None else value * value for value in logprobs],
        "is_masked": None,
        "env_names": ["toy"] * len(ids),
        **more,
    }


def export(root: Path, step: int, *lines: Record, rank: int = 0, suffix: str = "") -> Path:
    path = root / "token_exports" / f"step_{step}" / f"rank_{rank}.jsonl{suffix}"
    write_lines(path, lines)
    return path


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of one example."""
    with TemporaryDirectory() as name:
        yield Path(name)


def read(root: Path, **options: Any) -> tuple[pl.DataFrame, ta.ReadSummary]:
    summary = ta.ReadSummary()
    frame = ta.scan_tokens(root, quiet=True, summary=summary, **options).collect()
    return frame, summary


def column(frame: pl.DataFrame, name: str = "trainer_logprob") -> list[Value]:
    return frame[name].to_list()


def tallies(summary: ta.ReadSummary) -> tuple[int, int, int, int]:
    """Sequences and how many matched, branches and how many matched."""
    return (
        summary.export_sequences,
        summary.export_sequences_matched,
        summary.exported_branches,
        summary.exported_branches_matched,
    )


# --- by hand --------------------------------------------------------------------------------------

# Two branches that share a prompt and a completion.
PREFIX = (node("..", [1, 2]), node(".ss", [3, 4, 5], parent=0))
FORKED = trace(*PREFIX, node(".s", [6, 7], parent=1), node("s", [8], parent=1))
LEFT = sequence([1, 2, 3, 4, 5, 6, 7], "...ss.s", [9.0, 9.0, 9.0, -1.0, -2.0, 9.0, -3.0])
RIGHT = sequence([1, 2, 3, 4, 5, 8], "...sss", [9.0, 9.0, 9.0, -4.0, -5.0, -6.0])


def test_each_branch_takes_its_sequence(tmp_path: Path) -> None:
    """From either rank; a shared node has the word of the later branch, a packed one none."""
    packed = sequence([1, 2, 3, 4, 5, 8, 1, 2], "...sss..", [0.0] * 8)
    write_lines(tmp_path / "rollouts/step_3/train/effective/traces.jsonl", [FORKED])
    export(tmp_path, 3, packed, LEFT)
    export(tmp_path, 3, RIGHT, rank=1)
    found, summary = read(tmp_path)
    assert found.select("node", "index", *STREAMS).rows() == [
        (1, 0, -4.0, 4.0, 16.0),
        (1, 1, -5.0, 5.0, 25.0),
        (2, 0, -3.0, 3.0, 9.0),
        (3, 0, -6.0, 6.0, 36.0),
    ]
    assert tallies(summary) == (3, 2, 2, 2)
    (said,) = summary.lines()
    assert said.startswith("1 of 3 training sequences of the token exports match no branch")
    with pytest.warns(ta.TraceWarning, match="1 of 3 training sequences"):
        ta.scan_tokens(tmp_path, ["entropy"]).collect()
    by_branch, _ = read(tmp_path, weighting="branches")
    assert by_branch.select("branch", "position", "trainer_logprob").rows() == [
        (0, 3, -4.0), (0, 4, -5.0), (0, 6, -3.0), (1, 3, -4.0), (1, 4, -5.0), (1, 5, -6.0)
    ]  # fmt: skip


def write_one(root: Path, *nodes: Record) -> None:
    """One trace in batch 3."""
    write_lines(root / "rollouts/step_3/train/effective/traces.jsonl", [trace(*nodes)])


def test_what_was_not_trained_on_has_no_value(tmp_path: Path) -> None:
    """Values outside the loss mask, and that of the first token, are none."""
    write_one(tmp_path, node("s", [1]), node("ss", [2, 3], parent=0), node("s", [4], parent=1))
    export(tmp_path, 3, sequence([1, 2, 3, 4], "ss.s", [-1.0, -2.0, -3.0, -4.0]))
    found, summary = read(tmp_path)
    assert column(found) == [None, None, None, -4.0]
    assert tallies(summary) == (1, 1, 1, 1)


def test_what_is_stamped_wins(tmp_path: Path) -> None:
    stamped = node(".ss", [1, 2, 3], trainer_logprobs=[-7.0, None], entropies=[])
    write_one(tmp_path, stamped)
    export(tmp_path, 3, sequence([1, 2, 3], ".ss", [0.0, -1.0, -2.0]))
    found, _ = read(tmp_path)
    assert found.select(STREAMS).rows() == [(-7.0, 1.0, 1.0), (None, 2.0, 4.0)]


def test_equal_sequences_are_one_another(tmp_path: Path) -> None:
    """Two traces of the same tokens, two sequences of them, one of which knows no entropies."""
    twins = [trace(node(".s", [1, 2]), trace_id=name) for name in "ab"]
    write_lines(tmp_path / "rollouts/step_3/train/effective/traces.jsonl", twins)
    first = sequence([1, 2], ".s", [0.0, -1.0], entropy=None)
    second = sequence([1, 2], ".s", [0.0, -2.0])
    export(tmp_path, 3, first, second)
    found, summary = read(tmp_path)
    assert found.select("trainer_logprob", "entropy").rows() == [(-1.0, 2.0)] * 2
    assert tallies(summary) == (2, 2, 2, 2)


def test_only_its_own_step(tmp_path: Path) -> None:
    """The same tokens in another batch are another sequence; a batch without exports has none."""
    for step in (3, 4, 5):
        one = trace(node(".s", [1, 2]), trace_id=f"t{step}")
        write_lines(tmp_path / f"rollouts/step_{step}/train/effective/traces.jsonl", [one])
    export(tmp_path, 3, sequence([1, 2], ".s", [0.0, -1.0]))
    export(tmp_path, 4, sequence([1, 9], ".s", [0.0, -2.0]))
    found, summary = read(tmp_path)
    assert column(found) == [-1.0, None, None]
    assert tallies(summary) == (2, 1, 2, 1)
    lazy = ta.scan_tokens(tmp_path, ["step", "entropy"], summary=summary)
    assert column(lazy.filter(step=3).collect(), "entropy") == [1.0]
    assert tallies(summary) == (1, 1, 1, 1)


def test_exports_are_read_only_for_what_they_hold(tmp_path: Path) -> None:
    write_one(tmp_path, node(".s", [1, 2], advantages=[1.0]))
    export(tmp_path, 3).write_text("no export\n")
    for names in (["step", "age"], ["logprob", "advantage", "reference_logprob", "position"]):
        found, summary = read(tmp_path, columns=names)
        assert found.height == 1
        assert not summary.exports
    assert ta.scan_spans(tmp_path).collect().height == 1


def test_who_does_not_train_looks_for_nothing(tmp_path: Path) -> None:
    """An evaluation of the step, and a frozen agent."""
    frozen = trace(node(".s", [3, 4]), trace_id="f", agent={"trainable": False})
    write_lines(tmp_path / "rollouts/step_3/train/effective/traces.jsonl", [frozen])
    write_lines(
        tmp_path / "rollouts/step_3/eval/effective/traces.jsonl", [trace(node(".s", [1, 2]))]
    )
    export(
        tmp_path,
        3,
        sequence([1, 2], ".s", [0.0, -1.0]),
        sequence([3, 4], ".s", [0.0, -1.0]),
    )
    found, summary = read(tmp_path, kind="any", include_frozen=True)
    assert column(found) == [None, None]
    assert tallies(summary) == (2, 0, 0, 0)


def test_both_copies_of_a_step(tmp_path: Path) -> None:
    """What arrived and what trained: a sequence that both hold is matched, and counted, once."""
    trained, left = trace(node(".s", [1, 2])), trace(node(".s", [3, 4]), trace_id="left")
    write_lines(tmp_path / "rollouts/step_3/train/effective/traces.jsonl", [trained])
    write_lines(tmp_path / "rollouts/step_3/train/all/traces.jsonl", [trained, left])
    export(tmp_path, 3, sequence([1, 2], ".s", [0.0, -1.0]))
    assert column(read(tmp_path, subset="all")[0]) == [-1.0, None]
    summary = ta.ReadSummary()
    ta.write_dump(tmp_path, tmp_path / "dump", summary=summary)
    assert tallies(summary) == (1, 1, 3, 2)
    assert summary.lines() == []
    assert column(read(tmp_path / "dump")[0]) == [-1.0]
    assert column(read(tmp_path / "dump", subset="all")[0]) == [-1.0, None]


@pytest.mark.parametrize("cut", [1, 40, 0])
def test_a_last_line_that_is_being_written(tmp_path: Path, cut: int) -> None:
    """It is no fault and reported; a line that lacks its newline alone is whole."""
    write_lines(tmp_path / "rollouts/step_3/train/effective/traces.jsonl", [FORKED])
    path = export(tmp_path, 3, LEFT, RIGHT)
    whole = path.read_bytes()
    path.write_bytes(whole[: -1 - cut])
    found, summary = read(tmp_path)
    assert column(found) == ([-1.0, -2.0, -3.0, None] if cut else [-4.0, -5.0, -3.0, -6.0])
    assert summary.torn == ([f"{path}:2"] if cut else [])
    assert tallies(summary) == ((1, 1, 2, 1) if cut else (2, 2, 2, 2))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compressed_exports(tmp_path: Path, suffix: str) -> None:
    """By any name; of a plain and a compressed copy, one is read."""
    write_lines(tmp_path / "rollouts/step_3/train/effective/traces.jsonl", [FORKED])
    export(tmp_path, 3, LEFT, RIGHT)
    path = export(tmp_path, 3, LEFT, RIGHT, suffix=suffix)
    for _ in range(2):
        found, summary = read(tmp_path)
        assert column(found) == [-4.0, -5.0, -3.0, -6.0]
        assert tallies(summary) == (2, 2, 2, 2)
        path = path.rename(path.with_name("rank_0.jsonl"))


# --- faults ---------------------------------------------------------------------------------------

LINE = sequence([1, 2], ".s", [0.0, -1.0])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"{]", "Expecting"),
        (b"[1]", "object"),
        (json.dumps({**LINE, "loss_mask": [True]}).encode(), "loss_mask has 1 entries for 2"),
        (json.dumps({**LINE, "entropy": [0.5] * 3}).encode(), "entropy has 3 entries for 2"),
        (json.dumps({**LINE, "mismatch_kl": ["x", 1]}).encode(), "str"),
        (json.dumps({**LINE, "token_ids": [2**70, 1]}).encode(), "int"),
        (json.dumps({**LINE, "loss_mask": None}).encode(), "loss_mask"),
        (json.dumps({k: v for k, v in LINE.items() if k != "token_ids"}).encode(), "token_ids"),
    ],
    ids=range(8),
)
def test_a_line_that_is_no_sequence(tmp_path: Path, line: bytes, found: str) -> None:
    """An error that names the line; skipped, it is counted once, however often it is met."""
    twins = [trace(node(".s", [1, 2]), trace_id=name) for name in "ab"]
    write_lines(tmp_path / "rollouts/step_3/train/effective/traces.jsonl", twins)
    write_lines(tmp_path / "rollouts/step_3/train/all/traces.jsonl", twins)
    path = export(tmp_path, 3, LINE)
    path.write_bytes(line + b"\n" + path.read_bytes())
    with pytest.raises(ta.TraceError, match=rf"rank_0\.jsonl:1: bad token export: .*{found}.*skip"):
        ta.scan_tokens(tmp_path, STREAMS).collect()
    table, summary = read(tmp_path, on_error="skip")
    assert column(table) == [-1.0, -1.0]
    assert summary.problems == {"bad token export": 1}
    assert tallies(summary) == (1, 1, 2, 2)
    ta.write_dump(tmp_path, tmp_path / "dump", on_error="skip", summary=summary, quiet=True)
    assert summary.problems == {"bad token export": 1}


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out.parquet"
    write_one(run, node(".s", [1, 2]))
    export(run, 3, LINE, sequence([1], "s", [0.0]), {"token_ids": [1, 2]})
    command = ["tokens", str(run), "-o", str(out), "--columns", "step,trainer_logprob"]
    assert main(command) == 2
    assert "rank_0.jsonl:3: bad token export" in capsys.readouterr().err
    assert main([*command, "--on-error", "skip", "--quiet"]) == 3
    said = capsys.readouterr().err
    assert "skipped 1 x bad token export" in said
    assert "1 of 2 training sequences" in said
    assert pl.read_parquet(out).rows() == [(3, -1.0)]


def test_a_damaged_export(tmp_path: Path) -> None:
    write_one(tmp_path, node(".s", [1, 2]))
    path = export(tmp_path, 3, LINE, suffix=".gz")
    path.write_bytes(path.read_bytes()[:-12])
    export(tmp_path, 3, LINE, rank=1)
    with pytest.raises(ta.TraceError, match=r"rank_0\.jsonl\.gz: damaged file"):
        ta.scan_tokens(tmp_path, STREAMS).collect()
    table, summary = read(tmp_path, on_error="skip")
    assert column(table) == [-1.0]
    assert summary.problems == {"damaged file": 1}


def test_a_bare_nan_is_no_value(tmp_path: Path) -> None:
    write_one(tmp_path, node(".s", [1, 2]), node("s", [3], parent=0))
    export(tmp_path, 3, sequence([1, 2, 3], ".ss", [float("nan"), float("nan"), -2.0]))
    assert column(read(tmp_path)[0]) == [None, -2.0]


# --- random records -------------------------------------------------------------------------------


def branches_of(stored: Sequence[Stored]) -> Iterator[tuple[int, list[Record]]]:
    """Step and nodes, root to leaf, of every training sample."""
    for record, step, _ in stored:
        assert step is not None
        for one in [record] if "traces" not in record else record["traces"] or []:
            nodes: list[Record] = one.get("nodes") or []
            for leaf in ref.leaves_of(nodes):
                if ref.is_trainable(one) and ref.is_training_sample(nodes, leaf):
                    yield step, [nodes[at] for at in ref.path_to(nodes, leaf)]


def sampled_places(path: list[Record]) -> Iterator[tuple[Record, list[int]]]:
    """The sampled nodes of a branch, and where their sampled tokens stand in its ids."""
    before = 0
    for own in path:
        if ref.is_sampled(own):
            places = ref.places_of(own, ref.sampled_count(own))
            if places:
                yield own, [before + at for at in places]
        before += len(ref.ids_of(own))


Joined = dict[int, list[Record]]


def stamp(stored: Sequence[Stored], exports: Joined) -> tuple[int, int]:
    """The reference: put onto the nodes what the sequence of the same ids says.

    Returns how many branches there are and how many found a sequence.
    """
    pending: list[tuple[Record, str, list[float]]] = []
    branches = matched = 0
    for step, path in branches_of(stored):
        if step not in exports:
            continue
        branches += 1
        ids = tuple(token for own in path for token in ref.ids_of(own))
        mine = [line for line in exports[step] if tuple(line["token_ids"]) == ids]
        matched += bool(mine)
        for own, places in sampled_places(path):
            for key, name in (
                ("trainer_logprobs", "trainer_logprobs"),
                ("entropies", "entropy"),
                ("mismatch_kl", "mismatch_kl"),
            ):
                values = [first_value(mine, name, at) for at in places]
                if None not in values:
                    pending.append((own, key, [value for value in values if value is not None]))
    stamped = {(id(own), key) for own, key, _ in pending if own.get(key)}
    for own, key, found in pending:
        if (id(own), key) not in stamped:
            own[key] = found
    return branches, matched


def first_value(lines: list[Record], name: str, at: int) -> Value:
    for line in lines:
        values = line[name]
        if at and line["loss_mask"][at] and values and values[at] is not None:
            return float(values[at])
    return None


def random_exports(stored: Sequence[Stored], rng: Random) -> Joined:
    """Sequences whole and cut, packed and twice, some with nothing to say at some places."""
    exports: Joined = {}
    steps = {step for step, _ in branches_of(stored) if rng.random() < 0.8}
    for step, path in branches_of(stored):
        if step not in steps:
            continue
        ids = [token for own in path for token in ref.ids_of(own)]
        trained = {at for _, places in sampled_places(path) for at in places}
        if rng.random() < 0.3:
            trained = {at for at in trained if rng.random() < 0.8}
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            ids = [*ids, *ids] if rng.random() < 0.1 else ids
            ids = ids[:-1] if rng.random() < 0.1 else ids
            mask = "".join("s" if at in trained else "." for at in range(len(ids)))
            values: list[Value] = [rng.randrange(-64, 64) / 8 for _ in ids]
            line = sequence(ids, mask, values)
            if rng.random() < 0.2:
                line[rng.choice(["entropy", "mismatch_kl"])] = None
            if values and rng.random() < 0.2:
                line["trainer_logprobs"][rng.randrange(len(values))] = None
            exports.setdefault(step, []).append(line)
    return exports


@few
@given(
    stored_records(),
    st.integers(0, 1000),
    st.sampled_from(["", ".gz", ".zst"]),
    st.sampled_from(("nodes", "branches")),
    st.booleans(),
)
def test_exports_read_as_if_they_had_been_stamped(
    stored: list[Stored],
    seed: int,
    suffix: str,
    weighting: Literal["nodes", "branches"],
    frozen: bool,
) -> None:
    rng = Random(seed)
    exports = random_exports(stored, rng)
    with folder() as root:
        write_steps(root / "run", stored)
        for step, lines in exports.items():
            cut = rng.randint(0, len(lines))
            for rank, mine in enumerate((lines[:cut], lines[cut:])):
                export(root / "run", step, *mine, rank=rank, suffix=suffix)
        ids = {
            (step, tuple(token for own in path for token in ref.ids_of(own)))
            for step, path in branches_of(stored)
        }
        lines_matched = sum(
            (step, tuple(line["token_ids"])) in ids
            for step, lines in exports.items()
            for line in lines
        )
        branches, branches_matched = stamp(stored, exports)
        rows = ref.token_rows(stored, include_frozen=frozen)
        options: dict[str, Any] = {"weighting": weighting, "include_frozen": frozen}
        found, summary = read(root / "run", **options)
        if weighting == "nodes" or not frozen:
            own = ref.sample_rows(stored, rows) if weighting == "branches" else rows
            assert_same_streams(found, own)
        total = sum(map(len, exports.values()))
        assert tallies(summary) == (total, lines_matched, branches, branches_matched)

        ta.write_dump(root / "run", root / "dump", quiet=True, summary=summary)
        assert tallies(summary) == (total, lines_matched, branches, branches_matched)
        place = {"file", "line"}
        columns = [name for name in found.columns if name not in place]
        of_dump, _ = read(root / "dump", **options)
        assert_same_frame(found.select(columns), of_dump.select(columns))


# --- the real dump --------------------------------------------------------------------------------


def test_every_sequence_of_the_real_dump(tmp_path: Path) -> None:
    """All 80 find their branch, and every sampled token has what its sequence says there."""
    found, summary = read(STEPS)
    assert tallies(summary) == (80, 80, 80, 80)
    assert found.height == 68_927
    assert found.select(pl.col(STREAMS).null_count()).row(0) == (0, 0, 0)
    exports = {
        int(path.parent.name.removeprefix("step_")): ref.read_lines(path)
        for path in (STEPS / "token_exports").glob("step_*/rank_0.jsonl.zst")
    }
    stored = ref.read_steps(STEPS)
    assert stamp(stored, exports) == (80, 80)
    assert_same_streams(found, ref.token_rows(stored))
    ta.write_dump(STEPS, tmp_path)
    columns = [name for name in found.columns if name not in ("file", "line")]
    assert_same_frame(found.select(columns), read(tmp_path)[0].select(columns))


def test_mismatch_by_age_of_the_real_dump() -> None:
    """Recomputed from the record's logprobs and the exports' own, and as the trainer logged it."""
    names = ["age", "logprob", "trainer_logprob", "trainer_mismatch_kl"]
    found = ta.scan_tokens(STEPS, names).cast({pl.Float32: pl.Float64}).collect()
    r = pl.col("trainer_logprob") - pl.col("logprob")
    by_age = found.group_by("age").agg(
        pl.len(), r.mean(), (r.exp() - r - 1).mean().alias("kl"), pl.col(names[-1]).mean()
    )
    figures = json.loads((STEPS / "expected.json").read_text())["mismatch_by_age"]
    assert sorted(map(str, by_age["age"])) == sorted(figures)
    for age, tokens, ratio, kl, logged in by_age.iter_rows():
        row = figures[str(age)]
        assert tokens == row["tokens"]
        # Exports round to 6 decimals and the tokens table to 32 bits: of a KL of 1e-4 that is far
        # below a millionth in a mean, though up to 1e-6 of one token's log ratio.
        assert ratio == pytest.approx(row["mean_log_ratio"], abs=5e-8)
        assert kl == pytest.approx(row["mismatch_kl"], rel=2e-6)
        assert logged == pytest.approx(row["mismatch_kl"], rel=2e-6)


def test_the_exports_say_what_the_trace_store_says() -> None:
    """The same run with annotations, which are rounded: to 4 decimals, the KL to 6."""
    keys = ["trace_id", "node", "index"]
    exported = ta.scan_tokens(STEPS, [*keys, *STREAMS]).collect()
    annotated = ta.scan_tokens(DATA / "real-dump", [*keys, *STREAMS]).collect()
    both = exported.join(annotated, on=keys, suffix="/store")
    assert both.height == 68_927
    for name, room in zip(STREAMS, (5.1e-5, 5.1e-5, 5.1e-7), strict=True):
        assert np.abs(both[name] - both[f"{name}/store"]).max() <= room


def test_where_a_file_is_cut_and_who_reads_it_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many parts of one step's file, read by two processes: no sequence counts twice or as lost."""
    step = STEPS / "rollouts/step_4/train/effective/traces.jsonl.zst"
    lines = [ref.read_lines(step), ref.read_lines(STEPS / "token_exports/step_4/rank_0.jsonl.zst")]
    write_lines(tmp_path / "rollouts/step_4/train/effective/traces.jsonl", lines[0])
    export(tmp_path, 4, *lines[1], sequence([1, 2], ".s", [0.0, -1.0]))
    whole, summary = read(tmp_path, workers=1)
    assert tallies(summary) == (9, 8, 8, 8)
    monkeypatch.setattr(parts, "PART_BYTES", 30_000)
    for workers in (1, 2):
        table, told = read(tmp_path, workers=workers)
        assert table.equals(whole)
        assert tallies(told) == (9, 8, 8, 8)
        assert told.lines() == summary.lines()


def test_a_conversion_takes_up_what_was_exported_since(tmp_path: Path) -> None:
    write_one(tmp_path / "run", node(".s", [1, 2]))
    ta.write_dump(tmp_path / "run", tmp_path / "dump")
    assert column(read(tmp_path / "dump")[0]) == [None]
    export(tmp_path / "run", 3, LINE)
    for written in (True, False):
        done = ta.write_dump(tmp_path / "run", tmp_path / "dump")
        assert done["written"].to_list() == [written]
        assert column(read(tmp_path / "dump")[0]) == [-1.0]
