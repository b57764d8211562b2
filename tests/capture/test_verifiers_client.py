"""verifiers' own train client, with its renderer, generates against an engine of ours.

Its traces carry the engine's spans, from a completion whose policy changed half way.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, Policies

import traceage as ta

configs = pytest.importorskip("verifiers.v1.configs.client")
TEMPLATE = (
    "{% for message in messages %}<|turn|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|turn|> {% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of the tiny model: a word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{k}": k for k in range(508)}
    special = {"<|unk|>": 508, "<|turn|>": 509, "<|pad|>": 510, "<|end|>": 511}
    tokenizer = Tokenizer(models.WordLevel(words | special, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|turn|>"],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


async def roll_out(engine: Engine, tiny: Policies, tokenizer: Path) -> tuple[Any, list[Any]]:
    """A trace of two turns; new weights while the first is sampled. And the responses."""
    from renderers.configs import DefaultRendererConfig
    from verifiers.v1 import graph, types
    from verifiers.v1 import trace as traces
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.configs.sampling import SamplingConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.task import WireTaskData

    client = TrainClient(
        configs.TrainClientConfig(
            base_url=f"{engine.url}/v1",
            api_key_var="NO_KEY_IS_NEEDED",
            renderer=DefaultRendererConfig(),
            renderer_model_name=str(tokenizer),
        )
    )
    trace = traces.WireTrace(
        task=traces.TraceTask(type="T", data=WireTaskData(idx=0)),
        agent=traces.AgentInfo(config=WireAgentConfig(), name="agent", trainable=True),
    )
    model = engine.call("/v1/models")[1]["data"][0]["id"]
    prompt: list[Any] = [types.UserMessage(content="t1 t2 t3 t4")]
    responses: list[Any] = []
    for tokens in (1500, 20):
        turn = graph.prepare_turn(trace, prompt)
        sampling = SamplingConfig(temperature=1.0, max_tokens=tokens, min_tokens=tokens)
        asked = asyncio.create_task(
            client.get_response(ChatDialect(), {"model": model}, sampling, turn=turn)
        )
        if not responses:
            before = await asyncio.to_thread(engine.sampled)
            while await asyncio.to_thread(engine.sampled) - before < 300 and not asked.done():
                await asyncio.sleep(0.05)
            body = {"weight_dir": str(tiny.policies / "step_6"), "weight_version": "6"}
            status, answer = await asyncio.to_thread(engine.call, "/update_weights", body)
            assert status == 200, answer
        response = await asked
        turn.commit(response)
        responses.append(response)
        prompt += [response.message, types.UserMessage(content="t7 t8")]
    await client.close()
    return trace, responses


def test_its_traces_carry_the_spans(
    engines: tuple[Engine, Engine], tiny: Policies, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    engine = engines[0]
    body = {"weight_dir": str(tiny.policies / "step_5"), "weight_version": "5"}
    assert engine.call("/update_weights", body)[0] == 200
    trace, responses = asyncio.run(roll_out(engine, tiny, tmp_path / "tokenizer"))
    first, second = (
        [span.model_dump() for span in response.tokens.weight_versions] for response in responses
    )
    assert [span["version"] for span in first] == ["5", "6"]
    cut = first[0]["end"]
    assert first == [
        {"version": "5", "start": 0, "end": cut},
        {"version": "6", "start": cut, "end": 1500},
    ]
    assert second == [{"version": "6", "start": 0, "end": 20}]

    record = json.loads(json.dumps(trace.to_record()))
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps(record) + "\n")
    spans = ta.scan_spans(file, step=8, quiet=True).collect()
    assert spans.select("start", "end", "version").rows() == [
        (0, cut, 5),
        (cut, 1500, 6),
        (0, 20, 6),
    ]
    ages = ta.token_policy_ages(trace, training_version=7)
    assert ages.tolist() == [2] * cut + [1] * (1500 - cut) + [1] * 20
