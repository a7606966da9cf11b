"""GGUF files as transformers reads them: a plain float32 folder, which knows nothing of how the engine keeps them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def expand_gguf(file: Path, folder: Path) -> Path:
    """Write GGUF file ``file``, widened by transformers, into ``folder``: config, tokenizer, float32 weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    vars(model.config).pop("quantization_config", None)  # some releases leave it: the weights are plain now
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tied = set(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
