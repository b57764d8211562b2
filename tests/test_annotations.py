"""Streams learned later, found in a store and folded onto the nodes of their trace."""

from __future__ import annotations

import json
import math
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as ref
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import Record
from store_writer import StoreWriter, seekable_zstd, tear

from traceage.errors import TraceError
from traceage.formats import annotations as module
from traceage.formats.annotations import Annotation, AnnotationReader, Branch, Value, fold

DATA = Path(__file__).parent.parent / "data"
ROOT = Path("monitors/file/traces")

Streams = dict[str, list[Value]]
Folded = dict[str, dict[int, list[float | None]]]
Masks = list[NDArray[np.bool_] | None]


def mask(text: str) -> NDArray[np.bool_]:
    """`"..ss"`: two tokens of scaffold, then two sampled ones."""
    return np.array([letter == "s" for letter in text], bool)


def said(*branches: tuple[int, Streams]) -> Annotation:
    return Annotation("trainer", [Branch(index, streams) for index, streams in branches])


def plain(folded: dict[str, dict[int, NDArray[np.float32]]]) -> Folded:
    """The folded streams as lists, None for NaN."""
    for nodes in folded.values():
        assert all(values.dtype == np.float32 for values in nodes.values())
    return {
        stream: {
            node: [None if math.isnan(value) else value for value in values.tolist()]
            for node, values in nodes.items()
        }
        for stream, nodes in folded.items()
    }


# --- folding --------------------------------------------------------------------------------------

# A prompt, an answer that two turns go on from, and the two of them:
#   0 (2 tokens) - 1 (3, two sampled) - 2 (2, one sampled)     branch 0
#                                     - 3 (1, sampled)         branch 1
PARENTS = [-1, 0, 1, 1]
LENGTHS = [2, 3, 2, 1]
SAMPLED: Masks = [None, mask(".ss"), mask(".s"), mask("s")]
LEFT: list[Value] = [None, None, None, 1.0, 2.0, None, 3.0]
RIGHT: list[Value] = [None, None, None, 4.0, 5.0, 6.0]


def folding(*annotations: Annotation, sampled: Masks | None = None) -> Folded:
    wanted = {"entropies", "advantages", "is_masked"}
    return plain(fold(PARENTS, LENGTHS, sampled or SAMPLED, annotations, wanted))


def test_each_node_takes_its_stretch() -> None:
    assert folding(said((0, {"entropies": LEFT}))) == {"entropies": {1: [1.0, 2.0], 2: [3.0]}}


def test_of_two_branches_the_later_wins_a_shared_node() -> None:
    left, right = (0, {"entropies": LEFT}), (1, {"entropies": RIGHT})
    assert folding(said(left, right))["entropies"] == {1: [4.0, 5.0], 2: [3.0], 3: [6.0]}
    assert folding(said(right, left))["entropies"] == {1: [1.0, 2.0], 2: [3.0], 3: [6.0]}


def test_the_newest_annotation_wins() -> None:
    first, second = said((1, {"entropies": RIGHT})), said((0, {"entropies": LEFT}))
    assert folding(first, second)["entropies"] == {1: [1.0, 2.0], 2: [3.0], 3: [6.0]}


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_a_node_does_not_take_a_stream_with_a_hole(nothing: Value) -> None:
    holed = [*LEFT[:4], nothing, *LEFT[5:]]
    assert folding(said((0, {"entropies": holed}))) == {"entropies": {2: [3.0]}}
    # Nor does the hole take away what an older word said.
    older = said((1, {"entropies": RIGHT}))
    assert folding(older, said((0, {"entropies": holed})))["entropies"][1] == [4.0, 5.0]


def test_is_masked_keeps_holes_but_not_emptiness() -> None:
    marks: list[Value] = [None, None, None, True, None, None, None]
    assert folding(said((0, {"is_masked": marks}))) == {"is_masked": {1: [1.0, None]}}
    older: list[Value] = [None, None, None, False, True, False]
    unsaid = said((1, {"is_masked": older}), (0, {"is_masked": [None] * 7}))
    assert folding(unsaid) == {"is_masked": {1: [0.0, 1.0], 3: [0.0]}}


def test_a_mask_with_holes() -> None:
    sampled: Masks = [None, mask("s.s"), mask(".s"), mask("s")]
    values: list[Value] = [None, None, 7.0, None, 8.0, None, 9.0]
    assert folding(said((0, {"entropies": values})), sampled=sampled) == {
        "entropies": {1: [7.0, 8.0], 2: [9.0]}
    }


def test_nodes_without_sampled_tokens_take_nothing() -> None:
    sampled: Masks = [None, mask("..."), None, mask("s")]
    both = said((0, {"entropies": [0.5] * 7}), (1, {"entropies": [0.25] * 6}))
    assert folding(both, sampled=sampled) == {"entropies": {3: [0.25]}}
    empty = fold([-1], [0], [mask("")], [said((0, {"entropies": []}))], {"entropies"})
    assert empty == {}


def test_only_wanted_streams_are_folded() -> None:
    extra = said((0, {"entropies": LEFT, "surprise": [1.0], "advantages": [0.5] * 7}))
    assert set(folding(extra)) == {"entropies", "advantages"}


def test_leaves_of_a_forest_are_counted_in_node_order() -> None:
    # Two roots; the leaves are 1, 3, 4.
    parents, lengths = [-1, 0, -1, 2, 0], [1, 1, 1, 1, 1]
    word = said(
        (0, {"entropies": [0, 0.5]}), (1, {"entropies": [1, 1.5]}), (2, {"entropies": [2, 2.5]})
    )
    folded = plain(fold(parents, lengths, [mask("s")] * 5, [word], {"entropies"}))
    assert folded["entropies"] == {0: [2.0], 1: [0.5], 2: [1.0], 3: [1.5], 4: [2.5]}


@pytest.mark.parametrize("count", [0, 6, 8])
def test_a_stream_of_another_length_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"entropies of branch 0 has {count} values.* are 7"):
        folding(said((0, {"entropies": [0.5] * count})))


@pytest.mark.parametrize("index", [-1, 2])
def test_a_branch_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"branch {index} of a trace that has 2 branches"):
        folding(said((index, {"entropies": LEFT})))


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="node 1: a mask of 2 for 3 token_ids"):
        folding(sampled=[None, mask("ss"), None, None])


def test_values_beyond_float32_are_infinite() -> None:
    word = said((0, {"entropies": [1e300, -1e300]}))
    values = fold([-1], [2], [mask("ss")], [word], {"entropies"})["entropies"][0]
    assert values.tolist() == [math.inf, -math.inf]


def naive(
    parents: list[int], sampled: list[list[bool] | None], words: list[Annotation], wanted: set[str]
) -> Folded:
    """Token by token: every value a branch gives to a place, then whole nodes or nothing."""
    nodes: list[Record] = [{"parent": p} if p >= 0 else {} for p in parents]
    folded: Folded = {}
    for word in words:
        for branch in word.branches:
            path = ref.path_to(nodes, ref.leaves_of(nodes)[branch.index])
            for stream, stored in branch.streams.items():
                left = list(stored)
                for node in path:
                    taken: list[float | None] = []
                    for flag in sampled[node] or []:
                        value = left.pop(0)
                        if flag:
                            taken.append(None if value is None else float(value))
                    if sampled[node] is None:
                        left = left[TOKENS_UNSAMPLED:]
                    held = sum(value is not None for value in taken)
                    whole = held > 0 if stream == "is_masked" else held == len(taken) > 0
                    if whole and stream in wanted:
                        folded.setdefault(stream, {})[node] = taken
                assert not left
    return folded


TOKENS_UNSAMPLED = 2
"""The tokens of a node that the model did not sample, in the cases that are drawn."""

values = st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 4))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[list[bool] | None], list[Annotation]]:
    count = draw(st.integers(1, 6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    masks = st.one_of(st.none(), st.lists(st.booleans(), max_size=4))
    sampled = [draw(masks) for _ in range(count)]
    nodes: list[Record] = [{"parent": p} if p >= 0 else {} for p in parents]
    leaves = ref.leaves_of(nodes)
    words = []
    for _ in range(draw(st.integers(0, 3))):
        branches = []
        for index in draw(st.lists(st.integers(0, len(leaves) - 1), max_size=3)):
            path = ref.path_to(nodes, leaves[index])
            length = sum(
                TOKENS_UNSAMPLED if flags is None else len(flags)
                for flags in (sampled[node] for node in path)
            )
            # Mostly whole streams: a node with a hole is the exception.
            kind = draw(st.sampled_from([st.just(0.5), values]))
            streams: Streams = {
                name: draw(st.lists(kind, min_size=length, max_size=length))
                for name in draw(st.sets(st.sampled_from(["entropies", "is_masked", "other"])))
            }
            branches.append(Branch(index, streams))
        words.append(Annotation("trainer", branches))
    return parents, sampled, words


@given(cases())
def test_folding_agrees_with_the_naive_reference(
    case: tuple[list[int], list[list[bool] | None], list[Annotation]],
) -> None:
    parents, sampled, words = case
    lengths = [TOKENS_UNSAMPLED if flags is None else len(flags) for flags in sampled]
    arrays: Masks = [None if flags is None else np.array(flags, bool) for flags in sampled]
    wanted = {"entropies", "is_masked"}
    assert plain(fold(parents, lengths, arrays, words, wanted)) == naive(
        parents, sampled, words, wanted
    )


# --- reading a store ------------------------------------------------------------------------------


@pytest.fixture(params=[64, module._BLOCK], ids=["small blocks", "whole blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that cross several blocks, as long ones do, and blocks that hold many lines."""
    monkeypatch.setattr(module, "_BLOCK", request.param)


WANTED = frozenset({"entropies", "advantages"})


def stream(seed: int, count: int = 40) -> list[Value]:
    draw = random.Random(seed)
    return [None if draw.random() < 0.2 else round(draw.random(), 4) for _ in range(count)]


def write(store: StoreWriter, numbers: range, producer: str = "trainer") -> None:
    """One annotation a trace of `numbers`, then scalars of each without branches."""
    for n in numbers:
        branches = [
            {"index": i, "entropies": stream(n + i), "surprise": ["\u2028", {}]} for i in (0, 1)
        ]
        store.annotate(f"t{n}", {"note": "\u2028"}, producer=producer, branches=branches)
        store.annotate(f"t{n}", {"later": True}, producer=producer)


def unnumber(index: Path) -> None:
    """Make an index an early one, which named no chunk."""
    index.write_text(index.read_text().replace('"chunk":0,', ""))


def expected(n: int, producer: str = "trainer") -> Annotation:
    return Annotation(producer, [Branch(i, {"entropies": stream(n + i)}) for i in (0, 1)])


def read(store: StoreWriter) -> AnnotationReader:
    return AnnotationReader(str(store.root), WANTED)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("indexed", [True, False])
def test_plain_and_sealed_chunks(tmp_path: Path, indexed: bool) -> None:
    store = StoreWriter(tmp_path, indexed=indexed, frame_size=150)
    log = store.producer("trainer")
    for start in (0, 5, 10, 15):
        write(store, range(start, start + 5))
        log.roll()
    log.seal(0)
    log.seal(1, stop_at="renamed")
    log.seal(2, stop_at="written")
    reader = read(store)
    log.seal(3)  # Sealed after the index was read.
    order = [*range(20), *random.Random(1).sample(range(20), 20)]
    assert [reader.of(f"t{n}") for n in order] == [[expected(n)] for n in order]
    assert reader.of("t20") == []


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("index", ["numbered", "unnumbered", "missing"])
@pytest.mark.parametrize("stored", ["plain", "seekable", "streamed"])
def test_the_one_file_layout(tmp_path: Path, index: str, stored: str) -> None:
    store = StoreWriter(tmp_path, indexed=index != "missing", one_file=True)
    write(store, range(10))
    path = store.root / "annotations/trainer.jsonl"
    if index == "unnumbered":
        unnumber(store.producer("trainer").index)
    if stored != "plain":
        data = path.read_bytes()
        other = zstandard.compress(data)
        packed = seekable_zstd(data, 100) if stored == "seekable" else other
        path.with_name(path.name + ".zst").write_bytes(packed)
        path.unlink()
    reader = read(store)
    order = [3, 1, 2, 0, 9, 9, 4]
    assert [reader.of(f"t{n}") for n in order] == [[expected(n)] for n in order]


@pytest.mark.usefixtures("blocks")
def test_a_run_that_went_on_in_chunks(tmp_path: Path) -> None:
    old = StoreWriter(tmp_path, one_file=True)
    write(old, range(3))
    index = old.producer("trainer").index
    unnumber(index)
    new = StoreWriter(tmp_path)
    write(new, range(2, 6))
    for _ in range(2):
        reader = read(new)
        assert reader.of("t0") == [expected(0)]
        assert reader.of("t2") == [expected(2), expected(2)]
        assert reader.of("t5") == [expected(5)]
        index.unlink(missing_ok=True)  # The second time, without it.


def test_producers_by_name_each_in_write_order(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path)
    log = store.producer("trainer")
    for value in range(40):
        for producer in ("trainer", "orch", "judge.v2"):
            branches = [{"index": 0, "advantages": [value]}]
            store.annotate("t", {}, producer=producer, branches=branches)
            store.annotate(f"other{value}", {}, producer=producer)
        if value % 10 == 9:
            log.roll()
    log.seal(0, 1)
    found = [(a.producer, a.branches[0].streams["advantages"]) for a in read(store).of("t")]
    assert found == [(p, [float(v)]) for p in ("judge.v2", "orch", "trainer") for v in range(40)]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("drop", [1, 2, 40])
def test_a_torn_annotation_is_not_there_yet(tmp_path: Path, indexed: bool, drop: int) -> None:
    store = StoreWriter(tmp_path, indexed=indexed)
    store.annotate("t0", {}, producer="trainer", branches=[{"index": 0, "entropies": stream(0)}])
    store.annotate("t1", {}, producer="trainer", branches=[{"index": 0, "entropies": stream(1)}])
    tear(store.producer("trainer").plain(), drop)
    reader = read(store)
    assert len(reader.of("t0")) == 1
    assert len(reader.of("t1")) == (drop == 1)


@pytest.mark.parametrize("drop", [2, 40])
def test_a_torn_index(tmp_path: Path, drop: int) -> None:
    store = StoreWriter(tmp_path)
    store.annotate("t0", {}, producer="trainer", branches=[{"index": 0, "entropies": [0.5]}])
    store.annotate("t1", {}, producer="trainer", branches=[{"index": 0, "entropies": [0.5]}])
    tear(store.producer("trainer").index, drop)
    assert [len(read(store).of(name)) for name in ("t0", "t1")] == [1, 0]


@pytest.mark.parametrize("indexed", [True, False])
def test_bare_nan_is_no_value(tmp_path: Path, indexed: bool) -> None:
    store = StoreWriter(tmp_path, indexed=indexed)
    branches = [{"index": 0, "entropies": [math.nan, 0.5], "surprise": [math.inf]}]
    store.annotate("t", {"advantage": math.nan}, producer="trainer", branches=branches)
    assert read(store).of("t") == [Annotation("trainer", [Branch(0, {"entropies": [None, 0.5]})])]


@pytest.mark.parametrize("indexed", [True, False])
def test_blank_lines_are_passed_over(tmp_path: Path, indexed: bool) -> None:
    store = StoreWriter(tmp_path, indexed=indexed)
    log = store.producer("trainer")
    write(store, range(1))
    for path in (log.plain(), log.index) if indexed else (log.plain(),):
        with path.open("ab") as file:
            file.write(b"\n \n")
    write(store, range(1, 2))
    assert [read(store).of(f"t{n}") for n in range(2)] == [[expected(0)], [expected(1)]]


def test_a_chunk_sealed_between_being_listed_and_read(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path)
    write(store, range(2))
    log = store.producer("trainer")
    listed = str(log.plain())
    before = list(module._decoded(listed, module._line))
    log.seal(0)
    assert list(module._decoded(listed, module._line)) == before


def test_a_shared_hash_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreWriter(tmp_path)
    write(store, range(4))
    monkeypatch.setattr(module, "_hash", lambda trace_id: 7)
    assert [read(store).of(f"t{n}") for n in range(5)] == [[expected(n)] for n in range(4)] + [[]]


def test_a_reader_crosses_to_another_process(tmp_path: Path) -> None:
    """It can be built once and sent to workers, which do not load polars for it."""
    store = StoreWriter(tmp_path)
    write(store, range(4))
    plain_chunk = store.producer("trainer").plain()
    sealed = store.producer("trainer").sealed()
    sealed.write_bytes(zstandard.compress(plain_chunk.read_bytes()))
    plain_chunk.unlink()
    reader = read(store)
    assert reader.of("t1") == [expected(1)]
    code = (
        "import pickle, sys\n"
        "reader = pickle.loads(sys.stdin.buffer.read())\n"
        "assert 'polars' not in sys.modules\n"
        "sys.stdout.buffer.write(pickle.dumps([reader.of(f't{n}') for n in range(5)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(reader), capture_output=True, check=True
    )
    assert pickle.loads(done.stdout) == [*([expected(n)] for n in range(4)), []]


def test_nothing_to_read(tmp_path: Path) -> None:
    assert AnnotationReader(str(tmp_path), WANTED).of("t") == []
    store = StoreWriter(tmp_path)
    write(store, range(2))
    assert AnnotationReader(str(store.root), frozenset()).of("t0") == []
    # Scalars alone were copied: the producer counts as one that wrote no streams.
    store.producer("trainer").plain().unlink()
    assert read(store).of("t0") == []


def test_a_missing_chunk_is_told(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path)
    log = store.producer("trainer")
    write(store, range(2))
    log.roll()
    write(store, range(2, 4))
    log.plain(0).unlink()
    reader = read(store)
    assert reader.of("t2") == [expected(2)]
    with pytest.raises(TraceError, match=r"trainer.00000\.jsonl: the index names it"):
        reader.of("t0")


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        '{"trace_id": "t", "branches": [{"entropies": [0.5]}]}',
        '{"trace_id": "t", "branches": [{"index": 0, "entropies": ["0.5"]}]}',
        '{"trace_id": "t", "branches": [{"index": 0, "entropies": {}}]}',
        '{"trace_id": "t", "branches": {"index": 0}}',
        '{"trace_id": "t", "branches": [{"index": 0, "entropies": '
        + "[" * 9000
        + "]" * 9000
        + "}]}",
    ],
)
def test_a_line_that_is_no_annotation_is_told(tmp_path: Path, line: str) -> None:
    store = StoreWriter(tmp_path)
    store.annotate("t", {}, producer="trainer")
    store.producer("trainer").plain().write_text(line + "\n")
    with pytest.raises(TraceError, match=r"00000\.jsonl: at byte 0: not an annotation"):
        read(store).of("t")


def test_an_index_line_that_is_none_is_told(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path)
    write(store, range(1))
    index = store.producer("trainer").index
    first = index.read_bytes()
    for wrong in (b'{"trace_id":"t"}\n', b'{"trace_id":"t","offset":-1}\n', b"{\n"):
        index.write_bytes(first + wrong + first)
        with pytest.raises(TraceError, match=rf"index\.jsonl: at byte {len(first)}: not an"):
            read(store)


# --- the real dump --------------------------------------------------------------------------------


def real_traces() -> list[Record]:
    stored = ref.fold_store(DATA / "real-dump")
    return [trace for record, _, _ in stored for trace in record["traces"]]


def folded_trace(trace: Record, reader: AnnotationReader, wanted: frozenset[str]) -> Any:
    nodes: list[Record] = trace["nodes"]
    return fold(
        [node.get("parent", -1) for node in nodes],
        [len(node["token_ids"]) for node in nodes],
        [np.array(node["mask"], bool) if ref.is_sampled(node) else None for node in nodes],
        reader.of(trace["id"]),
        wanted,
    )


def test_every_stream_of_the_real_dump_folds() -> None:
    """Each sampled node takes each stream, the values its annotation holds there."""
    wanted = frozenset(["advantages", "trainer_logprobs", "entropies", "mismatch_kl", "unheard_of"])
    reader = AnnotationReader(str(DATA / "real-dump" / ROOT), wanted)
    held: dict[str, list[int]] = {}
    for trace in real_traces():
        for name, nodes in folded_trace(trace, reader, wanted).items():
            for node, found in nodes.items():
                assert len(found) == ref.sampled_count(trace["nodes"][node])
                assert not np.isnan(found).any()
                held.setdefault(name, []).append(len(found))
    assert set(held) == wanted - {"unheard_of"}
    assert {name: (len(n), sum(n)) for name, n in held.items()} == dict.fromkeys(
        held, (190, 68_927)
    )


def test_mismatch_by_age_of_the_real_dump() -> None:
    """Log ratios and KL of the folded streams come to the figures of the unrounded exports."""
    wanted = frozenset({"trainer_logprobs", "mismatch_kl"})
    reader = AnnotationReader(str(DATA / "real-dump" / ROOT), wanted)
    ratios: dict[int, list[float]] = {}
    stored_kl: dict[int, list[float]] = {}
    for trace in real_traces():
        step = ref.ship_step(trace)
        assert step is not None
        folded = folded_trace(trace, reader, wanted)
        for index, node in enumerate(trace["nodes"]):
            if not ref.is_sampled(node):
                continue
            ages = [step - 1 - int(label or -1) for label in ref.labels_of(node)]
            trained = folded["trainer_logprobs"][index].tolist()
            kl = folded["mismatch_kl"][index].tolist()
            for age, new, old, k in zip(ages, trained, node["logprobs"], kl, strict=True):
                ratios.setdefault(age, []).append(new - old)
                stored_kl.setdefault(age, []).append(k)
    figures = json.loads((DATA / "real-dump/expected.json").read_text())["mismatch_by_age"]
    assert {str(age): len(found) for age, found in ratios.items()} == {
        age: row["tokens"] for age, row in figures.items()
    }
    for age, row in figures.items():
        found = np.array(ratios[int(age)])
        # Two logprobs rounded to 4 decimals: an error of up to 1e-4 a token, and of far less in a
        # mean; in the KL half its square.
        assert found.mean() == pytest.approx(row["mean_log_ratio"], abs=5e-6)
        assert (np.exp(found) - found - 1).mean() == pytest.approx(row["mismatch_kl"], abs=2e-8)
        assert np.mean(stored_kl[int(age)]) == pytest.approx(row["mismatch_kl"], abs=2e-8)
