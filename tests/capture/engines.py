"""Real engines as processes on loopback, and what they load."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceage.capture.fleet import engine_environment

KEY = "secret"
SEQUENCE = list(range(40, 60))
CPU_FLAGS = ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16"]


@dataclass(frozen=True)
class Engine:
    """A running engine."""

    url: str
    process: subprocess.Popen[bytes]

    def call(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Status and JSON answer of a GET, or of a POST of `body`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data)
        request.add_header("Content-Type", "application/json")
        if key is not None:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def label(self) -> str:
        """The label that the engine says it gives."""
        return str(self.call("/weight_info")[1]["weight_version"])

    def sampled(self) -> float:
        """How many tokens it has sampled so far."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        counts = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
        return sum(map(float, counts))

    def generate(self, tokens: int = 4, model: str | None = None) -> dict[str, Any]:
        """A completion of a fixed prompt."""
        sampling = {"max_tokens": tokens, "logprobs": 0, "detokenize": False, "ignore_eos": True}
        body: dict[str, Any] = {"token_ids": [5, 6, 7, 8], "sampling_params": sampling}
        if model is not None:
            body["model"] = model
        status, answer = self.call("/inference/v1/generate", body)
        assert status == 200, answer
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def logprobs(self, model: str | None = None) -> list[float]:
        """The logprobs of a fixed sequence: they tell whether the weights are the same."""
        sequence = SEQUENCE
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body: dict[str, Any] = {"token_ids": sequence, "sampling_params": sampling}
        if model is not None:
            body["model"] = model
        scored = self.call("/inference/v1/generate", body)[1]["prompt_logprobs"][1:]
        return [row[str(token)]["logprob"] for token, row in zip(sequence[1:], scored, strict=True)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def process(
    command: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block; it is told to stop, and killed if it does not."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**(environment or {}), **os.environ},
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_until_healthy(url: str, started: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            assert started.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.25)


@contextmanager
def running_engines(
    model: Path, roots: list[Path], log_dir: Path, *flags: str
) -> Iterator[list[Engine]]:
    """Engines that load from under `roots`, one each, started side by side."""
    with ExitStack() as stack:
        engines = []
        for k, root in enumerate(roots):
            port = free_port()
            command = [sys.executable, "-m", "traceage.capture.engine", "--model", str(model)]
            command += ["--policies-root", str(root), "--port", str(port), "--stop-with-parent"]
            command += ["--max-model-len", "8192", *CPU_FLAGS, *flags]
            log = log_dir / f"engine_{k}_{port}.log"
            started = stack.enter_context(process(command, log, engine_environment(len(roots))))
            engines.append(Engine(f"http://127.0.0.1:{port}", started))
        for k, engine in enumerate(engines):
            log = log_dir / f"engine_{k}_{engine.url.rsplit(':', 1)[1]}.log"
            wait_until_healthy(engine.url, engine.process, log)
        yield engines
        # They stop by themselves when what started them is gone.
        for engine in engines:
            assert engine.process.stdin is not None
            engine.process.stdin.close()
        for engine in engines:
            engine.process.wait(60)


@dataclass(frozen=True)
class Policies:
    """A tiny model, and policies and adapters of it."""

    model: Path
    policies: Path
    adapters: Path
