"""One question to a real engine: do its labels change exactly where its weights do?

A long generation is paused half way, other weights are loaded under a new label, and it goes on; a
second, short request follows. The spans of the first have to tile its output, from the boot label
to the new one; the second has to carry the new label alone; and the logprobs of one fixed sequence,
scored before and after, have to differ by more than an engine differs from itself, or the label
would have changed without the weights.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traceage.capture.fleet import ADAPTER, Fleet, FleetError, Policy, Server
from traceage.capture.tasks import vocabulary_size

Span = dict[str, Any]
SECOND = 8
"""How many tokens the second request asks for."""


async def probe(
    model: Path, tokens: int, *, lora: bool = False, flags: Sequence[str] = (), quiet: bool = False
) -> int:
    """Run the probe on an engine of its own; prints what it saw, returns 0 if every check held.

    Raises:
        FleetError: the engine did not start, refused the update, or died.
    """
    with tempfile.TemporaryDirectory(prefix="traceage-probe-") as scratch:
        policies = Path(scratch)
        async with Fleet(lora=lora) as fleet:
            if not quiet:
                print("traceage: starting an engine", file=sys.stderr)
            flags = ["--max-model-len", str(tokens + 64), *flags]
            await fleet.start(model, 1, policies, policies / "logs", flags)
            if lora:
                from traceage.capture.tiny_model import make_adapters

                boot, new = (Policy(v, policies / f"step_{v}") for v in (0, 7))
                make_adapters(model, policies, range(1))
                make_adapters(model, policies, range(7, 8), seed=1)
                await fleet.update(boot)  # an adapter has to be there to be asked for
            else:
                new = Policy(5, policies / "step_5")
                change_weights(model, new.directory)
            if not quiet:
                print(f"traceage: generating {tokens:,} tokens", file=sys.stderr)
            return await _probe(fleet, model, new, tokens)


async def _probe(fleet: Fleet, model: Path, new: Policy, tokens: int) -> int:
    engine = fleet.engines[0]
    info = await fleet.call("GET", engine, "/weight_info")
    boot_label = info["weight_version"]
    vocabulary = vocabulary_size(model)
    prompt = [(7 * k + 3) % min(vocabulary, 500) for k in range(32)]
    await _complete(fleet, engine, prompt, 16)  # the first request warms the engine up
    before = await _score(fleet, engine, prompt)
    noise = _difference(before, await _score(fleet, engine, prompt))

    request = asyncio.create_task(_complete(fleet, engine, prompt, tokens))
    begin = await _generated(fleet, engine)
    while not request.done() and await _generated(fleet, engine) - begin < tokens // 3:
        await asyncio.sleep(0.05)
    await fleet.update(new)
    sampled, first = await request
    second_tokens, second = await _complete(fleet, engine, prompt, SECOND)
    after = await _score(fleet, engine, prompt)

    label = str(new.version)
    checks = {
        f"the first request sampled {tokens} tokens": sampled == tokens,
        "its spans tile its output": tiles(first, sampled),
        f"its first label is the boot label, {boot_label}": bool(first)
        and first[0]["version"] == boot_label,
        f"its last label is {label}": bool(first) and first[-1]["version"] == label,
        f"the second request is wholly {label}": tiles(second, second_tokens)
        and {span["version"] for span in second} == {label},
        "the weights changed (logprobs of a fixed sequence)": _difference(before, after)
        > max(1e-3, 2 * noise),
    }
    version = (await fleet.call("GET", engine, "/version"))["version"]
    print(f"device: {device()}")
    print(f"model: {model}")
    print(f"vllm: {version}")
    print(f"first request: {_show(first)}")
    print(f"second request: {_show(second)}")
    mean = [sum(values) / len(values) for values in (before, after)]
    print(f"mean logprob of a fixed sequence: {mean[0]:.4f} before, {mean[1]:.4f} after")
    for what, held in checks.items():
        print(f"{'ok' if held else 'FAILED'}: {what}")
    return 0 if all(checks.values()) else 1


def _difference(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def tiles(spans: Sequence[Span], tokens: int) -> bool:
    """Whether spans stand one after the other from 0 to the last token.

    >>> tiles([{"version": "0", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": 8}], 8)
    True
    >>> tiles([{"version": "0", "start": 1, "end": 8}], 8)
    False
    """
    edge = 0
    for span in spans:
        if span["start"] != edge or span["end"] <= edge:
            return False
        edge = span["end"]
    return edge == tokens


def change_weights(model: Path, directory: Path, factor: float = 1.1) -> None:
    """Write a checkpoint that differs from `model` in every vector (its norms), by a factor."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        for tensor in tensors.values():
            if tensor.ndim == 1:
                tensor *= factor
        save_file(tensors, directory / file.name, metadata={"format": "pt"})


def device() -> str:
    """What the engines of this machine run on."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"


def _request(fleet: Fleet, prompt: list[int], **sampling: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"token_ids": prompt}
    body["sampling_params"] = {"temperature": 1.0, "detokenize": False, **sampling}
    if fleet.lora:
        body["model"] = ADAPTER
    return body


async def _complete(
    fleet: Fleet, engine: Server, prompt: list[int], tokens: int
) -> tuple[int, list[Span]]:
    body = _request(fleet, prompt, max_tokens=tokens, ignore_eos=True)
    answer = await fleet.call("POST", engine, "/inference/v1/generate", body)
    choice = answer["choices"][0]
    return len(choice["token_ids"]), choice["weight_versions"] or []


async def _score(fleet: Fleet, engine: Server, prompt: list[int]) -> list[float]:
    """The engine's logprob of each token of a sequence but the first."""
    body = _request(fleet, prompt, max_tokens=1, prompt_logprobs=0)
    answer = await fleet.call("POST", engine, "/inference/v1/generate", body)
    return [
        float(choices[str(token)]["logprob"])
        for token, choices in zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True)
    ]


async def _generated(fleet: Fleet, engine: Server) -> float:
    """How many tokens the engine has sampled so far, as its metrics say."""
    async with fleet.session.get(f"{engine.url}/metrics") as answer:
        text = await answer.text()
    counts = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
    if not counts:
        raise FleetError(f"{engine.name} has no vllm:generation_tokens_total among its metrics")
    return sum(map(float, counts))


def _show(spans: Sequence[Span]) -> str:
    return ", ".join(f"{span['version']} {span['start']}-{span['end']}" for span in spans) or "none"
