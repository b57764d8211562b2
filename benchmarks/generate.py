"""Make dumps of any size with the shape of agentic rollouts, in either of prime-rl's layouts.

    python benchmarks/generate.py OUT --bytes 340MB --layout steps
    python benchmarks/generate.py OUT --bytes 1GB --layout store --seal

An episode is 8 turns of about 1,000 sampled tokens with a tool result between turns, written as
verifiers writes it. 340 MB hold about 8.2 million sampled tokens. Only text is made: long arrays
and messages are slices of pools that are built once, so a dump is written about as fast as the
disk takes it, in little memory, and the same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import zstandard

TURNS = 8
SAMPLED_PER_TURN = 1000
TOOL_TOKENS = 540
VOCABULARY = 151_000
START_AGE = (0.08, 0.24, 0.26, 0.18, 0.12, 0.08, 0.04)  # versions behind when it is dispatched
GROUP = 8  # episodes of one task
ENVS = ("swe-agent", "deep-search", "terminal", "code-golf")
JUDGED_ENV = "deep-search"  # its episodes also hold the trace of a frozen judge
FRAME = 4 << 20  # content of one frame of a sealed chunk
SCAFFOLD = 3  # template tokens before a completion

FALSES = memoryview(b"false," * 20_000)
TRUES = memoryview(b"true," * 20_000)

Bytes = bytes | memoryview


class Pool:
    """JSON text of many items; `cut` gives a run of them without the last separator."""

    def __init__(self, items: Iterable[str], separator: bytes = b",") -> None:
        encoded = [item.encode() for item in items]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) + len(separator)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        self.text = memoryview(separator.join(encoded) + separator)
        self.separator = len(separator)
        self.size = len(encoded)

    def cut(self, at: float, count: int) -> memoryview:
        """`count` items from the place `at` (0 to 1) of the pool."""
        if count == 0:
            return self.text[:0]
        start = int(at * (self.size - count))
        return self.text[self.offsets[start] : self.offsets[start + count] - self.separator]


class Pools:
    """Everything long that a record is made of."""

    def __init__(self, rng: np.random.Generator, items: int = 1_000_000) -> None:
        # Zipf's law over ids in no order, as a tokenizer's ids have none that matters here.
        rank = np.exp(rng.random(items) * np.log(VOCABULARY)).astype(np.int64)
        ids = rng.permutation(VOCABULARY + 1)[rank]
        self.token_ids = Pool(map(str, ids.tolist()))
        logprobs = -np.round(rng.gamma(0.45, 1.1, items), 4)
        self.logprobs = Pool(map(repr, logprobs.tolist()))
        words = _words(rng)
        pick = (np.exp(rng.random(items // 2) * np.log(len(words))) - 1).astype(np.int64)
        text = [_escape(words[i]) for i in pick.tolist()]
        self.text = Pool(text, b" ")
        self.nested = Pool(map(_escape, text), b" ")  # for a JSON string within a JSON string


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _words(rng: np.random.Generator) -> list[str]:
    """Words by rank: some code, some of other scripts, some that a careless reader trips over."""
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = ["".join(rng.choice(letters, n)) for n in rng.integers(2, 11, 4000).tolist()]
    odd = [
        "\n    return x",
        'print("ok")\n',
        "C:\\temp\\a.txt",
        "\tif x >= 0:",
        "\u00e9t\u00e9",
        "\u6587\u4ef6",
        "\u2192",
        "\U0001f642",
        "a\u2028b",
        "c\u0085d",
        "\x1b[0m",
        '{"mask":[true,false],"sampled":true,"weight_versions":[{"version":"9","start":0,"end":2}]}',
        '"traces":[{"nodes":[]}]',
        "]}\n{",
    ]
    for word in odd:
        words.insert(int(rng.integers(20, 400)), word)
    return words


@dataclass(frozen=True)
class Episode:
    """One record, the text before and after its `info` apart, and what the side files say of it."""

    step: int
    shipped: bool
    id: str
    trace_id: str
    trace_ids: list[str]
    env: str
    group: str
    dispatch: int
    advantage: float
    runs: list[tuple[int, int]]  # (template and tool tokens, sampled tokens) down the branch
    head: list[Bytes]
    tail: list[Bytes]

    def line(self, info: bytes = b"{}") -> bytes:
        return b"".join([*self.head, info, *self.tail])


def episodes(seed: int, per_step: int, unshipped: float = 0.0) -> Iterator[Episode]:
    """Episodes step by step without end; a share `unshipped` comes on top of each batch."""
    rng = np.random.default_rng(seed)
    pools = Pools(rng)
    step = number = 0
    while True:
        step += 1
        taken = 0
        while taken < per_step:
            shipped = bool(rng.random() >= unshipped)
            taken += shipped
            yield _episode(rng, pools, step, shipped, number)
            number += 1


def _episode(
    rng: np.random.Generator, pools: Pools, step: int, shipped: bool, number: int
) -> Episode:
    env = ENVS[number // GROUP % len(ENVS)]
    newest = step - 1
    age = min(int(rng.choice(len(START_AGE), p=START_AGE)), newest)
    updates = int(rng.binomial(age, 0.85))
    first, last = newest - age, newest - age + updates
    turns = max(1, TURNS + int(rng.integers(-3, 4)) * int(rng.random() < 0.4))
    spread = rng.lognormal(-0.08, 0.4, (turns, 2))
    sampled = np.minimum(spread[:, 0] * SAMPLED_PER_TURN, 4 * SAMPLED_PER_TURN).astype(int)
    sampled[rng.random(turns) < 0.002] = 0  # an empty completion
    tool = (spread[:, 1] * TOOL_TOKENS).astype(int).clip(8).tolist()
    cuts = np.sort(rng.integers(0, sampled.sum() + 1, updates)).tolist()
    counts = sampled.tolist()
    ident, trace_id, judge_id = (rng.bytes(16).hex() for _ in range(3))
    group = f"g{number // GROUP}"
    clock = 1_796_000_000 + number * 7 + float(rng.random())
    at = rng.random((turns + 2, 8)).tolist()

    nodes: list[Bytes] = []
    _prompt(nodes, pools, None, b"system", at[-1], 60, clock)
    _prompt(nodes, pools, 0, b"user", at[-2], 300, clock)
    runs = [(360, 0)]
    done = 0
    for turn, count in enumerate(counts):
        spans = _spans(first, cuts, done, count, at[turn][6])
        _completion(nodes, pools, 2 * turn + 1, turn, at[turn], count, spans, clock + 20 * turn)
        done += count
        runs.append((SCAFFOLD, count))
        if turn + 1 < turns:
            _tool(nodes, pools, 2 * turn + 2, turn, at[turn], tool[turn], clock + 20 * turn + 5)
            runs.append((tool[turn], 0))
    traces = [trace_id]
    task = b'{"type":"Task","data":{"idx":%d,"prompt":"%s","timeout":{},"resources":{}}}' % (
        number // GROUP,
        pools.text.cut(at[0][7], 40),
    )
    work = b'{"type":"train","step":%d,"policy":{"start":%d,"end":%d}}' % (first + 1, first, last)
    reward = int(rng.integers(0, 5)) / 4
    size = sum(a for a, _ in runs), done
    head: list[Bytes] = [
        b'{"id":"%s","env":{"id":"%s","name":"%s"},"task":%s,"group":{"id":"%s"},'
        b'"run":{"type":"train","id":"bench","work":%s},"ok":true,"is_timeout":false,"errors":[],'
        b'"traces":[' % (ident.encode(), env.encode(), env.encode(), task, group.encode(), work),
        _trace_head(trace_id, task, b"agent", True),
        *nodes,
        _trace_tail(reward),
    ]
    tail: list[Bytes] = [_trace_end(clock, *size)]
    if env == JUDGED_ENV:
        traces.append(judge_id)
        judge: list[Bytes] = []
        _prompt(judge, pools, None, b"user", at[-1][::-1], 400, clock + 200)
        whole = [(b"default", 0, 120)]
        _completion(judge, pools, 0, 0, at[-2][::-1], 120, whole, clock + 201)
        tail += [b",", _trace_head(judge_id, task, b"judge", False), *judge]
        tail += [_trace_tail(reward), b"{}", _trace_end(clock + 200, 400 + SCAFFOLD, 120)]
    tail.append(
        b'],"num_input_tokens":%d,"num_output_tokens":%d,"num_total_tokens":%d}\n'
        % (*size, sum(size))
    )
    return Episode(
        step,
        shipped,
        ident,
        trace_id,
        traces,
        env,
        group,
        first + 1,
        reward - 0.5,
        runs,
        head,
        tail,
    )


Span = tuple[bytes, int, int]


def _spans(first: int, cuts: list[int], begin: int, count: int, fate: float) -> list[Span] | None:
    """The spans of the completion at [begin, begin + count) of its episode's sampled tokens."""
    if fate < 0.004:
        return None
    if fate < 0.008:
        return [(b"default", 0, count)] if count else []
    inner = [cut - begin for cut in cuts if begin < cut < begin + count]
    version = first + sum(cut <= begin for cut in cuts)
    bounds = [0, *inner, count]
    pairs = enumerate(pairwise(bounds), version)
    spans = [(b"%d" % label, a, b) for label, (a, b) in pairs if a < b]
    if fate < 0.011 and count > 50 and spans[0][2] > 20:
        spans[0] = (spans[0][0], 16, spans[0][2])  # the engine labelled no token before
    return spans


def _open_node(parent: int | None) -> bytes:
    return b',{"parent":%d,' % parent if parent is not None else b"{"


def _prompt(
    out: list[Bytes],
    pools: Pools,
    parent: int | None,
    role: bytes,
    at: list[float],
    count: int,
    clock: float,
    call: bytes = b"",
) -> None:
    out += [
        _open_node(parent),
        b'"semantic_parents":[],"message":{"role":"%s",%s"content":"' % (role, call),
        pools.text.cut(at[0], int(count * 0.72)),
        b'"},"sampled":false,"timestamp":%.6f,"token_ids":[' % clock,
        pools.token_ids.cut(at[1], count),
        b'],"mask":[',
        FALSES[: 6 * count - 1],
        b'],"is_content":[',
    ]
    # A message's body stands between the template's opening and closing tokens.
    body = count - 5
    out += [FALSES[:18], TRUES[: 5 * body], FALSES[: 6 * (count - 3 - body) - 1]]
    out.append(b'],"logprobs":[]}')


def _tool(
    out: list[Bytes],
    pools: Pools,
    parent: int,
    turn: int,
    at: list[float],
    count: int,
    clock: float,
) -> None:
    call = b'"tool_call_id":"call_%d",' % turn
    _prompt(out, pools, parent, b"tool", at[2:], count, clock, call)


def _completion(
    out: list[Bytes],
    pools: Pools,
    parent: int,
    turn: int,
    at: list[float],
    count: int,
    spans: list[Span] | None,
    clock: float,
) -> None:
    words = int(count * 0.72)
    false = FALSES[: 6 * SCAFFOLD - (count == 0)]
    mask = TRUES[: max(0, 5 * count - 1)]
    out += [
        _open_node(parent),
        b'"semantic_parents":[],"message":{"role":"assistant","content":"',
        pools.text.cut(at[0], words // 4),
        b'","reasoning_content":"',
        pools.text.cut(at[1], words // 2),
        b'","tool_calls":[{"id":"call_%d","type":"function","name":"bash","arguments":"' % turn,
        b'{\\"cmd\\":\\"',
        pools.nested.cut(at[2], words // 4),
        b'\\"}"}]},"sampled":true,"timestamp":%.6f,"token_ids":[' % clock,
        pools.token_ids.cut(at[3], SCAFFOLD + count),
        b'],"mask":[',
        false,
        mask,
        b'],"is_content":[',
        false,
        mask,
        b'],"logprobs":[',
        pools.logprobs.cut(at[4], count),
        b"]",
    ]
    if spans is not None:
        rows = b",".join(b'{"version":"%s","start":%d,"end":%d}' % span for span in spans)
        out.append(b',"weight_versions":[%s]' % rows)
    out.append(b"}")


def _trace_head(ident: str, task: bytes, name: bytes, trainable: bool) -> bytes:
    return (
        b'{"version":1,"id":"%s","verifiers":{"version":"0.4.1.dev86"},"task":%s,"agent":{"config":'
        b'{"runtime":{"allow":["*"],"block":[],"type":"prime","image":"python:3.11-slim"},'
        b'"scoring":{},"timeout":{},"retries":{"max_retries":0,"rules":[]}},"name":"%s",'
        b'"trainable":%s},"tools":[],"nodes":['
        % (ident.encode(), task, name, b"true" if trainable else b"false")
    )


def _trace_tail(reward: float) -> bytes:
    return (
        b'],"calls":[],"mm_token_type_id_map":{},"request_rewrites":[],"response_rewrites":[],'
        b'"rewards":{"solved":{"score":%s,"weight":1.0}},"metrics":{},"info":'
        % repr(reward).encode()
    )


def _trace_end(clock: float, inputs: int, outputs: int) -> bytes:
    return (
        b',"extra_usage":[],"is_completed":true,"ok":true,"is_timeout":false,"errors":[],'
        b'"timing":{"start":%.6f,"setup":{"start":0.0,"end":0.0},"scoring":{"start":0.0,"end":0.0}},'
        b'"stop_condition":"agent_completed","num_input_tokens":%d,"num_output_tokens":%d,'
        b'"num_total_tokens":%d}' % (clock, inputs, outputs, inputs + outputs)
    )


def write_steps(
    out: Path, target: int, seed: int, per_step: int, compress: str = "none"
) -> dict[str, int]:
    """Write rollouts/step_N/train/effective/traces.jsonl up to `target` bytes of content."""
    total = sampled = count = step = 0
    file: BinaryIO | None = None
    for episode in episodes(seed, per_step):
        if episode.step != step:
            if file:
                file.close()
            step = episode.step
            folder = out / f"rollouts/step_{step}/train/effective"
            folder.mkdir(parents=True)
            file = _open(folder / "traces.jsonl", compress)
        assert file
        line = episode.line()
        file.write(line)
        total += len(line)
        sampled += sum(n for _, n in episode.runs)
        count += 1
        if total >= target:
            file.close()
            break
    return {"bytes": total, "sampled_tokens": sampled, "episodes": count, "steps": step}


def _open(path: Path, compress: str) -> BinaryIO:
    if compress == "gz":
        return cast(BinaryIO, gzip.open(f"{path}.gz", "wb", compresslevel=3))
    if compress == "zst":
        compressor = zstandard.ZstdCompressor(level=3)
        return cast(BinaryIO, compressor.stream_writer(Path(f"{path}.zst").open("wb")))
    return path.open("wb", buffering=1 << 20)


class ChunkedStream:
    """A stream of lines in chunks NNNNN.jsonl with an index beside it; full chunks are sealed."""

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.chunk_bytes = folder, chunk_bytes
        self.index = folder.with_suffix(".index.jsonl").open("w")
        self.chunk, self.offset = -1, 0
        self.file: BinaryIO | None = None
        self._roll()

    def _roll(self) -> None:
        self._close(seal=True)
        self.chunk, self.offset = self.chunk + 1, 0
        self.file = self.path.open("wb", buffering=1 << 20)

    def _close(self, seal: bool) -> None:
        if self.file:
            self.file.close()
            if seal:
                seal_chunk(self.path)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.chunk:05d}.jsonl"

    def write(self, line: bytes, row: dict[str, Any]) -> None:
        if self.offset and self.offset + len(line) > self.chunk_bytes:
            self._roll()
        assert self.file
        self.file.write(line)
        row |= {"chunk": self.chunk, "offset": self.offset}
        self.index.write(json.dumps(row, separators=(",", ":")) + "\n")
        self.offset += len(line)

    def close(self, seal: bool) -> None:
        self._close(seal)
        self.index.close()


def seal_chunk(path: Path) -> None:
    """Replace NNNNN.jsonl by NNNNN.jsonl.zst: frames of 4 MiB of content and a seek table."""
    partial = Path(f"{path}.zst.tmp")
    table: list[tuple[int, int]] = []
    workers = os.cpu_count() or 1
    pending: deque[tuple[int, Future[bytes]]] = deque()

    def take() -> None:
        size, future = pending.popleft()
        frame = future.result()
        sealed.write(frame)
        table.append((len(frame), size))

    with open(path, "rb") as plain, open(partial, "wb") as sealed:
        with ThreadPoolExecutor(workers) as pool:
            while content := plain.read(FRAME):
                pending.append((len(content), pool.submit(_frame, content)))
                if len(pending) > 2 * workers:
                    take()
            while pending:
                take()
        entries = b"".join(struct.pack("<II", *entry) for entry in table)
        footer = struct.pack("<IBI", len(table), 0, 0x8F92EAB1)
        sealed.write(struct.pack("<II", 0x184D2A5E, len(entries) + len(footer)) + entries + footer)
    partial.rename(f"{path}.zst")
    path.unlink()


def _frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_content_size=False).compress(content)


def write_store(
    out: Path,
    target: int,
    seed: int,
    per_step: int,
    chunk_bytes: int,
    unshipped: float,
    seal: bool,
) -> dict[str, int]:
    """Write a trace store whose stream holds `target` bytes of plain content."""
    traces = out / "monitors/file/traces"
    stream = ChunkedStream(traces / "stream", chunk_bytes)
    orch = ChunkedStream(traces / "annotations/orch", chunk_bytes)
    total = sampled = count = 0
    batch: list[Episode] = []
    for episode in episodes(seed, per_step, unshipped):
        if batch and episode.step != batch[0].step:
            _ship(orch, batch)
            batch = []
        count += 1
        arrival = {"step": episode.step, "time": 1000.0 + count}
        dispatch = {"step": episode.dispatch, "time": 900.0 + count}
        info = {"kind": "train", "arrival": arrival, "dispatch": dispatch}
        line = episode.line(json.dumps(info, separators=(",", ":")).encode())
        row = {"line": count, "id": episode.id, "kind": "train", "trace_ids": episode.trace_ids}
        stream.write(line, row | {"env": episode.env, "group": episode.group, "ok": True})
        total += len(line)
        sampled += sum(n for _, n in episode.runs)
        if episode.shipped:
            # What a batch's annotations need; not the record itself.
            batch.append(replace(episode, head=[], tail=[]))
        if total >= target:
            break
    _ship(orch, batch)
    stream.close(seal)
    orch.close(seal)
    return {"bytes": total, "sampled_tokens": sampled, "episodes": count, "steps": episode.step}


def _ship(orch: ChunkedStream, batch: list[Episode]) -> None:
    for episode in batch:
        ship = {"step": episode.step, "time": 2000.0 + episode.step}
        info = {"effective": True, "ship": ship, "advantage": episode.advantage}
        advantage = b"%s," % repr(episode.advantage).encode()
        stream = b"".join(b"0.0," * a + advantage * b for a, b in episode.runs)
        line = (
            b'{"version":1,"trace_id":"%s","info":%s,"branches":[{"index":0,"advantages":[%s]}]}\n'
        )
        text = json.dumps(info, separators=(",", ":")).encode()
        orch.write(
            line % (episode.trace_id.encode(), text, stream[:-1]),
            {"trace_id": episode.trace_id, "info": info},
        )


def parse_bytes(text: str) -> int:
    """Read "340MB", "3.4GB", "64KiB" or a plain number of bytes.

    >>> parse_bytes("3.4GB"), parse_bytes("1KiB")
    (3400000000, 1024)
    """
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (write 340MB, 3.4GB)")
    power = " KMGT".index(match[2].upper() or " ")
    return round(float(match[1]) * float(1024 if match[3] else 1000) ** power)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="a new directory")
    parser.add_argument("--bytes", type=parse_bytes, default=parse_bytes("340MB"), metavar="SIZE")
    parser.add_argument("--layout", choices=["steps", "store"], default="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes-per-step", type=int, default=64)
    parser.add_argument("--compress", choices=["none", "gz", "zst"], default="none", help="steps")
    parser.add_argument("--seal", action="store_true", help="store: seal the newest chunk too")
    parser.add_argument("--chunk-bytes", type=parse_bytes, default=5 << 30, help="store: roll at")
    parser.add_argument("--unshipped", type=float, default=0.1, help="store: taken by no batch")
    args = parser.parse_args(argv)
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty")
    room = shutil.disk_usage(next(p for p in [args.out, *args.out.resolve().parents] if p.exists()))
    if room.free < 2 * args.bytes:
        parser.error(f"{room.free / 1e9:.1f} GB free, {2 * args.bytes / 1e9:.1f} GB wanted")
    per_step = args.episodes_per_step
    if args.layout == "steps":
        made = write_steps(args.out, args.bytes, args.seed, per_step, args.compress)
    else:
        made = write_store(
            args.out,
            args.bytes,
            args.seed,
            per_step,
            args.chunk_bytes,
            args.unshipped,
            args.seal,
        )
    print(json.dumps(made))


if __name__ == "__main__":
    main()
