"""The Parquet dump: a row a trace, its spans and its nodes as nested lists with typed streams.

Files lie in hive partitions by step (`step=12/<source>.parquet`), so that other tools find the step
in the path; each file comes of one source file and says so in its metadata. Reading spans touches
the span columns alone. See `read_dump_schema` for what is in it, column by column.

Two fields of a node are kept so that nobody has to walk the graph again: `offset`, the tokens of
its branch that come before it, and `sampled_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from traceage.formats.streams import FLOATS

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

SCHEMA_VERSION = 2
"""1 had no `mismatch_kl` of a node; it reads as null there."""
LEDGER = "_traceage"
"""The folder of a dump that says what was converted."""
UNFINISHED = "unfinished"
"""A file in it, there while a conversion runs and after one that was cut off."""
_KEY = b"traceage"

TRACE_COLUMNS = (
    "kind",
    "subset",
    "shipped",
    "episode_shipped",
    "env",
    "group_id",
    "episode_id",
    "trace_id",
    "agent",
    "trainable",
    "has_run",
    "policy_start",
    "policy_end",
    "reward",
    "file",
    "line",
)
"""The columns that stand once a trace: those of the spans table, and `episode_shipped`, whether a
batch took any trace of the episode."""

SPAN_FIELDS = ("node", "turn", "start", "end", "label", "mixed", "branches", "timestamp")
"""The columns of the spans table that stand once a span."""


class DumpMetadata(NamedTuple):
    """What a dump's file says of itself."""

    schema_version: int
    step: int | None
    kind: str | None
    subset: str | None
    cohort: str | None
    """The run its traces belong to, where a run keeps two copies of a step."""
    messages: bool
    source: str

    def as_arrow(self) -> dict[bytes, bytes]:
        """The key and value to put into a Parquet file's metadata."""
        return {_KEY: json.dumps(self._asdict()).encode()}


def dump_metadata(pairs: Mapping[str, str]) -> DumpMetadata | None:
    """What a Parquet file's metadata says of the dump it belongs to; None when it is no dump.

    Raises `ValueError` for a dump of a later version than this one can read.
    """
    raw = pairs.get(_KEY.decode())
    if raw is None:
        return None
    found = json.loads(raw)
    if found["schema_version"] > SCHEMA_VERSION:
        raise ValueError(
            f"the dump has schema version {found['schema_version']}, this traceage reads up to "
            f"{SCHEMA_VERSION}; update traceage"
        )
    return DumpMetadata(**{name: found.get(name) for name in DumpMetadata._fields})


class KeptNode(NamedTuple):
    """One node as a dump keeps it."""

    parent: int | None
    sampled: bool
    sampled_tokens: int
    offset: int
    timestamp: float | None
    token_ids: NDArray[np.int32] | None
    mask: NDArray[np.bool_] | None
    is_content: NDArray[np.bool_] | None
    floats: Sequence[NDArray[np.float32] | None]
    """The streams of `FLOATS`, in order."""
    message: str | None


class KeptTrace(NamedTuple):
    """The nodes of one trace and its trainable branches."""

    nodes: list[KeptNode]
    branches: list[dict[str, Any]]
    """`index` among the leaves, `tokens` of its `token_ids`, `nodes` from root to leaf."""


def arrow_schema(messages: bool) -> pa.Schema:
    """The columns of a dump's file, without the partition column `step`."""
    import pyarrow as pa

    i32, f32, text = pa.int32(), pa.float32(), pa.string()
    trace = {
        **dict.fromkeys(TRACE_COLUMNS, text),
        **dict.fromkeys(("shipped", "episode_shipped", "trainable", "has_run"), pa.bool_()),
        **dict.fromkeys(("policy_start", "policy_end"), i32),
        "reward": pa.float64(),
        "line": pa.int64(),
    }
    span = {
        **dict.fromkeys(SPAN_FIELDS, i32),
        "label": text,
        "mixed": pa.bool_(),
        "timestamp": pa.float64(),
    }
    node = {
        "parent": i32,
        "sampled": pa.bool_(),
        "sampled_tokens": i32,
        "offset": i32,
        "timestamp": pa.float64(),
        "token_ids": pa.list_(i32),
        "mask": pa.list_(pa.bool_()),
        "is_content": pa.list_(pa.bool_()),
        **{key: pa.list_(f32) for key in FLOATS.values()},
    }
    if messages:
        node["message"] = text
    branch = pa.struct([("index", i32), ("tokens", i32), ("nodes", pa.list_(i32))])
    return pa.schema(
        [
            *trace.items(),
            ("tokens", pa.int64()),
            ("spans", pa.list_(pa.struct(list(span.items())))),
            ("branches", pa.list_(branch)),
            ("nodes", pa.list_(pa.struct(list(node.items())))),
        ]
    )


def kept_arrays(traces: Sequence[KeptTrace], messages: bool) -> tuple[pa.Array, pa.Array]:
    """The columns `nodes` and `branches` of some traces."""
    import pyarrow as pa

    schema = arrow_schema(messages)
    of_node = schema.field("nodes").type.value_type
    nodes = [node for trace in traces for node in trace.nodes]
    columns: list[Any] = [
        pa.array([getattr(node, name) for node in nodes], of_node.field(name).type)
        for name in ("parent", "sampled", "sampled_tokens", "offset", "timestamp")
    ]
    for name in ("token_ids", "mask", "is_content"):
        columns.append(_lists([getattr(node, name) for node in nodes], of_node.field(name).type))
    for at, key in enumerate(FLOATS.values()):
        columns.append(_lists([node.floats[at] for node in nodes], of_node.field(key).type))
    if messages:
        columns.append(pa.array([node.message for node in nodes], pa.string()))
    struct = pa.StructArray.from_arrays(columns, fields=list(of_node))
    offsets = _offsets([len(trace.nodes) for trace in traces])
    branches = pa.array([trace.branches for trace in traces], schema.field("branches").type)
    return pa.ListArray.from_arrays(offsets, struct), branches


def _lists(values: Sequence[NDArray[Any] | None], of: pa.DataType) -> pa.Array:
    """A list array of numpy arrays; null where there is none."""
    import pyarrow as pa

    present = [one for one in values if one is not None]
    flat = np.concatenate(present) if present else np.zeros(0)
    missing = pa.array([one is None for one in values], pa.bool_())
    offsets = _offsets([0 if one is None else len(one) for one in values])
    items = pa.array(flat, of.value_type, from_pandas=False)
    if not missing.true_count:
        return pa.ListArray.from_arrays(offsets, items)
    return pa.ListArray.from_arrays(offsets, items, mask=missing)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    import pyarrow as pa

    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.int32())
