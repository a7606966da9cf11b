"""GGUF files become a cached safetensors folder, once; their quantised matrices stay the blocks that they are."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.config import default_cache_root
from compiled_engine.errors import ModelError
from compiled_engine.models.gguf_tensors import GgufTensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CONVERTER_VERSION = 2
"""Raise it when the same GGUF file would give another folder: old folders are then left unused."""

WEIGHTS_FILE = "model.safetensors"

logger = logging.getLogger(__name__)


def convert_gguf(path: Path, cache_root: Path | None = None) -> Path:
    """The safetensors folder of GGUF file ``path``: config, tokenizer with chat template, weights.

    A quantised matrix whose ggml type is in ``gguf_blocks.BLOCK_FORMATS`` keeps its blocks (see ``safetensors_file``),
    unless transformers does more to it than move its rows; all else becomes float32.

    The folder lies under ``cache_root / "gguf"`` (``default_cache_root()`` when None), named by the file's content, so
    a file is converted once, wherever it lies. It is written beside its final place and renamed, so no half-written
    folder is ever visible, and several processes may race. Raises ``ModelError`` when the file cannot be converted.
    """
    _check_is_gguf(path)
    parent = (cache_root or default_cache_root()) / "gguf"
    folder = parent / f"{path.stem}-{_sha256(path)[:16]}-v{CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    _check_packages(path)
    logger.warning("converting %s once, into %s: this takes up to a minute", path, folder)
    start = time.monotonic()
    temporary = _make_temporary(parent, folder.name)
    try:
        _convert(path, temporary)
        _move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info("converted %s in %.0f s", path.name, time.monotonic() - start)
    return folder


def _check_is_gguf(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ModelError(f"cannot read GGUF file {path}: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}, not with b'GGUF'")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
        raise ModelError(f"{path} is one part of a split GGUF file: merge the parts first (llama-gguf-split --merge)")


def _check_packages(path: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f'converting {path.name} needs the package(s) {" and ".join(missing)}: pip install "compiled-engine[gguf]"'
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _make_temporary(parent: Path, name: str) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model under {parent}: {error.strerror or error}. "
            "Point COMPILED_ENGINE_CACHE to a writable folder"
        ) from error


def _convert(path: Path, folder: Path) -> None:
    _save_tokenizer(path, folder)
    try:
        tensors = GgufTensors(path)
        weights = tensors.plan()
    except Exception as error:  # as below; and these parts of transformers may change with any release
        reason = f"{type(error).__name__}: {error}"
        logger.warning("widening all of %s to float32: no conversion tensor by tensor (%s)", path.name, reason)
        _save_widened(path, folder)
    else:
        _save_config(tensors.model, folder)
        tensors.write(weights, folder / WEIGHTS_FILE)


def _save_tokenizer(path: Path, folder: Path) -> None:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # transformers and gguf raise many kinds on files they do not know
        raise _cannot_convert(path, error) from error
    tokenizer.save_pretrained(folder)


def _save_widened(path: Path, folder: Path) -> None:
    import torch
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        # Releases that have it may keep weights packed where they find a kernel; older ones always unpack.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
    except Exception as error:
        raise _cannot_convert(path, error) from error
    _save_config(model, folder)
    _save_weights(model, folder)


def _cannot_convert(path: Path, error: Exception) -> ModelError:
    return ModelError(f"transformers cannot convert GGUF file {path}: {type(error).__name__}: {error}")


def _save_config(model: PreTrainedModel, folder: Path) -> None:
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text("utf-8"))
    # With this entry every loader would look for the weights as GGUF stores them.
    config.pop("quantization_config", None)
    config["dtype"] = "float32"
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _save_weights(model: PreTrainedModel, folder: Path) -> None:
    # Not save_pretrained: it refuses a model that came from a quantized file.
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            raise ModelError(f"weight {name!r} stayed packed ({tensor.dtype}): this GGUF file cannot be converted")
        if tensor.data_ptr() not in seen:  # a tied head is the embedding once more
            seen.add(tensor.data_ptr())
            weights[name] = tensor.contiguous()
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _move_into_place(temporary: Path, folder: Path) -> None:
    temporary.chmod(0o755)  # mkdtemp and save_file make them private to the owner; a cache may be shared
    (temporary / WEIGHTS_FILE).chmod(0o644)
    try:
        temporary.rename(folder)
    except OSError:
        # Another process was faster: a folder that exists is complete, and the same by content.
        if not folder.is_dir():
            raise
