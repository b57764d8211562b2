"""The rules that are easy to get wrong, each on a case small enough to work by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from store_writer import StoreWriter

import traceage as ta

Record = dict[str, Any]


def node(*spans: tuple[str, int, int], scaffold: int = 2, tokens: int = 10, **more: Any) -> Record:
    """A completion of `tokens` sampled tokens behind a scaffold of tokens that were not sampled."""
    return {
        "sampled": True,
        "token_ids": list(range(scaffold + tokens)),
        "mask": [False] * scaffold + [True] * tokens,
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
        **more,
    }


def trace(name: str, *nodes: Record, **more: Any) -> Record:
    return {"id": name, "nodes": list(nodes), **more}


def episode(name: str, *traces: Record, policy: tuple[int, int] | None = None) -> Record:
    work: Record = {"type": "train", "step": 99}
    if policy is not None:
        work["policy"] = dict(zip(("start", "end"), policy, strict=True))
    return {"id": name, "run": {"type": "train", "work": work}, "traces": list(traces)}


def at_step(folder: Path, step: int, *records: Record) -> Path:
    path = folder / f"rollouts/step_{step}/train/effective/traces.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def metrics(source: Path, **options: Any) -> list[Record]:
    weighting = options.pop("weighting", "nodes")
    return ta.off_policy_metrics(ta.scan_spans(source, **options), weighting=weighting).to_dicts()


def test_spans_index_the_sampled_tokens(tmp_path: Path) -> None:
    # 12 token ids, 10 of them sampled: the span 0-10 covers them all and leaves none.
    at_step(tmp_path, 5, episode("e", trace("t", node(("4", 0, 10), scaffold=2))))
    [row] = metrics(tmp_path)
    assert (row["sampled_tokens"], row["labelled_tokens"], row["coverage"]) == (10, 10, 1.0)


def test_a_batch_trains_the_version_before_its_step(tmp_path: Path) -> None:
    at_step(tmp_path, 5, episode("e", trace("t", node(("4", 0, 6), ("2", 6, 10)))))
    [row] = metrics(tmp_path)
    assert row["training_version"] == 4
    assert (row["off_policy/token/min"], row["off_policy/token/max"]) == (0, 2)
    assert row["off_policy/token/mean"] == pytest.approx(4 * 2 / 10)


def test_a_newer_version_than_the_trained_one_has_a_negative_age(tmp_path: Path) -> None:
    at_step(tmp_path, 5, episode("e", trace("t", node(("4", 0, 5), ("7", 5, 10)))))
    [row] = metrics(tmp_path)
    assert (row["off_policy/token/min"], row["off_policy/token/mean"]) == (-3, -1.5)


def test_default_and_no_label_are_counted_and_have_no_age(tmp_path: Path) -> None:
    at_step(tmp_path, 5, episode("e", trace("t", node(("default", 0, 3), ("3", 4, 6)))))
    [row] = metrics(tmp_path)
    assert row["sampled_tokens"] == 10
    assert row["default_tokens"] == 3
    assert row["labelled_tokens"] == 2
    assert row["unlabelled_tokens"] == 1 + 4
    assert row["coverage"] == 0.2
    assert row["off_policy/token/mean"] == 1.0


def test_mixing_is_of_labels(tmp_path: Path) -> None:
    at_step(
        tmp_path,
        5,
        episode(
            "e",
            trace(
                "t",
                node(("3", 0, 5), ("4", 5, 10)),  # two versions
                node(("default", 0, 5), ("4", 5, 10)),  # `default` is a label
                node(("4", 0, 5)),  # no label is none
                node(("4", 0, 5), ("4", 5, 10)),  # one label in two spans
                node(("4", 0, 10), ("5", 10, 10)),  # a label on no token
            ),
        ),
    )
    [row] = metrics(tmp_path)
    assert (row["mixed_nodes"], row["sampled_nodes"]) == (2, 5)


def test_a_quantile_is_the_smallest_age_that_enough_tokens_do_not_exceed(tmp_path: Path) -> None:
    # 100 tokens: 50 of age 0, 45 of age 1, 4 of age 2, 1 of age 9.
    spans = (("9", 0, 50), ("8", 50, 95), ("7", 95, 99), ("0", 99, 100))
    at_step(tmp_path, 10, episode("e", trace("t", node(*spans, tokens=100))))
    [row] = metrics(tmp_path)
    assert [row[f"off_policy/token/{q}"] for q in ("p50", "p95", "p99")] == [0, 1, 2]


def test_only_trainable_agents_count(tmp_path: Path) -> None:
    judge = trace("judge", node(("0", 0, 10)), agent={"name": "judge", "trainable": False})
    at_step(tmp_path, 5, episode("e", trace("t", node(("4", 0, 10))), judge))
    assert [row["sampled_tokens"] for row in metrics(tmp_path)] == [10]
    assert [row["sampled_tokens"] for row in metrics(tmp_path, include_frozen=True)] == [20]


def test_a_shared_node_counts_once_or_once_a_sample(tmp_path: Path) -> None:
    # One root and first turn, then two branches of one turn each.
    shared = node(("2", 0, 10), parent=None)
    left, right = node(("4", 0, 10), parent=0), node(("4", 0, 10), parent=0)
    at_step(tmp_path, 5, episode("e", trace("t", shared, left, right)))
    [row] = metrics(tmp_path)
    assert (row["sampled_tokens"], row["sampled_nodes"]) == (30, 3)
    assert row["off_policy/token/mean"] == pytest.approx(2 * 10 / 30)
    [row] = metrics(tmp_path, weighting="branches")
    assert (row["sampled_tokens"], row["sampled_nodes"]) == (40, 4)
    assert row["off_policy/token/mean"] == pytest.approx(2 * 20 / 40)


def test_a_compaction_attempt_trains_when_the_run_went_on_from_it(tmp_path: Path) -> None:
    def attempt(accepted: bool) -> Record:
        compacted = node(("4", 0, 10), parent=0)
        compacted["semantic_parents"] = [{"node": 0, "type": "compaction_attempt"}]
        after = node(("4", 0, 10))
        if accepted:
            after["semantic_parents"] = [{"node": 1, "type": "compaction"}]
        return trace("t", node(("4", 0, 10)), compacted, after)

    for accepted, samples in ((False, [0, 0, 1]), (True, [1, 1, 1])):
        folder = at_step(tmp_path / str(accepted), 5, episode("e", attempt(accepted)))
        assert ta.scan_spans(folder).collect()["branches"].to_list() == samples


def test_episode_staleness_in_flight_and_in_queue(tmp_path: Path) -> None:
    at_step(
        tmp_path,
        10,
        episode("slow", trace("a", node()), policy=(4, 7)),  # 5 = 3 in flight + 2 in queue
        episode("fresh", trace("b", node()), policy=(9, 9)),  # 0
        episode("ahead", trace("c", node()), policy=(11, 12)),  # newer than trained: 0
        episode("frozen", trace("d", node())),  # a run that names no policy: 0
        {"id": "bare", "traces": [trace("e", node())]},  # no run: none
    )
    [row] = metrics(tmp_path)
    assert row["episodes"] == 5
    assert (row["off_policy/mean"], row["off_policy/max"]) == (5 / 4, 5)
    assert (row["off_policy/in_flight/mean"], row["off_policy/in_flight/max"]) == (3 / 4, 3)
    assert (row["off_policy/in_queue/mean"], row["off_policy/in_queue/max"]) == (2 / 4, 2)


def test_token_age_in_flight_and_in_queue(tmp_path: Path) -> None:
    slow = trace("a", node(("4", 0, 2), ("7", 2, 8), ("default", 8, 9)))
    at_step(
        tmp_path,
        10,
        episode("slow", slow, policy=(4, 7)),  # 2 tokens of 3 + 2, 6 of 0 + 2
        episode("late", trace("b", node(("9", 0, 4))), policy=(8, 8)),  # 4 of -1 + 1
        episode("frozen", trace("c", node(("3", 0, 10)))),  # no policy to tell by
        {"id": "bare", "traces": [trace("d", node(("1", 0, 10)))]},
    )
    [row] = metrics(tmp_path)
    token = "off_policy/token"
    assert row[f"{token}/in_flight/mean"] == pytest.approx((2 * 3 + 6 * 0 - 4) / 12)
    assert row[f"{token}/in_flight/max"] == 3
    assert row[f"{token}/in_queue/mean"] == pytest.approx((2 * 2 + 6 * 2 + 4 * 1) / 12)
    assert row[f"{token}/in_queue/max"] == 2
    # Of the tokens of a policy the two make up the age; the others have an age alone.
    assert row[f"{token}/mean"] == pytest.approx((2 * 5 + 6 * 2 + 0 + 10 * 6 + 10 * 8) / 32)


def test_where_no_policy_is_told_there_is_no_flight_nor_queue(tmp_path: Path) -> None:
    at_step(tmp_path, 10, episode("frozen", trace("c", node(("3", 0, 10)))))
    [row] = metrics(tmp_path)
    assert row["off_policy/token/max"] == 6
    for name in ("in_flight/mean", "in_flight/max", "in_queue/mean", "in_queue/max"):
        assert row[f"off_policy/token/{name}"] is None


def test_an_episode_without_tokens_is_an_episode(tmp_path: Path) -> None:
    at_step(
        tmp_path,
        10,
        episode("failed", policy=(5, 5)),
        episode("silent", trace("a"), policy=(7, 7)),
        episode("empty", trace("b", node(tokens=0)), policy=(9, 9)),
    )
    [row] = metrics(tmp_path)
    assert (row["episodes"], row["traces"], row["sampled_nodes"]) == (3, 2, 1)
    assert (row["sampled_tokens"], row["coverage"]) == (0, None)
    assert row["off_policy/mean"] == (4 + 2 + 0) / 3


def test_the_shipping_step_counts_and_not_the_dispatching_one(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path)
    for name in ("a", "b", "c"):
        store.append(episode(name, trace(f"t{name}", node(("4", 0, 10)))), arrival=6)
    store.ship(7, "ta")
    store.ship(8, "tb")
    rows = {row["step"]: row for row in metrics(tmp_path)}
    assert {step: row["episodes"] for step, row in rows.items()} == {6: 0, 7: 1, 8: 1}
    assert {step: row["off_policy/token/max"] for step, row in rows.items()} == {
        6: None,
        7: 2,
        8: 3,
    }
    assert {step: row["not_shipped"] for step, row in rows.items()} == {6: 1, 7: 0, 8: 0}
    everything = {row["step"]: row for row in metrics(tmp_path, subset="all")}
    assert everything[6]["labelled_tokens"] == 10
    assert everything[6]["off_policy/token/mean"] is None  # no batch, hence no age


def test_an_episode_belongs_to_the_step_that_shipped_any_of_its_traces(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path)
    one, two = (trace(name, node(("4", 0, 10))) for name in ("one", "two"))
    store.append(episode("e", one, two), arrival=6)
    store.ship(7, "one")
    summary = ta.ReadSummary()
    [row] = ta.off_policy_metrics(ta.scan_spans(tmp_path, summary=summary, quiet=True)).to_dicts()
    assert (row["step"], row["episodes"], row["traces"], row["not_shipped"]) == (7, 1, 1, 0)
    assert summary.traces_not_shipped == 1
    rows = metrics(tmp_path, subset="all")
    assert [(row["step"], row["traces"], row["not_shipped"]) for row in rows] == [
        (6, 1, 0),
        (7, 1, 0),
    ]


def test_a_version_pattern_reads_other_labels(tmp_path: Path) -> None:
    at_step(tmp_path, 5, episode("e", trace("t", node(("policy-3/a", 0, 4), ("4", 4, 10)))))
    spans = ta.scan_spans(tmp_path, version_pattern=r"policy-(\d+)").collect()
    assert spans["version"].to_list() == [3, 4]
    assert spans["label"].to_list() == ["policy-3/a", "4"]


def test_the_tiles_of_a_completion_add_up(tmp_path: Path) -> None:
    at_step(tmp_path, 5, episode("e", trace("t", node(("4", 1, 3), ("3", 3, 3), ("2", 5, 6)))))
    spans = ta.scan_spans(tmp_path).select("start", "end", "label").collect()
    assert spans.rows() == [(0, 1, None), (1, 3, "4"), (3, 5, None), (5, 6, "2"), (6, 10, None)]


def test_counts_add_up(tmp_path: Path) -> None:
    one = at_step(tmp_path / "one", 5, episode("e", trace("t", node(("4", 0, 6), ("2", 6, 10)))))
    two = at_step(tmp_path / "two", 5, episode("f", trace("u", node(("4", 0, 10)))))
    counts = [ta.age_counts(ta.scan_spans(source)) for source in (one, two, [one, two])]
    assert ta.merge_counts(*counts[:2]).equals(counts[2])
    assert counts[2].rows() == [(5, 0, 16), (5, 2, 4)]


def test_raw_engine_responses_tile_their_completion() -> None:
    import zstandard

    from traceage.spans import tile

    path = Path(__file__).parent.parent / "data/responses.jsonl.zst"
    with zstandard.open(path, "rt", encoding="utf-8") as lines:
        responses = [json.loads(line) for line in lines]
    choice = responses[0]["choices"][0]
    spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"]]
    assert tile(spans, len(choice["token_ids"])) == [(0, 1735, "default"), (1735, 4000, "5")]
