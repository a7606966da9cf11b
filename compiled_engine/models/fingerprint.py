"""What a model contributes to the key of its compiled graphs, found without importing transformers.

Config, shapes and the definition's source decide what graph a model becomes; the values of its weights do not, and are
never read here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from compiled_engine.errors import ModelError
from compiled_engine.models.checkpoint import Checkpoint
from compiled_engine.models.locate import ModelFiles

CONFIG_OPT_OUT: Mapping[str, str] = {
    "_name_or_path": "where the model came from",
    "transformers_version": "who wrote the file; the version that reads it enters as model.transformers",
}
"""Entries of config.json that cannot change a graph, each with the reason. All others enter the key."""

# What every definition is built from: modules, masks, attention, rotary tables, and how config and weights are read.
_SHARED_SOURCES = (
    "activations.py",
    "cache_utils.py",
    "configuration_utils.py",
    "conversion_mapping.py",
    "core_model_loading.py",
    "initialization.py",
    "masking_utils.py",
    "modeling_layers.py",
    "modeling_outputs.py",
    "modeling_rope_utils.py",
    "modeling_utils.py",
    "monkey_patching.py",
    "pytorch_utils.py",
    "distributed/mixin.py",
    "integrations/heterogeneity/configuration_utils.py",
    "integrations/heterogeneity/modeling_utils.py",
    "integrations/hub_kernels.py",
    "integrations/sdpa_attention.py",
    "models/auto/auto_factory.py",
    "models/auto/auto_mappings.py",
    "models/auto/configuration_auto.py",
    "models/auto/modeling_auto.py",
    "utils/generic.py",
    "utils/output_capturing.py",
)
_OTHER_MODEL = re.compile(r"^\s*from \.\.(?:\.models\.)?(\w+)[.\w]* import", re.MULTILINE)


def model_components(files: ModelFiles) -> dict[str, str]:
    """Named components of the key that come from the model in ``files``, all as text.

    ``model.config.*``: every entry of config.json but ``CONFIG_OPT_OUT``, as JSON. ``model.weights``: hash of names,
    shapes and dtypes of the checkpoint. ``model.transformers``: its version. ``model.definition`` and
    ``model.transformers_sources``: hashes of the files that define this model and of those that all models use.
    Raises ``ModelError`` for an unreadable config.json, ``WeightsError`` for a damaged checkpoint.
    """
    config = read_config(files.folder)
    components = {
        f"model.config.{name}": json.dumps(value, sort_keys=True)
        for name, value in config.items()
        if name not in CONFIG_OPT_OUT
    }
    components["model.weights"] = _headers_hash(files)
    components |= _transformers_components(str(config.get("model_type")))
    return dict(sorted(components.items()))


def read_config(folder: Path) -> dict[str, object]:
    """The entries of config.json in ``folder``. Raises ``ModelError`` when it holds no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as a JSON object: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} cannot be read as a JSON object: it holds a {type(config).__name__}")
    return config


def _headers_hash(files: ModelFiles) -> str:
    with Checkpoint(files) as checkpoint:
        rows = sorted((info.name, info.dtype_name, info.shape) for info in checkpoint.values())
    return hashlib.sha256(repr(rows).encode("utf-8", "surrogatepass")).hexdigest()


def _transformers_components(model_type: str) -> dict[str, str]:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return {"model.transformers": "not installed"}
    root = Path(spec.origin).parent
    return {
        "model.transformers": importlib.metadata.version("transformers"),
        "model.transformers_sources": _files_hash(root, (root / name for name in _SHARED_SOURCES)),
        "model.definition": _files_hash(root, _definition_files(root / "models", model_type)),
    }


def _files_hash(root: Path, paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        # Other releases lack some of them.
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "absent"
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _definition_files(models: Path, model_type: str) -> set[Path]:
    """Modeling and configuration files of ``model_type``, and of the models that they import from."""
    found: set[Path] = set()
    folders = [folder for folder in (_definition_folder(models, model_type),) if folder is not None]
    if not any(_modeling_files(folder) for folder in folders):
        folders += _folders_of_same_class(models, model_type)
    seen = set(folders)
    while folders:
        for path in _sources(folders.pop()):
            found.add(path)
            for name in _OTHER_MODEL.findall(path.read_text("utf-8", "replace")):
                other = models / name
                if name != "auto" and other not in seen and other.is_dir():
                    seen.add(other)
                    folders.append(other)
    return found


def _folders_of_same_class(models: Path, model_type: str) -> list[Path]:
    """For a model type without a modeling file of its own: folders of those that are built from the same classes."""
    try:
        text = (models / "auto" / "modeling_auto.py").read_text("utf-8", "replace")
    except FileNotFoundError:
        return []
    pairs = re.findall(r"\(\"([\w-]+)\", \"(\w+)\"\)", text)
    classes = {name for kind, name in pairs if kind == model_type}
    kinds = {kind for kind, name in pairs if name in classes and kind != model_type}
    folders = [models / kind.replace("-", "_") for kind in sorted(kinds)]
    return [folder for folder in folders if _modeling_files(folder)]


def _modeling_files(folder: Path) -> list[Path]:
    return list(folder.glob("modeling_*.py"))


def _sources(folder: Path) -> list[Path]:
    return [*folder.glob("configuration_*.py"), *_modeling_files(folder)]


def _definition_folder(models: Path, model_type: str) -> Path | None:
    """The folder whose configuration declares ``model_type``; folders of a like name first, for they mostly do."""
    name = re.sub(r"\W", "_", model_type)
    parts = name.split("_")
    likely = [models / "_".join(parts[:count]) for count in range(len(parts), 0, -1)]
    declares = re.compile(rf"^    model_type(?:: [^=\n]+)? = [\"']{re.escape(model_type)}[\"']", re.MULTILINE)
    for folder in (*likely, *sorted(models.iterdir())):
        for path in sorted(folder.glob("configuration_*.py")):
            if declares.search(path.read_text("utf-8", "replace")):
                return folder
    # Some declare none, and go by their folder.
    return likely[0] if likely[0].is_dir() else None
