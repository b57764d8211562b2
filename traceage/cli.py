"""The command line: `traceage report`, `metrics`, `tokens`, `convert` and `capture`.

Results go to stdout, or to a file that appears only when it is whole; everything else goes to
stderr. Exit status: 0 all was read; 2 wrong usage, or an input that cannot be counted; 3 something
was skipped, as `--on-error skip` allows; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from traceage import __version__
from traceage.capture.cli import add_parser as add_capture
from traceage.errors import ReadSummary, TraceError
from traceage.output import check_target, replacing

if TYPE_CHECKING:
    import polars as pl

    from traceage.metrics import Tally
    from traceage.scan import ReadingOptions
    from traceage.study import Study

PARSER = "traceage.formats.parts"
"""What the processes that read lines import."""

OK, BAD_INPUT, SKIPPED, INTERRUPTED = 0, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    engine_flags = []
    if arguments[:1] == ["capture"] and "--" in arguments:
        cut = arguments.index("--")
        arguments, engine_flags = arguments[:cut], arguments[cut + 1 :]
    options = _parser().parse_args(arguments)
    options.engine_flags = engine_flags
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (TraceError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever reads the output has seen enough; keep the interpreter from saying so again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        print(f"traceage: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("traceage: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="traceage",
        description="How old was every token when it was trained on? Reads the stored traces of "
        "asynchronous RL and measures the age of their tokens against the policy that each batch "
        "trained.",
    )
    parser.add_argument("--version", action="version", version=f"traceage {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    source, reading = _source_options(), _reading_options()
    report = commands.add_parser(
        "report",
        parents=[source, reading],
        help="print how stale each step's batch was, and write a page with figures",
        description="Print a table, a row a step, and write a self-contained HTML page: what the "
        "run's traces say of its staleness in words, in figures and in tables.",
    )
    report.add_argument(
        "-o", "--output", metavar="FILE.html", help="the page to write; none by default"
    )
    report.add_argument(
        "--compare",
        metavar="OTHER_RUN",
        help="another run (directory, file or glob), to stand beside the first on the page",
    )
    report.set_defaults(command=_report)

    metrics = commands.add_parser(
        "metrics",
        parents=[source, reading],
        help="the numbers alone, as a table, JSON, CSV or Parquet",
        description="Off-policy metrics, a row a group; every figure of them as JSON, CSV or "
        "Parquet.",
    )
    metrics.add_argument(
        "--by",
        default="step",
        metavar="COLUMN[,COLUMN...]",
        help="the columns of the spans table that make a group, or bins of where a token stands: "
        "index_bin, completion_bin (default: step)",
    )
    metrics.add_argument(
        "--format",
        choices=["table", "json", "csv", "parquet"],
        default="table",
        help="json is one array, an object a row (default: table)",
    )
    metrics.add_argument(
        "-o", "--output", metavar="FILE", help="write here and not to standard output"
    )
    metrics.set_defaults(command=_metrics)

    tokens = commands.add_parser(
        "tokens",
        parents=[source, reading],
        help="a row a sampled token, as Parquet",
        description="Write a row a sampled token, with its age and the streams that were stamped, "
        "to a Parquet file.",
    )
    tokens.add_argument(
        "-o", "--output", metavar="OUT.parquet", required=True, help="the file to write"
    )
    tokens.add_argument(
        "--columns",
        metavar="COLUMN[,COLUMN...]",
        help="what to write (default: step, env, trace_id, node, index, age and version)",
    )
    tokens.add_argument(
        "--labelled-only", action="store_true", help="leave out tokens without a version"
    )
    tokens.set_defaults(command=_tokens)

    convert = commands.add_parser(
        "convert",
        parents=[source],
        help="any source into a Parquet dump",
        description="Write all traces, of every kind, to a Parquet dump: a row a trace, in hive "
        "partitions by step. Running it again goes on where it was stopped, and takes up what is "
        "new.",
    )
    convert.add_argument("-o", "--output", metavar="DIR", required=True, help="the dump")
    convert.add_argument("--messages", action="store_true", help="keep the messages' text")
    convert.set_defaults(command=_convert)

    add_capture(commands)
    return parser


def _source_options() -> argparse.ArgumentParser:
    """What every command that reads traces takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="a run directory or any folder in it, a .jsonl, .jsonl.gz or .jsonl.zst file, a "
        "Parquet dump, the platform's sample Parquet, or a glob; several add up",
    )
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--step", type=int, metavar="N", help="the step of files that have none in their path"
    )
    reading.add_argument(
        "--on-error",
        choices=["raise", "skip"],
        default="raise",
        help="stop at the first fault, or skip, count and report it (default: raise)",
    )
    reading.add_argument(
        "--quiet", action="store_true", help="no progress and no notes on standard error"
    )
    return parser


def _reading_options() -> argparse.ArgumentParser:
    """What a command takes that counts some of the traces."""
    parser = argparse.ArgumentParser(add_help=False)
    reading = parser.add_argument_group("what to count")
    reading.add_argument(
        "--training-version",
        type=_training_version,
        default="step-1",
        metavar="step|step-1|COLUMN|INT",
        help="the policy version that each batch trained (default: step-1)",
    )
    reading.add_argument(
        "--kind",
        choices=["train", "eval", "any"],
        default="train",
        help="which episodes; those that do not say are always read (default: train)",
    )
    reading.add_argument(
        "--subset",
        choices=["effective", "all"],
        help="what trained, or what arrived (default: what trained, where a run has both)",
    )
    reading.add_argument(
        "--include-frozen", action="store_true", help="count agents that are not trained too"
    )
    reading.add_argument(
        "--weighting",
        choices=["nodes", "branches"],
        default="nodes",
        help="count a token once, or once for every training sample that holds it (default: nodes)",
    )
    reading.add_argument(
        "--version-pattern",
        metavar="REGEX",
        help="reads the version out of labels that are not plain integers; one group",
    )
    return parser


def _training_version(text: str) -> str | int:
    try:
        return int(text)
    except ValueError:
        return text


def _report(options: argparse.Namespace) -> int:
    if options.output is None:
        if options.compare is not None:
            raise ValueError("--compare is shown on the page: name it with -o FILE.html")
        tally, summary = _tally(options, ["step"])
        metrics, summaries = tally.metrics(), [summary]
    else:
        runs = [options.source] if options.compare is None else [options.source, options.compare]
        _check_before_reading(options, runs)
        _start_workers(options)
        import traceage.study  # noqa: F401

        # Drawing needs modules that take as long to import as 200 MB of traces take to read.
        threading.Thread(target=_import_matplotlib).start()
        studies, summaries = map(list, zip(*(_study(options, run) for run in runs), strict=True))
        metrics = studies[0].metrics
    from traceage.report import summary_table, write_report

    print(summary_table(metrics))
    if options.output is not None:
        write_report(options.output, *studies, title="Token age by training step")
        _say(options, f"wrote {options.output}")
    return max(_close(options, summary) for summary in summaries)


def _import_matplotlib() -> None:
    for module in ("matplotlib.figure", "matplotlib.style", "matplotlib.backends.backend_svg"):
        import_module(module)


def _check_before_reading(
    options: argparse.Namespace, runs: Sequence[str | list[str]] = ()
) -> None:
    """Raise at once what would otherwise be found when much has been read."""
    from traceage.sources import find_files

    for run in runs:
        find_files(run, options.subset)
    if options.output is not None:
        check_target(options.output)


def _study(options: argparse.Namespace, source: str | list[str]) -> tuple[Study, ReadSummary]:
    from traceage.study import read_study

    summary = ReadSummary()
    study = read_study(source, weighting=options.weighting, **_reading(options, summary))
    _check_tokens(study.metrics, source, summary)
    return study, summary


def _metrics(options: argparse.Namespace) -> int:
    if options.format == "parquet" and options.output is None:
        raise ValueError("--format parquet needs a file to write: -o FILE")
    _check_before_reading(options)
    by = [name.strip() for name in options.by.split(",") if name.strip()]
    tally, summary = _tally(options, by)
    metrics = tally.metrics()
    if options.format == "parquet":
        with replacing(options.output) as part:
            metrics.write_parquet(part)
    else:
        if options.format == "json":
            text = json.dumps(metrics.to_dicts(), indent=1, allow_nan=False) + "\n"
        elif options.format == "csv":
            text = metrics.write_csv()
        else:
            from traceage.report import summary_table

            text = summary_table(metrics) + "\n"
        if options.output is None:
            sys.stdout.write(text)
        else:
            with replacing(options.output) as part:
                part.write_text(text, encoding="utf-8")
    return _close(options, summary)


def _tokens(options: argparse.Namespace) -> int:
    from traceage.scan import scan_tokens
    from traceage.schema import TOKENS

    default = "step,env,trace_id,node,index,age,version"
    columns = [name.strip() for name in (options.columns or default).split(",") if name.strip()]
    for name in columns:
        if name not in TOKENS:
            raise ValueError(f"no column {name!r} of tokens; there are {', '.join(TOKENS)}")
    summary = ReadSummary()
    tokens = scan_tokens(
        options.source,
        columns,
        labelled_only=options.labelled_only,
        weighting=options.weighting,
        **_reading(options, summary),
    )
    with replacing(options.output) as part:
        tokens.sink_parquet(part, compression="zstd")
    _say(options, f"wrote {options.output}")
    return _close(options, summary)


def _convert(options: argparse.Namespace) -> int:
    from traceage.convert import write_dump

    summary = ReadSummary()
    done = write_dump(
        options.source,
        options.output,
        messages=options.messages,
        step=options.step,
        on_error=options.on_error,
        quiet=options.quiet,
        summary=summary,
    )
    new = done.filter("written")
    _say(
        options,
        f"{options.output}: {done['traces'].sum():,} traces, {done['tokens'].sum():,} sampled "
        f"tokens from {done.height:,} files, {new.height:,} of them converted now",
    )
    return _close(options, summary)


def _start_workers(options: argparse.Namespace) -> None:
    """Start the processes that a large source is read with before polars is imported."""
    from traceage.sources import find_files, workers_worth
    from traceage.workers import start_workers

    start_workers(workers_worth(find_files(options.source, options.subset)), PARSER)


def _tally(options: argparse.Namespace, by: list[str]) -> tuple[Tally, ReadSummary]:
    _start_workers(options)

    from traceage.counts import read_batches
    from traceage.metrics import Tally
    from traceage.scan import scan_spans

    summary = ReadSummary()
    spans = scan_spans(options.source, **_reading(options, summary))
    tally = Tally(by, options.weighting)
    for batch in read_batches(spans, tally.columns, options.weighting):
        tally.add(batch)
    _check_tokens(tally.totals, options.source, summary)
    return tally, summary


def _check_tokens(totals: pl.DataFrame, source: str | list[str], summary: ReadSummary) -> None:
    if not totals["sampled_tokens"].sum() and not summary.not_shipped:
        named = source if isinstance(source, str) else ", ".join(source)
        raise TraceError(
            f"{named}: no sampled tokens at all in {summary.episodes:,} episodes; were the traces "
            "written with token ids and masks, by trainable agents?"
        )


def _reading(options: argparse.Namespace, summary: ReadSummary) -> ReadingOptions:
    return {
        "step": options.step,
        "training_version": options.training_version,
        "kind": options.kind,
        "subset": options.subset,
        "include_frozen": options.include_frozen,
        "version_pattern": options.version_pattern,
        "on_error": options.on_error,
        "quiet": options.quiet,
        "summary": summary,
    }


def _close(options: argparse.Namespace, summary: ReadSummary) -> int:
    """Say what a person should know about the reading; the exit status."""
    sys.stdout.flush()
    if summary.skipped or not options.quiet:
        for line in summary.lines():
            print(f"traceage: {line}", file=sys.stderr)
    return SKIPPED if summary.skipped else OK


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.quiet:
        print(f"traceage: {text}", file=sys.stderr)
