"""Time traceage against its rivals on the same files, each in a fresh process.

    python benchmarks/run.py --bytes 3.4GB --dir /big/disk
    python benchmarks/run.py --bytes 1GB --layout store --dir /big/disk
    python benchmarks/run.py --bytes 3.4GB --layout growth --dir /big/disk
    python benchmarks/run.py --bytes 340MB --layout report --dir /big/disk

`steps` compares everyone on the per-step layout and checks that all give the same answer, `store`
compares reading a sealed trace store with decompressing it, `growth` shows what a tenth of the
bytes takes, and `report` what a page costs beside the metrics alone. Dumps are made where they are
not there yet. The files are read once before, so they come from memory; the runs are interleaved
and the median is shown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from generate import parse_bytes

HERE = Path(__file__).resolve().parent
RIVALS = ("duckdb", "duckdb-lines", "polars", "polars-lines", "loop", "loop-tokens", "floor")
INTERVAL = 0.03  # seconds between two looks at the memory


@dataclass
class Run:
    """One command: its time, and the memory of it and its children at their peak."""

    output: Any  # what it printed: the value of JSON, else the text
    seconds: float
    cpu: float  # seconds of all processes, which a busy machine changes less
    peak: int  # resident bytes, pages shared by several processes counted in each
    private: int  # of these, what is not a mapped file, which the kernel may drop at any time


def run(command: list[str]) -> Run:
    """Run to the end; raises where the command fails."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        memory = _Memory(process.pid)
        memory.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        memory.stop()
        out.seek(0)
        err.seek(0)
        if process.returncode:
            text = err.read().decode(errors="replace")
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{text}")
        peak = max(memory.peak, usage.ru_maxrss * 1024)
        cpu = usage.ru_utime + usage.ru_stime
        return Run(_value(out.read().decode()), seconds, cpu, peak, memory.private)


def _value(printed: str) -> Any:
    try:
        return json.loads(printed)
    except ValueError:
        return printed


class _Memory(threading.Thread):
    """Look at a process and all below it every few milliseconds."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.private = pid, 0, 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(INTERVAL):
            sizes = [_resident(pid) for pid in _tree(self.pid)]
            self.peak = max(self.peak, sum(total for total, _ in sizes))
            self.private = max(self.private, sum(private for _, private in sizes))

    def stop(self) -> None:
        self.ended.set()
        self.join()


def _tree(pid: int) -> list[int]:
    """A process and its descendants; whichever ends meanwhile is left out."""
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def _resident(pid: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if "kB" in line}
    total = sizes.get("VmRSS", 0)
    return total, total - sizes.get("RssFile", 0)


def dump(folder: Path, layout: str, size: int) -> tuple[Path, dict[str, int]]:
    """The dump of this size below `folder`, made unless it is there, and what it holds."""
    path = folder / f"{layout}-{size / 1e6:g}MB"
    made = path.with_suffix(".json")
    if not made.exists():
        command = [sys.executable, str(HERE / "generate.py"), str(path), "--bytes", str(size)]
        command += ["--layout", layout] + ["--seal"] * (layout == "store")
        made.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    for file in path.rglob("*.jsonl*"):
        with open(file, "rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass
    holds: dict[str, int] = json.loads(made.read_text())
    return path, holds


def command(name: str, path: Path) -> list[str]:
    if name == "traceage":
        return [sys.executable, "-m", "traceage", "metrics", str(path), "--format", "json"]
    return [sys.executable, str(HERE / "rivals.py"), name, str(path)]


def interleave(commands: dict[str, list[str]], repeats: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, words in commands.items():
            runs[name].append(run(words))
            last = runs[name][-1]
            text = (
                f"{name}: {last.seconds:.2f} s, CPU {last.cpu:.2f} s, {last.peak / 2**20:.0f} MiB"
            )
            print(text, file=sys.stderr, flush=True)
    return runs


def answer(rows: list[dict[str, Any]]) -> dict[int, tuple[int, int, float | None, int | None]]:
    """What traceage's metrics and a rival's rows have in common."""
    return {
        row["step"]: (
            row["sampled_tokens"],
            row["labelled_tokens"],
            row["mean"] if "mean" in row else row["off_policy/token/mean"],
            row["max"] if "max" in row else row["off_policy/token/max"],
        )
        for row in rows
    }


def compare(name: str, rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Raise where two answers differ: counts exactly, means by more than 1e-9."""
    mine, theirs = answer(rows), answer(others)
    if mine.keys() != theirs.keys():
        raise AssertionError(f"{name}: steps {sorted(mine)} against {sorted(theirs)}")
    for step, (*counts, mean, highest) in mine.items():
        *their_counts, their_mean, their_highest = theirs[step]
        close = mean == their_mean or math.isclose(mean or 0, their_mean or 0, abs_tol=1e-9)
        if counts != their_counts or highest != their_highest or not close:
            raise AssertionError(f"{name}, step {step}: {mine[step]} against {theirs[step]}")


def table(runs: dict[str, list[Run]], sizes: dict[str, int], base: str) -> str:
    seconds = {name: median(run.seconds for run in each) for name, each in runs.items()}
    cpu = {name: median(run.cpu for run in each) for name, each in runs.items()}
    base = base if base in seconds else next(iter(seconds))
    lines = [
        f"| tool | seconds | fastest | GB/s | times {base} | CPU s | RSS, MiB | unmapped, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, each in runs.items():
        rss, private = (max(getattr(r, key) for r in each) / 2**20 for key in ("peak", "private"))
        fastest, speed = min(r.seconds for r in each), sizes[name] / seconds[name] / 1e9
        lines.append(
            f"| {name} | {seconds[name]:.2f} | {fastest:.2f} | {speed:.2f} "
            f"| {seconds[name] / seconds[base]:.2f} | {cpu[name]:.2f} | {rss:.0f} | {private:.0f} |"
        )
    return "\n".join(lines)


def _title(layout: str, holds: dict[str, int]) -> str:
    size, tokens = holds["bytes"] / 1e6, holds["sampled_tokens"] / 1e6
    return (
        f"### {layout}: {size:.0f} MB of JSONL, {tokens:.1f} million sampled tokens, "
        f"{holds['episodes']} episodes, {holds['steps']} steps\n"
    )


def steps(folder: Path, size: int, names: list[str], repeats: int) -> None:
    path, holds = dump(folder, "steps", size)
    runs = interleave({name: command(name, path) for name in names}, repeats)
    for name, each in runs.items():
        for one in each:
            compare(f"{name} against {names[0]}", one.output, runs[names[0]][0].output)
    print(_title("steps", holds))
    print(table(runs, dict.fromkeys(runs, holds["bytes"]), "traceage"))
    print(f"\nThe answers of {', '.join(names)} are equal.\n")


def store(folder: Path, size: int, names: list[str], repeats: int) -> None:
    path, holds = dump(folder, "store", size)
    names = [name for name in ("traceage", "decompress") if name in names or name == "decompress"]
    runs = interleave({name: command(name, path) for name in names}, repeats)
    assert runs["decompress"][0].output["bytes"] == holds["bytes"]
    print(_title("store, sealed", holds))
    print(table(runs, dict.fromkeys(runs, holds["bytes"]), "decompress"), end="\n\n")


def growth(folder: Path, size: int, names: list[str], repeats: int) -> None:
    commands, sizes = {}, {}
    for each in (size // 10, size):
        path, holds = dump(folder, "steps", each)
        print(_title("steps", holds))
        label = f"{names[0]} on {holds['bytes'] / 1e6:.0f} MB"
        commands[label], sizes[label] = command(names[0], path), holds["bytes"]
    runs = interleave(commands, repeats)
    small, large = runs
    print(table(runs, sizes, small))
    seconds = {label: median(run.seconds for run in each) for label, each in runs.items()}
    peak = {label: max(run.peak for run in each) for label, each in runs.items()}
    print(
        f"\n{sizes[large] / sizes[small]:.1f} times the bytes take "
        f"{seconds[large] / seconds[small]:.1f} times the time "
        f"and {peak[large] / peak[small]:.2f} times the memory.\n"
    )


def report(folder: Path, size: int, names: list[str], repeats: int) -> None:
    path, holds = dump(folder, "steps", size)
    page = folder / "report.html"
    words = [sys.executable, "-m", "traceage", "report", str(path), "-o", str(page)]
    runs = interleave({"metrics": command("traceage", path), "report": words}, repeats)
    data = page.read_text().split('id="traceage-data">')[1].split("</script>")[0]
    compare("report against metrics", json.loads(data)["metrics"], runs["metrics"][0].output)
    print(_title("steps", holds))
    print(table(runs, dict.fromkeys(runs, holds["bytes"]), "metrics"))
    print(f"\nThe answers are equal; the page has {page.stat().st_size / 1e6:.2f} MB.\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bytes", type=parse_bytes, default=parse_bytes("3.4GB"), metavar="SIZE")
    parser.add_argument("--layout", choices=["steps", "store", "growth", "report"], default="steps")
    parser.add_argument("--dir", type=Path, help="keep the dumps here (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=["traceage", *RIVALS], metavar="TOOL")
    args = parser.parse_args()
    sections = {"steps": steps, "store": store, "growth": growth, "report": report}
    section = sections[args.layout]
    names = args.only or ["traceage", *RIVALS]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        section(folder, args.bytes, names, args.repeats)


if __name__ == "__main__":
    main()
