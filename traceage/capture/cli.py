"""`traceage capture` and `traceage capture probe`: their flags, and what they call."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Coroutine
from dataclasses import fields
from pathlib import Path
from typing import Any

from traceage.capture import UPDATE_PATHS


def add_parser(commands: Any) -> None:
    """Add `capture` to the subcommands of `traceage`; imports nothing that captures."""
    capture = commands.add_parser(
        "capture",
        help="run vLLM engines while the policy changes, and write fresh traces",
        description="Keep episodes in flight on vLLM engines, load and label every policy that a "
        "trainer writes, and ship batches to a prime-rl trace store. Flags of vLLM's own follow "
        "after --. `traceage capture probe` checks that an engine labels right.",
    )
    # Needed by both commands, and so required by hand.
    capture.add_argument("--model", type=Path, metavar="DIR", help="the model; it is policy v0")
    capture.add_argument(
        "--policies",
        type=Path,
        metavar="DIR",
        help="where a trainer writes step_<N>/ and then step_<N>/STABLE (default with --train: "
        "OUT/policies)",
    )
    capture.add_argument("--out", type=Path, metavar="RUN", help="the run directory to write")
    capture.add_argument(
        "--steps", type=int, metavar="N", help="stop after batch N (default: when interrupted)"
    )
    capture.add_argument(
        "--resume-step",
        type=int,
        metavar="N",
        help="go on with the run in RUN after batch N; later batches are taken back",
    )
    capture.add_argument("--seed", type=int, default=0, help="of prompts and sampling (default: 0)")
    capture.add_argument("--quiet", action="store_true", help="no progress on standard error")

    engines = capture.add_argument_group("engines")
    engines.add_argument(
        "--engines", type=int, default=1, metavar="N", help="how many to start (default: 1)"
    )
    engines.add_argument(
        "--engine-url",
        dest="engine_urls",
        action="append",
        default=[],
        metavar="URL",
        help="use an engine that runs already; may be given several times",
    )
    engines.add_argument(
        "--router", action="store_true", help="start vllm-router and generate through it"
    )
    engines.add_argument("--router-url", metavar="URL", help="generate through this router")
    engines.add_argument(
        "--update-path",
        choices=UPDATE_PATHS,
        default="update-weights",
        help="collective-rpc: reload through the engine's /collective_rpc and never label, as "
        "deployments behind Dynamo do; every token stays `default`",
    )
    engines.add_argument("--lora", action="store_true", help="policies are LoRA adapters")

    episodes = capture.add_argument_group("episodes and batches")
    episodes.add_argument(
        "--task",
        default="low-tokens",
        metavar="TASK",
        help="low-tokens, a .jsonl file of prompts, or package.module:attribute (default: "
        "low-tokens)",
    )
    episodes.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="episodes in flight (default: 32)"
    )
    episodes.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="episodes a batch (default: 16)"
    )
    episodes.add_argument(
        "--group-size",
        type=int,
        default=8,
        metavar="N",
        help="episodes of one example, whose mean reward is the baseline (default: 8)",
    )
    episodes.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="a completion (default: 128)"
    )
    episodes.add_argument(
        "--max-off-policy-steps",
        type=int,
        metavar="K",
        help="drop groups with an episode dispatched more than K policies ago (default: none)",
    )

    training = capture.add_argument_group("training")
    training.add_argument(
        "--train",
        action="store_true",
        help="train on the shipped batches with the built-in trainer, which writes the policies",
    )
    training.add_argument(
        "--learning-rate", type=float, default=3e-3, metavar="X", help="of Adam (default: 3e-3)"
    )
    capture.set_defaults(command=_capture, usage_error=capture.error)

    probes = capture.add_subparsers(metavar="")
    probe = probes.add_parser(
        "probe",
        help="check that an engine labels what it samples",
        description="Pause a generation half way, load new weights labelled 5, resume, and ask "
        "again; print both span lists and check them.",
    )
    probe.add_argument("--model", type=Path, metavar="DIR", required=True)
    probe.add_argument(
        "--tokens", type=int, default=4000, metavar="N", help="to generate (default: 4000)"
    )
    probe.add_argument(
        "--lora", action="store_true", help="the new weights are an adapter, labelled 7"
    )
    probe.add_argument("--quiet", action="store_true", help="no progress on standard error")
    probe.set_defaults(command=_probe, usage_error=probe.error)


def _capture(options: argparse.Namespace) -> int:
    missing = [f"--{name}" for name in ("model", "out") if getattr(options, name) is None]
    if options.policies is None and not options.train:
        missing.append("--policies")
    if missing:
        options.usage_error(f"the following arguments are required: {', '.join(missing)}")
    for name in ("engines", "concurrency", "batch_size", "group_size", "max_tokens"):
        if getattr(options, name) < 1:
            options.usage_error(f"--{name.replace('_', '-')} has to be at least 1")
    if options.engine_urls and options.router:
        options.usage_error("--router starts a router before engines that are started here")
    if options.router_url and not options.engine_urls:
        options.usage_error("--router-url needs the engines behind it: --engine-url, repeated")
    _check_installed(
        options,
        "aiohttp",
        *([] if options.engine_urls else ["vllm"]),
        *(["vllm_router"] if options.router else []),
        *(["torch", "transformers"] if options.train else []),
    )
    from traceage.capture.orchestrator import CaptureOptions, capture

    options.policies = options.policies or options.out / "policies"
    names = [field.name for field in fields(CaptureOptions)]
    run = CaptureOptions(**{name: getattr(options, name) for name in names})
    return _until_done(capture(run))


def _probe(options: argparse.Namespace) -> int:
    _check_installed(options, "aiohttp", "vllm")
    from traceage.capture.probe import probe

    return _until_done(
        probe(
            options.model,
            options.tokens,
            lora=options.lora,
            flags=options.engine_flags,
            quiet=options.quiet,
        )
    )


def _check_installed(options: argparse.Namespace, *modules: str) -> None:
    from importlib.util import find_spec

    if missing := [module for module in modules if find_spec(module) is None]:
        options.usage_error(
            f"{', '.join(missing)} cannot be imported: pip install 'traceage[capture]', or, "
            "without a GPU, scripts/install_capture_cpu"
        )


def _until_done(job: Coroutine[Any, Any, int]) -> int:
    """Run to the end; a request to stop, from Ctrl-C or SIGTERM, ends it in good order.

    What fails in the run has a message for the user, and 1 for an exit status.
    """
    import asyncio

    from traceage.capture.fleet import FleetError
    from traceage.capture.orchestrator import CaptureError

    async def stoppable() -> int:
        task = asyncio.ensure_future(job)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    try:
        return asyncio.run(stoppable())
    except (FleetError, CaptureError) as error:
        print(f"traceage: error: {error}", file=sys.stderr)
        return 1
