"""Keeps episodes in flight while policies change, and ships batches of them to a trace store.

Batch `s` trains policy v`s-1`, and training on it makes v`s`. So a batch waits until the policy
that it trains is there, and a policy is loaded once the batch that made it has shipped: no token is
ever newer than the policy its batch trains. Meanwhile episodes keep running; whatever is in flight
when a policy is loaded goes on under the next one.

    dispatch -> in flight -> arrived (in the stream) -> group whole -> shipped (annotated)
                                                    '-> too old: dropped, and never shipped

Before the first episode is dispatched the boot policy is loaded, labelled and confirmed on every
engine, so that every token carries a real step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import random
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.metadata import distributions
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from traceage.capture import UpdatePath
from traceage.capture.episodes import Record, Rollout, roll_out
from traceage.capture.fleet import Fleet, Policy
from traceage.capture.store import MetricsLog, TraceStoreWriter
from traceage.capture.tasks import load_task
from traceage.formats.trace_store import TraceStore
from traceage.metrics import batch_metrics
from traceage.output import replacing

POLL_SECONDS = 0.1
"""How often the policy watcher looks for a new checkpoint."""


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture is asked for; the command line's flags under the same names."""

    model: Path
    policies: Path
    out: Path
    steps: int | None
    engines: int
    engine_urls: Sequence[str]
    engine_flags: Sequence[str]
    router: bool
    router_url: str | None
    task: str
    concurrency: int
    batch_size: int
    group_size: int
    max_tokens: int
    max_off_policy_steps: int | None
    update_path: UpdatePath
    lora: bool
    train: bool
    learning_rate: float
    resume_step: int | None
    seed: int
    quiet: bool


class CaptureError(RuntimeError):
    """A capture that cannot start or go on; the message says why and what to do."""


@dataclass
class Group:
    """The episodes of one example; shipped whole or not at all."""

    id: str
    index: int
    arrived: list[Rollout] = field(default_factory=list)
    running: dict[asyncio.Task[Rollout], Rollout] = field(default_factory=dict)
    dispatched: int = 0

    def oldest(self) -> int | None:
        """The oldest policy version under which one of its episodes was dispatched."""
        rollouts = [*self.arrived, *self.running.values()]
        return min((rollout.policy_start for rollout in rollouts), default=None)


async def capture(options: CaptureOptions) -> int:
    """Run a capture until its steps are shipped, or until it is cancelled; 0 for an exit status.

    Raises:
        CaptureError: a policy or a task that is not there; a run directory that does not fit.
        FleetError: an engine died or refused an update. What was shipped is kept, and whole.
    """
    first = options.resume_step or 0
    _check(options, first)
    _check_resume(options)
    _write_run_json(options)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(TraceStoreWriter(options.out))
        if taken_back := take_back(options.out, store, first):
            _say(options, f"{taken_back} traces of batches after step {first} are taken back")
        trainer = stack.enter_context(_trainer(options, first)) if options.train else None
        async with Fleet(options.update_path, options.lora) as fleet:
            run = Run(options, fleet, store, MetricsLog(options.out), trainer, first)
            await run.start_engines()
            await run.until_shipped()
    _say(options, f"{options.out}: batches {first + 1} to {run.shipped} are shipped")
    return 0


class Run:
    """The state of a capture: what is in flight, what waits, what was shipped."""

    def __init__(
        self,
        options: CaptureOptions,
        fleet: Fleet,
        store: TraceStoreWriter,
        metrics: MetricsLog,
        trainer: ProcessPoolExecutor | None,
        first: int,
    ) -> None:
        self.options = options
        self.fleet = fleet
        self.store = store
        self.metrics = metrics
        self.trainer = trainer
        self.task = load_task(options.task, options.model)
        self.id = uuid.uuid4().hex
        self.first = first
        self.shipped = first
        self.ready = first
        """The policy that is served, once what is too old for it was dropped."""
        # Examples in order; a seed, or a run that goes on, begins with another one.
        self.next_index = random.Random(f"{options.seed}-{first}").randrange(1 << 20)
        self.group: Group | None = None
        self.groups: dict[str, Group] = {}
        self.whole: deque[Group] = deque()
        self.dropped = 0
        self.last_ship = time.time()

    @property
    def version(self) -> int:
        """The policy version that every engine serves."""
        assert self.fleet.policy is not None, "the boot policy comes before everything else"
        return self.fleet.policy.version

    async def start_engines(self) -> None:
        """Start or reach the engines; then load, label and confirm the boot policy on all."""
        options = self.options
        _say(options, "starting engines" if not options.engine_urls else "reaching engines")
        if options.engine_urls:
            await self.fleet.connect(options.engine_urls, options.router_url)
        else:
            logs = options.out / "logs"
            await self.fleet.start(
                options.model,
                options.engines,
                options.policies.resolve(),
                logs,
                options.engine_flags,
                options.router,
                options.seed,
            )
        boot = boot_policy(options, self.first)
        await self.fleet.update(boot)
        _say(
            options, f"v{boot.version} is loaded and labelled on {len(self.fleet.engines)} engines"
        )

    async def until_shipped(self) -> None:
        """Dispatch, update and ship until the last batch; then drop what is in flight."""
        self.last_ship = time.time()
        jobs: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._dispatch()),
            asyncio.create_task(self._follow_policies()),
            asyncio.create_task(self.fleet.watch()),
        ]
        shipping = asyncio.create_task(self._ship_batches())
        try:
            done, _ = await asyncio.wait([shipping, *jobs], return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            for group in self.groups.values():
                jobs += group.running
            for job in [shipping, *jobs]:
                job.cancel()
            await asyncio.gather(shipping, *jobs, return_exceptions=True)
            if self.options.engine_urls:
                with contextlib.suppress(Exception):
                    await self.fleet.resume()

    async def _dispatch(self) -> None:
        """Keep `concurrency` episodes in flight, but not more than two batches waiting."""
        options = self.options
        while True:
            running = {t: g for g in self.groups.values() for t in g.running}
            waiting = sum(len(group.arrived) for group in self.whole)
            if len(running) < options.concurrency and waiting < 2 * options.batch_size:
                self._dispatch_one()
                continue
            # Not for long: a batch that ships makes room without an episode having ended.
            if running:
                await asyncio.wait(
                    running, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            else:
                await asyncio.sleep(POLL_SECONDS)
            for task, group in running.items():
                # Not those of a group that was dropped meanwhile.
                if task.done() and task in group.running:
                    self._arrive(group, task.result())

    def _dispatch_one(self) -> None:
        group = self.group
        if group is None or group.dispatched == self.options.group_size:
            group = self.group = Group(uuid.uuid4().hex, self.next_index)
            self.groups[group.id] = group
            self.next_index += 1
        rollout = Rollout(
            index=group.index,
            group=group.id,
            dispatch_step=self.shipped + 1,
            policy_start=self.version,
        )
        task = asyncio.create_task(
            roll_out(
                rollout,
                self.task,
                self.fleet.generate,
                lambda: self.version,
                run_id=self.id,
                max_tokens=self.options.max_tokens,
                max_model_len=self.fleet.max_model_len,
            )
        )
        group.running[task] = rollout
        group.dispatched += 1

    def _arrive(self, group: Group, rollout: Rollout) -> None:
        """An episode is over: it goes to the stream, and its group may be whole now."""
        self.store.append(
            rollout.record,
            dispatch_step=rollout.dispatch_step,
            arrival_step=self.shipped + 1,
            dispatch_time=rollout.dispatch_time,
            arrival_time=time.time(),
        )
        group.running = {t: r for t, r in group.running.items() if r is not rollout}
        group.arrived.append(rollout)
        if len(group.arrived) == self.options.group_size and group.id in self.groups:
            del self.groups[group.id]
            self.whole.append(group)

    async def _follow_policies(self) -> None:
        """Load each policy that a batch made, as soon as it is whole on disk."""
        while True:
            newest = newest_policy(self.options.policies, self.shipped)
            if newest is not None and newest.version > self.ready:
                await self.fleet.update(newest)
                self._drop_old()
                self.ready = newest.version
            else:
                await asyncio.sleep(POLL_SECONDS)

    def _drop_old(self) -> None:
        """Give up groups that grew older than `max_off_policy_steps`, in flight or waiting."""
        limit = self.options.max_off_policy_steps
        if limit is None:
            return
        for group in [*self.groups.values(), *self.whole]:
            oldest = group.oldest()
            if oldest is None or self.version - oldest <= limit:
                continue
            self.groups.pop(group.id, None)
            self.dropped += group.dispatched
            for task in list(group.running):
                if task.done():
                    self._arrive(group, task.result())
                task.cancel()
            group.running.clear()
            if group in self.whole:
                self.whole.remove(group)
            if group is self.group:
                self.group = None

    async def _ship_batches(self) -> None:
        """Ship a batch whenever there are enough whole groups and the policy that it trains."""
        options = self.options
        groups_a_batch = options.batch_size // options.group_size
        bar = tqdm(
            total=options.steps,
            initial=self.shipped,
            unit="batch",
            file=sys.stderr,
            disable=options.quiet or not sys.stderr.isatty(),
        )
        with bar:
            while options.steps is None or self.shipped < options.steps:
                if len(self.whole) < groups_a_batch or self.ready < self.shipped:
                    bar.set_postfix_str(self._standing(), refresh=True)
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                batch = [self.whole.popleft() for _ in range(groups_a_batch)]
                await self._ship(self.shipped + 1, batch)
                bar.update()

    async def _ship(self, step: int, groups: list[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group.arrived]
        now = time.time()
        for group in groups:
            for rollout, advantage in zip(group.arrived, advantages(group), strict=True):
                self.store.annotate(
                    "orch",
                    rollout.trace_id,
                    {
                        "effective": True,
                        "ship": {"step": step, "time": now},
                        "advantage": advantage,
                    },
                    [{"index": 0, "advantages": _spread(rollout.nodes, advantage)}],
                )
        self.metrics.log(step, self._batch_metrics(step, rollouts, now))
        self.shipped = step
        self.last_ship, self.dropped = now, 0
        if self.trainer is not None:
            await self._train(step, groups)

    def _batch_metrics(self, step: int, rollouts: list[Rollout], now: float) -> Record:
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        sampled = [sum(map(sum, (n["mask"] for n in r.nodes))) for r in rollouts]
        return {
            **batch_metrics([rollout.record for rollout in rollouts], step=step),
            "off_policy/dropped": self.dropped,
            "reward/mean": fmean(rewards) if rewards else None,
            "tokens/sampled": sum(sampled),
            "time/step": now - self.last_ship,
        }

    async def _train(self, step: int, groups: list[Group]) -> None:
        from traceage.capture.trainer import Sample, train

        samples = [
            Sample(
                trace_id=rollout.trace_id,
                branch=0,
                token_ids=[token for node in rollout.nodes for token in node["token_ids"]],
                mask=[sampled for node in rollout.nodes for sampled in node["mask"]],
                logprobs=[x for node in rollout.nodes for x in node.get("logprobs", [])],
                advantage=advantage,
            )
            for group in groups
            for rollout, advantage in zip(group.arrived, advantages(group), strict=True)
        ]
        try:
            scored, metrics = await asyncio.get_running_loop().run_in_executor(
                self.trainer, train, step, samples
            )
        except BrokenProcessPool as error:
            raise CaptureError(f"the trainer's process ended while it trained {step}") from error
        for sample in scored:
            branch = {
                "index": sample.branch,
                "trainer_logprobs": sample.trainer_logprobs,
                "entropies": sample.entropies,
                "mismatch_kl": sample.mismatch_kl,
            }
            self.store.annotate("trainer", sample.trace_id, {}, [branch])
        self.metrics.log(step, metrics, producer="trainer")

    def _standing(self) -> str:
        running = sum(len(group.running) for group in self.groups.values())
        text = f"v{self.version}, {running} in flight, {len(self.whole)} groups waiting"
        if self.ready < self.shipped:
            text += f", waiting for step_{self.shipped}"
        return text


def _say(options: CaptureOptions, text: str) -> None:
    if not options.quiet:
        print(f"traceage: {text}", file=sys.stderr)


def advantages(group: Group) -> list[float]:
    """Each episode's reward above the mean of its group; 0 for an episode without a reward."""
    rewards = [rollout.reward for rollout in group.arrived if rollout.reward is not None]
    mean = fmean(rewards) if rewards else 0.0
    return [0.0 if rollout.reward is None else rollout.reward - mean for rollout in group.arrived]


def _spread(nodes: list[Record], advantage: float) -> list[float]:
    """A value a token of the branch: the advantage where it was sampled, 0 elsewhere."""
    return [advantage if sampled else 0.0 for node in nodes for sampled in node["mask"]]


def newest_policy(policies: Path, at_most: int) -> Policy | None:
    """The newest `step_<N>` that is marked `STABLE`, up to version `at_most`."""
    found = [
        Policy(int(marker.parent.name[5:]), marker.parent)
        for marker in policies.glob("step_*/STABLE")
        if marker.parent.name[5:].isdecimal()
    ]
    return max(
        (policy for policy in found if policy.version <= at_most),
        key=lambda policy: policy.version,
        default=None,
    )


def boot_policy(options: CaptureOptions, step: int) -> Policy:
    """The policy that a run starts with: `step_<N>`, or for v0 the model itself.

    Raises:
        CaptureError: it is not there.
    """
    directory = options.policies / f"step_{step}"
    if (directory / "STABLE").exists():
        return Policy(step, directory)
    if step == 0 and not options.lora:
        return Policy(0, options.model)
    raise CaptureError(
        f"{directory} is not there, or has no STABLE marker; a run "
        + (
            "that serves adapters starts from step_0"
            if step == 0
            else f"resumed at {step} needs it"
        )
    )


def shipped_steps(run: Path) -> int:
    """The last batch that a run shipped whole; 0 where there is none.

    A batch's row in the metrics log is written after the last of its annotations.
    """
    log = run / "monitors" / "file" / "metrics.jsonl"
    if not log.exists():
        return 0
    with log.open("rb") as lines:
        rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return max((row["step"] for row in rows if row["producer"] == "orch"), default=0)


def _check_resume(options: CaptureOptions) -> None:
    last = shipped_steps(options.out)
    if options.resume_step is None and (options.out / "run.json").exists():
        raise CaptureError(
            f"{options.out} holds a run already, shipped up to step {last}; go on with it by "
            "--resume-step, or write to another directory"
        )
    if options.resume_step is not None and options.resume_step > last:
        raise CaptureError(
            f"{options.out} was shipped up to step {last}: it cannot be resumed at step "
            f"{options.resume_step}"
        )


def take_back(run: Path, store: TraceStoreWriter, step: int) -> int:
    """Say of the traces that batches after `step` took that none did; how many they were.

    A run resumed at `step` trains those batches again, on other traces.
    """
    stored = TraceStore.at(str(run / "monitors" / "file" / "traces"))
    steps = stored.ship_steps if stored is not None else {}
    later = [trace_id for trace_id, shipped in steps.items() if shipped > step]
    for trace_id in later:
        store.annotate("orch", trace_id, {"effective": False}, [])
    return len(later)


def _check(options: CaptureOptions, first: int) -> None:
    if options.batch_size % options.group_size:
        raise CaptureError(
            f"a batch of {options.batch_size} episodes does not hold whole groups of "
            f"{options.group_size}"
        )
    if options.train and options.lora:
        raise CaptureError("the built-in trainer trains whole weights; leave out --train or --lora")
    if options.lora and options.update_path == "collective-rpc":
        raise CaptureError("adapters cannot be loaded through /collective_rpc; leave out --lora")
    if options.steps is not None and options.steps <= first:
        raise CaptureError(f"--steps {options.steps} is not after --resume-step {first}")
    if options.train:
        options.policies.mkdir(parents=True, exist_ok=True)
        if options.resume_step is None and any(options.policies.glob("step_*")):
            raise CaptureError(
                f"{options.policies} holds checkpoints already, and --train writes its own there; "
                "give another directory to --policies"
            )
    elif not options.policies.is_dir():
        raise CaptureError(f"{options.policies} is no directory; policies are step_<N> under it")
    if first or not options.train:
        boot_policy(options, first)


def _write_run_json(options: CaptureOptions) -> None:
    """What made this run: flags, seed, machine and the version of every package, a launch each."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "run.json"
    launches = json.loads(path.read_text())["launches"] if path.exists() else []
    launches.append(
        {
            "time": time.time(),
            "flags": {name: _plain(value) for name, value in vars(options).items()},
            "python": platform.python_version(),
            "platform": f"{platform.system()}-{platform.machine()}",
            "packages": {d.metadata["Name"]: d.version for d in distributions()},
        }
    )
    with replacing(path) as part:
        part.write_text(json.dumps({"launches": launches}, indent=1) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


@contextlib.contextmanager
def _trainer(options: CaptureOptions, step: int) -> Iterator[ProcessPoolExecutor]:
    """The trainer, in a process of its own; it has written the boot policy when this returns."""
    from traceage.capture.trainer import is_ready, start_trainer

    # Checkpoints of batches that are taken back are not to be loaded when their number comes up.
    for marker in options.policies.glob("step_*/STABLE"):
        if marker.parent.name[5:].isdecimal() and int(marker.parent.name[5:]) > step:
            marker.unlink()
    pool = ProcessPoolExecutor(
        max_workers=1,
        mp_context=get_context("spawn"),
        initializer=start_trainer,
        initargs=(options.model, options.policies, step, options.learning_rate, options.seed),
    )
    try:
        try:
            pool.submit(is_ready).result()
        except BrokenProcessPool as error:
            raise CaptureError("the trainer did not start; its error stands above") from error
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
