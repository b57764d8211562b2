"""Any readable source -> a Parquet dump, a source file at a time.

What comes of one source file is written under temporary names, renamed when it is whole, and
entered in a ledger below `_traceage/`. A conversion that was stopped, however it was, goes on with
the source files that are not in the ledger, or that changed since.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import polars as pl

from traceage.formats.dump import (
    LEDGER,
    SCHEMA_VERSION,
    SPAN_FIELDS,
    TRACE_COLUMNS,
    UNFINISHED,
    DumpMetadata,
    arrow_schema,
)
from traceage.formats.records import Block, What
from traceage.output import replacing
from traceage.plan import Plan
from traceage.rows import Rows
from traceage.scan import ReadingOptions, reader_of
from traceage.sources import SourceFile, cohort_of, find_files

if TYPE_CHECKING:
    import pyarrow as pa

    from traceage.reading import Reader

ROW_GROUP_TOKENS = 1 << 20
"""Sampled tokens after which a row group is closed: a reader holds one at a time."""
HELD_TOKENS = 16 << 20
"""Sampled tokens that wait for their row groups, over all steps, at most."""


@dataclass
class _Done:
    """A ledger entry: what was made of one source file, and what it was made from."""

    source: str
    state: list[Any]
    """Size and time of the source and its side files, and how it was converted."""
    files: list[str]
    traces: int
    tokens: int
    skipped: int


def write_dump(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    messages: bool = False,
    **reading: Unpack[ReadingOptions],
) -> pl.DataFrame:
    """Write every trace of `source` to a Parquet dump in the directory `target`.

    All kinds, both subsets and frozen agents are kept, annotations and token exports are folded
    in, so that reading the dump answers everything that reading the source does. `target` may hold
    a dump already: what is done is not done again, what a source file that has changed gave is
    replaced.

    Args:
        source: see `scan_spans`; a dump, too.
        target: a directory, made if it is not there.
        messages: keep the messages' text, as JSON.
        **reading: `step`, `on_error`, `workers`, `quiet` and `summary` of `scan_spans`; what
            the others select is selected when the dump is read.

    Returns:
        A row a source file: `source`, `files` (Int64), `traces`, `tokens` (sampled), `skipped`
        (faults) and `written` (False for what was there already).

    Raises:
        TraceError: as `scan_spans`. What was finished stays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = write_dump("data/real-dump", folder)
    >>> done.select("traces", "tokens").sum().row(0)
    (80, 68927)
    """
    ignored = set(reading) - {"step", "on_error", "workers", "quiet", "summary"}
    if ignored:
        raise TypeError(f"a dump keeps everything; {', '.join(sorted(ignored))} are for reading it")
    reader = reader_of(source, **reading)
    reader = replace(reader, kind="any", subset="both", include_frozen=True)
    folder = Path(target)
    (folder / LEDGER).mkdir(parents=True, exist_ok=True)
    # Whoever reads the dump before this one is through, or after it was cut off, is told.
    unfinished = folder / LEDGER / UNFINISHED
    unfinished.touch()
    reader.summary.clear()
    rows = Rows(reader, {"step", "length", *TRACE_COLUMNS, *SPAN_FIELDS})
    done = []
    for file in find_files(reader.sources, "both"):
        if file.format == "unknown":
            reader.summary.files_without_traces.append(file.path)
            continue
        done.append(_convert_file(reader, rows, file, folder, messages))
    unfinished.unlink(missing_ok=True)
    reader.warn()
    schema = {
        "source": pl.String, "files": pl.Int64, "traces": pl.Int64, "tokens": pl.Int64,
        "skipped": pl.Int64, "written": pl.Boolean,
    }  # fmt: skip
    told = [(d.source, len(d.files), d.traces, d.tokens, d.skipped, new) for d, new in done]
    return pl.DataFrame(told, schema, orient="row")


def _convert_file(
    reader: Reader, rows: Rows, file: SourceFile, folder: Path, messages: bool
) -> tuple[_Done, bool]:
    """Convert one source file, unless that is done; its ledger entry, and whether it is new."""
    # A chunk of a trace store is the same one before and after it is sealed.
    path = os.path.abspath(file.path)
    path = path.removesuffix(".zst") if file.store is not None else path
    name = f"{Path(path).name.split('.')[0]}-{_digest(path)}"
    ledger = folder / LEDGER / f"{name}.json"
    for leftover in folder.glob(f"step=*/.{name}.parquet.part"):
        leftover.unlink()
    state = _state(file, reader, messages)
    before: _Done | None = None
    with suppress(FileNotFoundError):
        before = _Done(**json.loads(ledger.read_text()))
        if before.state == state and all((folder / path).exists() for path in before.files):
            return before, False
    skipped = reader.summary.skipped
    writers = _Writers(folder, name, file, messages)
    try:
        if file.format == "dump":
            traces, tokens = writers.copy(file)
        else:
            traces, tokens = _fill(reader, rows, file, writers, messages)
        writers.close()
    except BaseException:
        writers.abandon()
        raise
    # Entered last: until then this source file counts as not done.
    ledger.unlink(missing_ok=True)
    files = writers.publish()
    for path in set(before.files if before else ()) - set(files):
        (folder / path).unlink(missing_ok=True)
    entry = _Done(file.path, state, files, traces, tokens, reader.summary.skipped - skipped)
    with replacing(ledger) as part:
        part.write_text(json.dumps(asdict(entry), indent=1))
    return entry, True


def _state(file: SourceFile, reader: Reader, messages: bool) -> list[Any]:
    """What has to be the same for a conversion to be the same."""
    annotated = file.store.index_bytes() if file.store is not None else None
    exported = sum(export.size for export in file.exports())
    changed = os.stat(file.path).st_mtime_ns
    return [SCHEMA_VERSION, file.size, changed, annotated, exported, reader.step, messages]


def _fill(
    reader: Reader, rows: Rows, file: SourceFile, writers: _Writers, messages: bool
) -> tuple[int, int]:
    what = What(include_frozen=True, whole=True, messages=messages)
    traces = tokens = 0
    for _, before, block in reader.blocks([file], Plan([], what)):
        kept = rows.add(file, before, block)
        if not rows.count:
            continue
        table = _table(rows, block, kept, messages)
        traces += table.num_rows - table["trace_id"].null_count
        tokens += writers.add(table)
    return traces, tokens


def _table(rows: Rows, block: Block, kept: list[int], messages: bool) -> pa.Table:
    """The rows of a dump for the traces of one block."""
    import pyarrow as pa

    runs, _ = rows.take(with_row=True)
    spans = pl.struct(*(name for name in SPAN_FIELDS)).alias("spans")
    of_trace = [name for name in (*TRACE_COLUMNS, "step") if name in runs.columns]
    traces = (
        runs.group_by("row", maintain_order=True)
        .agg(*(pl.col(name).first() for name in of_trace), pl.col("length").sum(), spans)
        .with_columns(pl.col("length").cast(pl.Int64).alias("tokens"))
        .with_columns(episode_shipped=pl.col("shipped").any(ignore_nulls=False).over("episode_id"))
    )
    assert block.kept is not None
    nodes, branches = (column.take(pa.array(kept, pa.int64())) for column in block.kept)
    schema = arrow_schema(messages)
    flat = traces.select(
        *(name for name in schema.names if name not in ("nodes", "branches")), "step"
    ).to_arrow(compat_level=pl.CompatLevel.oldest())
    columns = {
        **{name: flat[name] for name in flat.column_names},
        "nodes": nodes,
        "branches": branches,
    }
    fields = [*schema, pa.field("step", pa.int32())]
    arrays = []
    for one in fields:
        array = columns[one.name]
        arrays.append(array.cast(one.type))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


class _Writers:
    """The files that come of one source file, one a step, under their temporary names."""

    def __init__(self, folder: Path, name: str, file: SourceFile, messages: bool) -> None:
        self.folder = folder
        self.name = name
        self.file = file
        self.schema = arrow_schema(messages)
        self.messages = messages
        self.open: dict[int | None, Any] = {}
        self.waiting: dict[int | None, list[pa.Table]] = {}
        self.held: dict[int | None, int] = {}

    def add(self, table: pa.Table) -> int:
        """Take the rows of some traces, whole episodes; returns their tokens."""
        import pyarrow.compute as pc

        total = 0
        for step in table["step"].unique().to_pylist():
            mine = pc.is_null(table["step"]) if step is None else pc.equal(table["step"], step)
            rows = table.filter(mine).drop_columns("step")
            tokens = pc.sum(rows["tokens"]).as_py() or 0
            self.waiting.setdefault(step, []).append(rows)
            self.held[step] = self.held.get(step, 0) + tokens
            total += tokens
            if self.held[step] >= ROW_GROUP_TOKENS:
                self._write(step)
        while sum(self.held.values()) > HELD_TOKENS:
            self._write(max(self.held, key=self.held.__getitem__))
        return total

    def copy(self, file: SourceFile) -> tuple[int, int]:
        """Take a dump's own file as it is; returns its traces and tokens."""
        import pyarrow.parquet as pq

        rows = pq.read_table(file.path, columns=["trace_id", "tokens"])
        self.open[file.step] = None
        part = self._part(file.step)
        part.parent.mkdir(exist_ok=True)
        shutil.copyfile(file.path, part)
        traces = rows.num_rows - rows["trace_id"].null_count
        return traces, sum(rows["tokens"].to_pylist())

    def close(self) -> None:
        """Write what waits, and finish every file."""
        for step in list(self.waiting):
            self._write(step)
        for writer in self.open.values():
            if writer is not None:
                writer.close()

    def abandon(self) -> None:
        """Leave nothing behind."""
        for step, writer in self.open.items():
            if writer is not None:
                with suppress(Exception):
                    writer.close()
            self._part(step).unlink(missing_ok=True)

    def publish(self) -> list[str]:
        """Give every file its name; their paths in the dump."""
        paths = []
        for step in self.open:
            part = self._part(step)
            whole = part.with_name(f"{self.name}.parquet")
            os.replace(part, whole)
            paths.append(str(whole.relative_to(self.folder)))
        return sorted(paths)

    def _part(self, step: int | None) -> Path:
        value = "__HIVE_DEFAULT_PARTITION__" if step is None else step
        return self.folder / f"step={value}" / f".{self.name}.parquet.part"

    def _write(self, step: int | None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = self.waiting.pop(step)
        del self.held[step]
        if step not in self.open:
            path = self._part(step)
            path.parent.mkdir(exist_ok=True)
            told = DumpMetadata(
                SCHEMA_VERSION,
                step,
                self.file.kind,
                self.file.subset,
                cohort_of(self.file),
                self.messages,
                self.file.path,
            )
            self.open[step] = pq.ParquetWriter(
                path, self.schema.with_metadata(told.as_arrow()), compression="zstd"
            )
        table = pa.concat_tables(tables)
        self.open[step].write_table(table, row_group_size=max(1, table.num_rows))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=5).hexdigest()


def read_dump_schema(messages: bool = True) -> pl.DataFrame:
    """What a dump's files hold, column by column, for those who read them without traceage.

    Returns a frame of `column` (nested fields with dots), `type` and `meaning`. `step` is the
    hive partition: it stands in the path and not in the files.

    >>> read_dump_schema().head(2)["column"].to_list()
    ['step', 'kind']
    """
    rows = [("step", "hive partition", _MEANING["step"])]
    for field in arrow_schema(messages):
        rows.append((field.name, _type_name(field.type), _MEANING[field.name]))
        for inner in field.type.value_type if str(field.type).startswith("list") else ():
            name = f"{field.name}.{inner.name}"
            rows.append((name, _type_name(inner.type), _MEANING[name]))
    schema = {"column": pl.String, "type": pl.String, "meaning": pl.String}
    return pl.DataFrame(rows, schema, orient="row")


def _type_name(kind: pa.DataType) -> str:
    return re.sub(r"element: |not null", "", str(kind)).split("<struct")[0]


_MEANING = {
    "step": "the batch that trained on the trace; the step of arrival where none did",
    "kind": "train or eval; null where nothing tells",
    "subset": "effective or all; null where nothing tells",
    "shipped": "whether a batch took the trace; null where the layout does not tell",
    "episode_shipped": "whether a batch took any trace of its episode",
    "env": "name of the environment",
    "group_id": "rollout group",
    "episode_id": "episode",
    "trace_id": "trace; null for an episode without traces",
    "agent": "name of the agent",
    "trainable": "whether the agent's tokens train the policy",
    "has_run": "the record has a `run`",
    "policy_start": "first policy version that was live while the episode ran",
    "policy_end": "last policy version that was live while the episode ran",
    "reward": "weighted sum of the trace's scores",
    "file": "source file",
    "line": "line in it, from 1",
    "tokens": "sampled tokens of the trace",
    "spans": "runs of sampled tokens of one label; they tile each completion",
    "spans.node": "index of the completion in `nodes`",
    "spans.turn": "how many completions come before it",
    "spans.start": "first token, among the sampled tokens of the node",
    "spans.end": "behind the last token",
    "spans.label": "as the engine gave it; null where it gave none",
    "spans.mixed": "the completion carries more than one distinct label",
    "spans.branches": "how many training samples hold the node",
    "spans.timestamp": "of the node, seconds since the epoch",
    "branches": "trainable branches, each a training sample",
    "branches.index": "among the leaves of the trace, in node order",
    "branches.tokens": "length of its token ids",
    "branches.nodes": "indices of its nodes, from root to leaf",
    "nodes": "the message graph",
    "nodes.parent": "index of the node before it; null for a root",
    "nodes.sampled": "a model call produced it",
    "nodes.sampled_tokens": "how many tokens the model sampled",
    "nodes.offset": "tokens of its branch that come before it",
    "nodes.timestamp": "seconds since the epoch",
    "nodes.token_ids": "the tokens it adds to its branch",
    "nodes.mask": "which of them the model sampled",
    "nodes.is_content": "which of them are message body and not template",
    "nodes.logprobs": "sampling logprob of each sampled token; NaN where there is none",
    "nodes.advantages": "advantage of each sampled token",
    "nodes.trainer_logprobs": "the trainer's logprob of each sampled token",
    "nodes.reference_logprobs": "the reference model's logprob of each sampled token",
    "nodes.entropies": "the trainer's policy entropy at each sampled token",
    "nodes.mismatch_kl": "the mismatch KL that the trainer logged at each sampled token",
    "nodes.message": "the message as JSON (only with `messages`)",
}
