"""A model of a quarter of a megabyte, for capture without a GPU: it starts in seconds.

    python -m traceage.capture.tiny_model DIR

It is a Qwen3 with two layers and random weights, without a tokenizer; its last token id ends a
completion. `make_policies` and `make_adapters` write a random walk of its weights, in the layout in
which a trainer leaves checkpoints: `step_<N>/`, marked `STABLE` when it is whole.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

RANK = 8
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_tiny_model(directory: str | Path, *, vocab_size: int = 512, seed: int = 0) -> Path:
    """Write a tiny Qwen3 in bfloat16 and return its directory."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=vocab_size - 1,
    )
    path = Path(directory)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def make_policies(
    model_dir: Path, directory: Path, steps: Iterable[int], *, scale: float = 0.004, seed: int = 0
) -> None:
    """Write `step_<N>` for each of `steps`, each a random step of size `scale` from the one before.

    The first is the model itself.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model_dir / "model.safetensors")
    walk = {name: tensor.float() for name, tensor in weights.items()}
    for step in steps:
        target = directory / f"step_{step}"
        target.mkdir(parents=True)
        shutil.copy(model_dir / "config.json", target)
        policy = {name: walk[name].to(tensor.dtype) for name, tensor in weights.items()}
        save_file(policy, target / "model.safetensors", metadata={"format": "pt"})
        (target / "STABLE").touch()
        for tensor in walk.values():
            tensor += scale * torch.randn(tensor.shape, generator=generator)


def make_adapters(
    model_dir: Path, directory: Path, steps: Iterable[int], *, scale: float = 0.2, seed: int = 0
) -> None:
    """Write `step_<N>` for each of `steps`: LoRA adapters in PEFT's format with random weights."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model_dir / "model.safetensors")
    for step in steps:
        tensors = {}
        for name, tensor in weights.items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in MODULES:
                out_features, in_features = tensor.shape
                for side, shape in (("A", (RANK, in_features)), ("B", (out_features, RANK))):
                    tensors[f"base_model.model.{module}.lora_{side}.weight"] = scale * torch.randn(
                        shape, generator=generator
                    )
        target = directory / f"step_{step}"
        target.mkdir(parents=True)
        save_file(tensors, target / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(MODULES),
            "base_model_name_or_path": str(model_dir),
        }
        (target / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        (target / "STABLE").touch()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a tiny model."""
    parser = argparse.ArgumentParser(
        prog="python -m traceage.capture.tiny_model",
        description="Write a tiny Qwen3 with random weights.",
    )
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--vocab-size", type=int, default=512, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(make_tiny_model(options.directory, vocab_size=options.vocab_size, seed=options.seed))


if __name__ == "__main__":
    main()
