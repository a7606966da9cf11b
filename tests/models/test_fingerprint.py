"""What of a model enters the key of its graphs: its config, its shapes and its definition's source; not its weights."""

from __future__ import annotations

import inspect
import json
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.errors import ModelError, WeightsError
from compiled_engine.models import find_model, fingerprint
from compiled_engine.models.fingerprint import CONFIG_OPT_OUT, model_components
from tiny_models import (
    ARCHITECTURES,
    add_weight,
    drop_weight,
    edit_config,
    edit_weights,
    reshape_weight,
    write_tiny_model,
)

NAMES = sorted(set(ARCHITECTURES) - {"llama_tied"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(root / name, name) for name in NAMES}


@pytest.fixture
def llama(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["llama"], tmp_path / "llama"))


def components(folder: Path) -> dict[str, str]:
    return model_components(find_model(str(folder)))


def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def other_value(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, value[-1] if value else 1]
    if isinstance(value, dict):
        return {**value, "another": 1}
    return "something"


@pytest.mark.parametrize("architecture", NAMES)
def test_every_entry_of_the_config_enters_unless_opted_out(folders: dict[str, Path], architecture: str) -> None:
    folder, before = folders[architecture], components(folders[architecture])
    text = (folder / "config.json").read_text()
    config = json.loads(text)
    assert len(config) > 15
    try:
        for name, value in {**config, "_name_or_path": "somewhere", "a_new_field": 1}.items():
            (folder / "config.json").write_text(json.dumps({**config, name: other_value(value)}))
            found = changed(before, components(folder))
            expected = set() if name in CONFIG_OPT_OUT else {f"model.config.{name}"}
            # Another model type is another definition.
            assert found - {"model.definition"} == expected
            assert ("model.definition" in found) == (name == "model_type")
        for name in config:
            (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key != name}))
            assert bool(changed(before, components(folder))) == (name not in CONFIG_OPT_OUT)
    finally:
        (folder / "config.json").write_text(text)


def test_opt_outs_have_reasons() -> None:
    assert all(len(reason) > 10 for reason in CONFIG_OPT_OUT.values())


def test_layout_and_order_of_the_config_do_not_matter(llama: Path) -> None:
    before = components(llama)
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert components(llama) == before


@pytest.mark.parametrize("edit", [add_weight, drop_weight, reshape_weight])
def test_names_and_shapes_of_weights_enter(llama: Path, edit: Any) -> None:
    before = components(llama)
    edit(llama, "model.norm.weight" if edit is not add_weight else "more")
    assert changed(before, components(llama)) == {"model.weights"}


def test_dtypes_of_weights_enter(llama: Path) -> None:
    before = components(llama)
    edit_weights(llama, lambda weights: {**weights, "lm_head.weight": weights["lm_head.weight"].to(torch.bfloat16)})
    assert changed(before, components(llama)) == {"model.weights"}


def test_values_of_weights_do_not(llama: Path) -> None:
    before = components(llama)
    edit_weights(llama, lambda weights: {name: torch.rand_like(weight) for name, weight in weights.items()})
    assert components(llama) == before


def test_where_the_model_lies_and_how_it_is_sharded_do_not(folders: dict[str, Path], tmp_path: Path) -> None:
    before = components(folders["llama"])
    sharded = write_tiny_model(tmp_path / "elsewhere", "llama", max_shard_size="20KB")
    assert len(find_model(str(sharded)).weight_files) > 1
    assert components(sharded) == before
    (sharded / "generation_config.json").write_text("{}")
    (sharded / "tokenizer_config.json").write_text("{}")
    assert components(sharded) == before


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
def test_a_config_that_is_none_is_refused(llama: Path, text: str) -> None:
    files = find_model(str(llama))
    (llama / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        model_components(files)


def test_a_damaged_checkpoint_is_refused(llama: Path) -> None:
    files = find_model(str(llama))
    (llama / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError):
        model_components(files)


@pytest.mark.parametrize("architecture", NAMES)
def test_the_definition_is_the_file_that_transformers_takes_it_from(
    folders: dict[str, Path], architecture: str
) -> None:
    """The oracle is transformers itself: the source of the class that it builds, and of all classes it derives from."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folders[architecture])
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    root = Path(transformers.__file__).parent
    hashed = fingerprint._definition_files(root / "models", config.model_type)
    hashed |= {root / name for name in fingerprint._SHARED_SOURCES}
    classes = {kind for part in (module, config) for kind in type(part).__mro__}
    classes |= {type(part) for part in module.modules()}
    wanted = {Path(inspect.getfile(kind)) for kind in classes if kind.__module__.startswith("transformers.")}
    # Loading adapters, generating and uploading are no part of a graph.
    beside = {
        "generation/utils.py",
        "generation/continuous_batching/continuous_api.py",
        "integrations/peft.py",
        "utils/hub.py",
    }
    assert wanted - hashed <= {root / name for name in beside}
    assert {path.name for path in wanted & hashed} >= {f"modeling_{config.model_type.removesuffix('_text')}.py"}


def test_every_causal_language_model_of_transformers_is_found() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    models = Path(inspect.getfile(CONFIG_MAPPING.__class__)).parent.parent
    wrong = {}
    for model_type, class_names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        files = fingerprint._definition_files(models, model_type)
        folder = model_type_to_module_name(model_type)
        names = [class_names] if isinstance(class_names, str) else class_names
        text = "".join(path.read_text() for path in files)
        if not all(f"class {name}(" in text for name in names):
            wrong[model_type] = (folder, names, sorted(path.name for path in files))
    assert len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) > 50
    assert wrong == {}


@pytest.fixture
def fake_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A transformers with one model, which imports from a second, and a third beside them."""
    root = tmp_path / "transformers"
    (root / "integrations").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "modeling_utils.py": "",
        "masking_utils.py": "",
        "trainer.py": "",
        "models/llama/configuration_llama.py": 'class C:\n    model_type = "llama"\n',
        "models/llama/modeling_llama.py": "from ..second.modeling_second import thing\n",
        "models/second/modeling_second.py": "from ...models.auto.modeling_auto import x\n",
        "models/third/modeling_third.py": "",
        "models/third/configuration_third.py": 'class C:\n    model_type = "third"\n',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    spec = ModuleSpec("transformers", None, origin=str(root / "__init__.py"))
    monkeypatch.setattr(fingerprint.importlib.util, "find_spec", lambda name: spec)
    return root


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("models/llama/modeling_llama.py", {"model.definition"}),
        ("models/llama/configuration_llama.py", {"model.definition"}),
        ("models/second/modeling_second.py", {"model.definition"}),
        ("models/third/modeling_third.py", set()),
        ("modeling_utils.py", {"model.transformers_sources"}),
        ("masking_utils.py", {"model.transformers_sources"}),
        ("modeling_rope_utils.py", {"model.transformers_sources"}),
        ("trainer.py", set()),
    ],
)
def test_a_changed_source_of_the_definition_is_seen(
    fake_transformers: Path, llama: Path, name: str, expected: set[str]
) -> None:
    files = find_model(str(llama))
    before = model_components(files)
    with (fake_transformers / name).open("a") as stream:
        stream.write("# changed\n")
    assert changed(before, model_components(files)) == expected


def test_another_version_of_transformers_is_another_key(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = components(llama)
    monkeypatch.setattr(fingerprint.importlib.metadata, "version", lambda name: "99.0")
    assert changed(before, components(llama)) == {"model.transformers"}


def test_without_transformers_there_are_components_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = find_model(str(llama))
    monkeypatch.setattr(fingerprint.importlib.util, "find_spec", lambda name: None)
    assert model_components(files)["model.transformers"] == "not installed"


def test_the_config_may_have_entries_of_any_kind(llama: Path) -> None:
    edit_config(llama, odd={"b": [1, None, {"c": "\u00fc"}], "a": 1e-6})
    assert components(llama)["model.config.odd"] == '{"a": 1e-06, "b": [1, null, {"c": "\\u00fc"}]}'
