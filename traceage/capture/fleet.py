"""Several engines that serve one policy: started or given, updated together, asked for tokens.

Generation goes to the engines in turn, or to a router before them; admin calls go to every engine.
An update pauses all engines, loads and labels on each, confirms, and resumes: either all engines
take a version, or the ones that took it are put back and `FleetError` says which refused and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import aiohttp

from traceage.capture import UpdatePath
from traceage.capture.tasks import has_tokenizer
from traceage.workers import available_cores

ADAPTER = "policy"
"""The fixed name under which adapters are served."""

START_SECONDS = 900
"""How long an engine may take to load a model and serve it."""


class FleetError(RuntimeError):
    """An engine refused an update, failed a request, or died; the message says which and why."""


@dataclass(frozen=True)
class Policy:
    """A version of the policy and the directory that holds it."""

    version: int
    directory: Path


@dataclass
class Server:
    """A server of the fleet: its address, and its process where the fleet started it."""

    name: str
    url: str
    process: asyncio.subprocess.Process | None = None
    log: Path | None = None

    def tail(self, lines: int = 12) -> str:
        """The end of its log, to say why it died."""
        if self.log is None or not self.log.exists():
            return ""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])


@dataclass(frozen=True)
class Completion:
    """What an engine sampled: a token and a logprob each, and the spans of their versions."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[dict[str, Any]] | None
    finish_reason: str


@dataclass
class Fleet:
    """The engines of a run. Use it as an async context manager: on exit, what it started ends.

    `engines` and `router` are filled by `start` and `connect`.
    """

    update_path: UpdatePath = "update-weights"
    lora: bool = False
    engines: list[Server] = field(default_factory=list)
    router: Server | None = None
    policy: Policy | None = None
    max_model_len: int = 0

    def __post_init__(self) -> None:
        self._turn = itertools.count()

    async def __aenter__(self) -> Fleet:
        key = os.environ.get("VLLM_API_KEY")
        self.session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            # A kept connection that the server has just closed would fail the next request, and
            # a request takes long enough for a new one not to matter.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await asyncio.gather(*(_stop(server) for server in self.servers()))

    async def start(
        self,
        model: Path,
        count: int,
        policies: Path,
        logs: Path,
        flags: Sequence[str] = (),
        router: bool = False,
        seed: int = 0,
    ) -> None:
        """Start `count` engines, and a router before them, and wait until they serve.

        Their output goes to files under `logs`; `flags` are vLLM's own.

        Raises:
            FleetError: a server ended, or did not answer in time; with the end of its log.
        """
        logs.mkdir(parents=True, exist_ok=True)
        flags = [*_default_flags(model), *flags]
        flags += ["--policies-root", str(policies), "--update-path", self.update_path]
        flags += ["--stop-with-parent", "--generation-config", "vllm"]
        if self.lora:
            flags += ["--enable-lora", "--max-loras", "1"]
        environment = engine_environment(count)
        for k in range(count):
            port = _free_port()
            engine = ["-m", "traceage.capture.engine", "--model", str(model), "--port", str(port)]
            # A seed an engine: a seed a request is more than vLLM can keep on CPU when it is paused
            # (0.32: "CPU Generator does not use offset" ends the engine).
            engine += ["--seed", str(seed + k), *flags]
            self.engines.append(await self._spawn(f"engine_{k}", port, logs, engine, environment))
        await self._until_serving(START_SECONDS)
        if router:
            await self._start_router(logs)

    async def connect(self, urls: Sequence[str], router_url: str | None) -> None:
        """Use engines that run already.

        Raises:
            FleetError: an engine does not answer.
        """
        self.engines += [
            Server(f"engine_{k}", url.rstrip("/")) for k, url in enumerate(urls, len(self.engines))
        ]
        await self._until_serving(30)
        if router_url is not None:
            self.router = Server("router", router_url.rstrip("/"))

    async def _start_router(self, logs: Path) -> None:
        port, metrics = _free_port(), _free_port()
        urls = [engine.url for engine in self.engines]
        command = ["-m", "vllm_router.launch_router", "--worker-urls", *urls]
        command += ["--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(metrics)]
        self.router = await self._spawn("router", port, logs, command, {})
        await self._until_healthy(self.router, 120)

    async def _spawn(
        self, name: str, port: int, logs: Path, command: list[str], environment: dict[str, str]
    ) -> Server:
        log = logs / f"{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                # Held open by this process alone, so that it closes when this process dies.
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**environment, **os.environ},
                # Ctrl-C at a terminal is for the orchestrator: it ends the engines in its order.
                start_new_session=True,
            )
        return Server(name, f"http://127.0.0.1:{port}", process, log)

    async def _until_healthy(self, server: Server, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self.session.get(f"{server.url}/health") as answer:
                    if answer.status == 200:
                        break
            self._check_alive(server)
            if asyncio.get_running_loop().time() > deadline:
                raise FleetError(
                    f"{server.name} at {server.url} does not answer after {seconds:.0f} s\n"
                    f"{server.tail()}"
                )
            await asyncio.sleep(0.25)

    async def _until_serving(self, seconds: float) -> None:
        """Wait for every engine, and learn how long a sequence all of them take."""
        await asyncio.gather(*(self._until_healthy(engine, seconds) for engine in self.engines))
        answers = [await self.call("GET", engine, "/v1/models") for engine in self.engines]
        self.max_model_len = min(answer["data"][0]["max_model_len"] for answer in answers)

    def _check_alive(self, server: Server) -> None:
        if server.process is not None and server.process.returncode is not None:
            raise FleetError(
                f"{server.name} at {server.url} ended with status {server.process.returncode}; "
                f"its log, {server.log}, ends:\n{server.tail()}"
            )

    async def watch(self) -> None:
        """Return never; raise `FleetError` when a server that the fleet started ends."""
        while True:
            for server in self.servers():
                self._check_alive(server)
            await asyncio.sleep(0.2)

    def servers(self) -> list[Server]:
        """Every engine, and the router."""
        return [*self.engines, *([self.router] if self.router else [])]

    async def update(self, policy: Policy) -> None:
        """Load and label a policy on every engine, and confirm it, while nothing is sampled.

        Raises:
            FleetError: an engine did not take it. The others are put back to what they had.
        """
        await self._all(lambda engine: self.call("POST", engine, "/pause"))
        outcome = await asyncio.gather(
            *(self._load(engine, policy) for engine in self.engines), return_exceptions=True
        )
        failed = [error for error in outcome if isinstance(error, BaseException)]
        if failed:
            if self.policy is not None:
                took = [e for e, o in zip(self.engines, outcome, strict=True) if o is None]
                await asyncio.gather(
                    *(self._load(engine, self.policy) for engine in took), return_exceptions=True
                )
            reasons = "; ".join(str(error) for error in failed)
            raise FleetError(f"policy v{policy.version} was not taken by every engine: {reasons}")
        self.policy = policy
        await self._all(lambda engine: self.call("POST", engine, "/resume"))

    async def _load(self, engine: Server, policy: Policy) -> None:
        version, directory = str(policy.version), str(policy.directory)
        if self.update_path == "collective-rpc":
            body: dict[str, Any] = {"method": "reload_weights"}
            body["kwargs"] = {"weights_path": directory}
            await self.call("POST", engine, "/collective_rpc", body)
            return
        if self.lora:
            body = {"lora_name": ADAPTER, "lora_path": directory}
            await self.call("POST", engine, f"/load_lora_adapter?weight_version={version}", body)
        else:
            body = {"weight_dir": directory, "weight_version": version}
            await self.call("POST", engine, "/update_weights", body)
        label = (await self.call("GET", engine, "/weight_info"))["weight_version"]
        if label != version:
            raise FleetError(f"{engine.name} says it serves {label!r} after v{version} was loaded")

    async def resume(self) -> None:
        """Let every engine sample again; for engines that go on after the run."""
        await self._all(lambda engine: self.call("POST", engine, "/resume"))

    async def _all(self, call: Callable[[Server], Coroutine[Any, Any, object]]) -> None:
        outcome = await asyncio.gather(*map(call, self.engines), return_exceptions=True)
        if failed := [str(error) for error in outcome if isinstance(error, BaseException)]:
            raise FleetError("; ".join(failed))

    async def generate(
        self, token_ids: list[int], max_tokens: int, stop_token_ids: list[int]
    ) -> Completion:
        """Sample a completion of `token_ids` at temperature 1 from the whole distribution.

        Raises:
            FleetError: the server refused or died.
        """
        server = self.router or self.engines[next(self._turn) % len(self.engines)]
        body: dict[str, Any] = {
            "token_ids": token_ids,
            "sampling_params": {
                "max_tokens": max_tokens,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "logprobs": 0,
                "detokenize": False,
                "stop_token_ids": stop_token_ids,
            },
        }
        if self.lora:
            body["model"] = ADAPTER
        choice = (await self.call("POST", server, "/inference/v1/generate", body))["choices"][0]
        content = (choice["logprobs"] or {}).get("content") or []
        return Completion(
            token_ids=choice["token_ids"],
            logprobs=[token["logprob"] for token in content],
            weight_versions=choice["weight_versions"],
            finish_reason=choice["finish_reason"],
        )

    async def call(
        self, method: str, server: Server, path: str, body: dict[str, Any] | None = None
    ) -> Any:
        """The JSON that a server answers.

        Raises:
            FleetError: it is dead, or answered with an error.
        """
        try:
            async with self.session.request(method, server.url + path, json=body) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError) as error:
            await asyncio.sleep(0.2)  # a process that just died needs a moment to be seen dead
            self._check_alive(server)
            raise FleetError(f"{server.name} at {server.url}: {path}: {error}") from error
        if answer.status != 200:
            raise FleetError(f"{server.name}: {path} answered {answer.status}: {_error(text)}")
        return json.loads(text)


def _error(text: str) -> str:
    """The reason in the body of an error: ours, vLLM's, or the text itself."""
    with contextlib.suppress(ValueError, AttributeError):
        error = json.loads(text).get("error", text)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return text[:500]


def engine_environment(engines: int) -> dict[str, str]:
    """What each of `engines` vLLM processes is told of CPUs unless the environment says more.

    A gigabyte of cache. No pinning: every engine would pin its threads to the same cores. No more
    threads than there are cores beside the orchestrator: they wait for each other spinning, and two
    engines of two threads on two cores take four times as long.
    """
    threads = max(1, (available_cores() - 1) // engines)
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }


async def _stop(server: Server) -> None:
    process = server.process
    if process is None:
        return
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 20)
    # Whatever is left of its session: the workers of a server that was killed outlive it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _default_flags(model: Path) -> list[str]:
    """What a user would have to give otherwise: no tokenizer where there is none, no compiler."""
    flags = []
    if not has_tokenizer(model):
        flags.append("--skip-tokenizer-init")
    with contextlib.suppress(PackageNotFoundError):
        distribution("vllm-cpu")
        flags += ["--enforce-eager", "--dtype", "bfloat16"]
    return flags
