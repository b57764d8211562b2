"""The engine's routes: an update loads and then labels, and an error leaves all as it was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import KEY, SEQUENCE, Engine, Policies


def update(engine: Engine, directory: Path, version: Any) -> tuple[int, Any]:
    return engine.call("/update_weights", {"weight_dir": str(directory), "weight_version": version})


def adapter(engine: Engine, directory: Path, version: Any) -> tuple[int, Any]:
    query = "" if version is None else f"?weight_version={version}"
    body = {"lora_name": "policy", "lora_path": str(directory)}
    return engine.call(f"/load_lora_adapter{query}", body)


def assert_serves(engine: Engine, label: str, logprobs: list[float]) -> None:
    """It says the label, samples under it, and has the weights it had."""
    assert engine.label() == label
    assert engine.generate(4)["weight_versions"] == [{"version": label, "start": 0, "end": 4}]
    assert engine.logprobs() == pytest.approx(logprobs, abs=1e-6)
    assert engine.call("/weight_info")[1]["paused"] is False


def test_an_update_loads_and_then_labels(engines: tuple[Engine, Engine], tiny: Policies) -> None:
    engine = engines[0]
    seen = []
    for version in (3, 4):
        assert update(engine, tiny.policies / f"step_{version}", str(version))[0] == 200
        seen.append(engine.logprobs())
        assert_serves(engine, str(version), seen[-1])
    assert seen[0] != pytest.approx(seen[1], abs=1e-3)
    assert update(engine, tiny.policies / "step_3", 3)[0] == 200  # an integer is a label too
    assert_serves(engine, "3", seen[0])


def test_what_is_served_is_the_checkpoint(engines: tuple[Engine, Engine], tiny: Policies) -> None:
    """Every tensor of it: against a forward pass of its own, the output head written out or not."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = tiny.model.parent / "served"
    for seed, parts in ((1, ["without"]), (2, ["with"]), (3, ["without", "again"]), (4, ["two"])):
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: (
                tensor.float() + 0.02 * torch.randn(tensor.shape, generator=generator)
            ).bfloat16()
            for name, tensor in load_file(tiny.model / "model.safetensors").items()
        }
        for part in parts:
            policy = folder / f"{part}-{seed}"
            policy.mkdir(parents=True)
            shutil.copy(tiny.model / "config.json", policy)
            head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
            if part == "two":
                names = sorted(weights)
                files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
                for file, held in files.items():
                    save_file({n: weights[n] for n in held}, policy / file)
                where = {name: file for file, held in files.items() for name in held}
                (policy / "model.safetensors.index.json").write_text(
                    json.dumps({"metadata": {}, "weight_map": where})
                )
            else:
                whole = weights | (head if part == "with" else {})
                save_file(whole, policy / "model.safetensors", metadata={"format": "pt"})
            assert update(engines[0], policy, seed)[0] == 200
            model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
            ids = torch.tensor(SEQUENCE)
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
            expected = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
            assert engines[0].logprobs() == pytest.approx(expected, abs=0.02), policy.name
    shutil.rmtree(folder)


def broken_policies(tiny: Policies, folder: Path) -> dict[str, Path]:
    """Checkpoints under the policies root that must not be loaded."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny.policies / "step_5" / "model.safetensors")

    def write(name: str, changed: dict[str, torch.Tensor]) -> Path:
        path = folder / name
        shutil.copytree(tiny.policies / "step_5", path)
        save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
        return path

    name = "model.layers.0.mlp.up_proj.weight"
    wrong = write("wrong-shape", tensors | {name: tensors[name][:-1].contiguous()})
    lacking = write("lacking", {key: t for key, t in tensors.items() if key != name})
    unknown = write("unknown", tensors | {"model.layers.1.mlp.nonsense.weight": torch.zeros(2)})
    torn = write("torn", tensors)
    whole = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    empty = folder / "empty"
    empty.mkdir()
    # Passes every check of the headers and fails in the worker: its index names a missing file.
    lost = write("lost", tensors)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-1-of-1.safetensors")}
    (lost / "model.safetensors.index.json").write_text(json.dumps(index))
    return {
        "shape": wrong,
        "lacks": lacking,
        "unlike the model": unknown,
        "cannot be read": torn,
        "holds no": empty,
        "load failed": lost,
    }


def test_an_update_that_fails_leaves_all_as_it_was(
    engines: tuple[Engine, Engine], tiny: Policies
) -> None:
    engine = engines[0]
    assert update(engine, tiny.policies / "step_2", "2")[0] == 200
    before = engine.logprobs()
    folder = tiny.model.parent / "broken"
    folder.mkdir()
    policy = tiny.policies / "step_3"
    missing: list[Any] = [None, "", " ", True, 1.5]
    for version in missing:
        status, answer = update(engine, policy, version)
        assert (status, "weight_version" in answer["error"]) == (422, True), version
        assert_serves(engine, "2", before)
    for body in ([1], {"weight_version": "3"}, {"weight_dir": 3, "weight_version": "3"}):
        assert engine.call("/update_weights", body)[0] == 422
    assert update(engine, tiny.policies / "step_99", "3")[0] == 404
    assert update(engine, Path("/"), "3")[0] == 403
    assert update(engine, tiny.policies / ".." / ".." / "..", "3")[0] == 403
    assert_serves(engine, "2", before)
    for word, directory in broken_policies(tiny, folder).items():
        status, answer = update(engine, directory, "3")
        assert status == (500 if word == "load failed" else 400), answer
        assert word in answer["error"]
        assert_serves(engine, "2", before)
    shutil.rmtree(folder)


def test_an_adapter_loads_and_then_labels(engines: tuple[Engine, Engine], tiny: Policies) -> None:
    engine = engines[1]
    assert update(engine, tiny.policies / "step_0", "0")[0] == 200
    seen = []
    for version in (6, 7):
        assert adapter(engine, tiny.adapters / f"step_{version}", version)[0] == 200
        seen.append(engine.logprobs("policy"))
        for _ in range(2):  # a load in place that stuck would be seen in the second request
            span = {"version": str(version), "start": 0, "end": 4}
            assert engine.generate(4, "policy")["weight_versions"] == [span]
    assert seen[0] != pytest.approx(seen[1], abs=1e-3)

    # Files that are gone are not missed: nothing reads them again.
    gone = tiny.adapters / "gone"
    shutil.copytree(tiny.adapters / "step_6", gone)
    assert adapter(engine, gone, "8")[0] == 200
    shutil.rmtree(gone)
    assert engine.logprobs("policy") == pytest.approx(seen[0], abs=1e-6)
    assert adapter(engine, tiny.adapters / "step_7", "7")[0] == 200

    config_only = tiny.adapters / "config-only"
    config_only.mkdir()
    shutil.copy(tiny.adapters / "step_6" / "adapter_config.json", config_only)
    cases: list[tuple[Path, str | None, int]] = [
        (tiny.adapters / "step_6", None, 422),
        (tiny.adapters / "nowhere", "9", 404),
        (Path("/"), "9", 403),
        (tiny.policies / "step_1", "9", 400),
        (config_only, "9", 400),
        (wrong_adapter(tiny), "9", 400),
        (unknown_adapter(tiny), "9", 500),
    ]
    for directory, label, expected in cases:
        status, answer = adapter(engine, directory, label)
        assert status == expected, answer
        assert engine.label() == "7"
        assert engine.logprobs("policy") == pytest.approx(seen[1], abs=1e-6)
        span = {"version": "7", "start": 0, "end": 4}
        assert engine.generate(4, "policy")["weight_versions"] == [span]


def wrong_adapter(tiny: Policies) -> Path:
    """An adapter whose matrices do not fit the model's."""
    from safetensors.torch import load_file, save_file

    path = tiny.adapters / "wrong"
    shutil.copytree(tiny.adapters / "step_6", path)
    file = path / "adapter_model.safetensors"
    save_file({k: t[:, :-1].contiguous() for k, t in load_file(file).items()}, file)
    return path


def unknown_adapter(tiny: Policies) -> Path:
    """An adapter for a module that the model does not have."""
    from safetensors.torch import load_file, save_file

    path = tiny.adapters / "unknown"
    shutil.copytree(tiny.adapters / "step_6", path)
    file = path / "adapter_model.safetensors"
    save_file({k.replace("q_proj", "x_proj"): t for k, t in load_file(file).items()}, file)
    return path


def test_pause_keeps_requests(engines: tuple[Engine, Engine], tiny: Policies) -> None:
    engine = engines[0]
    assert engine.call("/pause?mode=abort", {})[0] == 422
    assert engine.call("/pause", {}) == (200, {"paused": True})
    assert engine.call("/weight_info")[1]["paused"] is True
    # An update while paused leaves it paused: whoever paused it resumes it.
    assert update(engine, tiny.policies / "step_1", "1")[0] == 200
    assert engine.call("/weight_info")[1]["paused"] is True
    assert engine.call("/resume", {}) == (200, {"paused": False})
    assert engine.generate(3)["weight_versions"] == [{"version": "1", "start": 0, "end": 3}]


def test_routes_that_run_code_are_not_there(engines: tuple[Engine, Engine]) -> None:
    for path in (
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/update_weight_version",
        "/finish_weight_update",
        "/sleep",
        "/reset_prefix_cache",
    ):
        assert engines[0].call(path, {})[0] in (404, 405), path


def test_other_hosts_need_a_key(tiny: Policies) -> None:
    command = [sys.executable, "-m", "traceage.capture.engine", "--model", str(tiny.model)]
    refused = subprocess.run(
        [*command, "--host", "0.0.0.0"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "--api-key" in refused.stderr


def test_a_key_is_asked_for_everywhere(keyed_engine: Engine) -> None:
    for path in ("/weight_info", "/v1/models", "/metrics"):
        assert keyed_engine.call(path)[0] == 401, path
    for path in ("/collective_rpc", "/pause", "/inference/v1/generate", "/invocations"):
        assert keyed_engine.call(path, {})[0] == 401, path
    assert keyed_engine.call("/weight_info", key="wrong")[0] == 401
    assert keyed_engine.call("/weight_info", key=KEY)[1]["weight_version"] == "default"


def test_collective_rpc_reloads_weights_and_nothing_else(
    keyed_engine: Engine, tiny: Policies
) -> None:
    def call(method: str, **kwargs: Any) -> int:
        body = {"method": method, "kwargs": kwargs}
        return keyed_engine.call("/collective_rpc", body, key=KEY)[0]

    assert call("load_model") == 403
    assert call("reload_weights") == 422
    assert call("reload_weights", weights_path="/") == 403
    assert call("reload_weights", weights_path=str(tiny.policies / "step_99")) == 404
    assert call("reload_weights", weights_path=str(tiny.policies / "step_1")) == 200
    info = keyed_engine.call("/weight_info", key=KEY)[1]
    assert info["weight_version"] == "default"
    assert info["weight_dir"] == str(tiny.policies / "step_1")
    for path in ("/update_weights", "/load_lora_adapter"):
        assert keyed_engine.call(path, {}, key=KEY)[0] == 404
