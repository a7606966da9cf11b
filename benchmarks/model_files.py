"""The model to measure, in the forms that the engines read, and what the driver must know of it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache" / "benchmarks"
FIND = """
import sys
from compiled_engine.models import find_model
files = find_model(*sys.argv[1:])
print(files.source, files.folder, sep="\\n")
"""


@dataclass(frozen=True)
class ModelFiles:
    """folder: float32 safetensors, config and tokenizer. gguf_file: what the folder was made from, or None."""

    folder: Path
    gguf_file: Path | None

    def token_floats(self) -> int | None:
        """Numbers that one token adds to the KV cache; None for a config that does not say it in the usual words."""
        config = json.loads((self.folder / "config.json").read_text())
        try:
            layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
            kv_heads = config.get("num_key_value_heads") or heads
            head_dim = config.get("head_dim") or config["hidden_size"] // heads
        except KeyError:
            return None
        return int(2 * layers * kv_heads * head_dim)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def find_model_files(model: str | None) -> ModelFiles:
    """Files of a folder, a GGUF file, a hub id, or (None) the default model. Exits if there are none.

    Found and unpacked in processes of their own: the memory that this takes must not stay with the driver.
    """
    source, folder = _run([sys.executable, "-c", FIND, *([model] if model else [])]).splitlines()[-2:]
    gguf_file = Path(source).expanduser().resolve()
    if gguf_file.suffix != ".gguf":
        return ModelFiles(Path(folder), None)
    unpacked = CACHE / f"{gguf_file.stem}-{_sha256(gguf_file)[:16]}"
    if not unpacked.is_dir():
        _run([sys.executable, str(HERE / "engines" / "reference_model.py"), str(gguf_file), str(unpacked)])
    return ModelFiles(unpacked, gguf_file)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _run(command: list[str]) -> str:
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode:
        sys.exit("the model was not found or could not be unpacked: see the message above")
    return finished.stdout
