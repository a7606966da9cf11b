"""The model in the form that other engines read: a folder of config, tokenizer and float32 safetensors.

    python benchmarks/engines/reference_model.py FILE.gguf FOLDER

transformers reads the GGUF file and writes the folder. This is on purpose independent of what this project's engine
does with the file: its own form of the weights must not decide what the others are given.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def write_folder(gguf_file: Path, folder: Path) -> None:
    """Unpack ``gguf_file`` into ``folder``, which appears only when it is complete."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tokenizer.save_pretrained(unfinished)
    config = model.config
    config.architectures = [type(model).__name__]
    del config.quantization_config  # the weights are plain floats now
    config.save_pretrained(unfinished)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]  # the embedding once more
    save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
    unfinished.rename(folder)


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
