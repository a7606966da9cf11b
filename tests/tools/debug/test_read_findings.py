"""Findings as JSON: what audits and bisections write is read, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.errors import ConfigError
from compiled_engine_debug.audit.session import AuditReport
from compiled_engine_debug.findings import Finding, read_findings

MOVED = Finding("address-changed", "it moved", layer="model.layers.0.self_attn")
WRONG = Finding("divergence", "eager parts with transformers", step=0, slot=17, node="neg")

FINDINGS = st.builds(
    Finding,
    st.text(),
    st.text(),
    st.none() | st.integers(),
    st.none() | st.text(),
    st.none() | st.text(),
    st.none() | st.integers(),
    st.none() | st.text(),
    st.none() | st.text(),
)


def written(tmp_path: Path, data: Any) -> Path:
    file = tmp_path / "findings.json"
    file.write_text(json.dumps(data))
    return file


@given(finding=FINDINGS)
def test_a_finding_comes_back(finding: Finding) -> None:
    assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding


@pytest.mark.parametrize("wrap", [list, lambda items: {"num_steps": 3, "findings": items}])
def test_lists_and_audits_are_read(tmp_path: Path, wrap: Any) -> None:
    items = [MOVED.to_json(), {"detector": "divergence", "message": "short"}]
    assert read_findings(written(tmp_path, wrap(items))) == (MOVED, Finding("divergence", "short"))


def test_the_report_of_an_audit_is_read(tmp_path: Path) -> None:
    report = AuditReport(num_steps=1, detectors=(), findings=(MOVED, WRONG))
    assert read_findings(written(tmp_path, report.to_json())) == (MOVED, WRONG)


def test_the_report_of_a_bisection_is_read(tmp_path: Path) -> None:
    rungs = [{"rung": "eager", "findings": []}, *({"findings": [item.to_json()]} for item in (WRONG, MOVED))]
    assert read_findings(written(tmp_path, {"tolerance": 0.1, "rungs": rungs})) == (WRONG, MOVED)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (17, "findings are 17"),
        ([17], "not 17"),
        ({"steps": []}, "no 'findings'"),
        ({"findings": None}, "findings are None"),
        ({"rungs": {"findings": []}}, "rungs are"),
        ({"rungs": [3]}, "no 'findings' in 3"),
        ([{"detector": "x"}], "no 'message'"),
        ([{"detector": "x", "message": 5}], "'message' of a finding is 5, which is no text"),
        ([{"detector": None, "message": "y"}], "'detector' of a finding is None"),
        ([{"detector": "x", "message": "y", "slot": "3"}], "'slot' .* no whole number"),
        ([{"detector": "x", "message": "y", "step": True}], "'step' .* no whole number"),
        ([{"detector": "x", "message": "y", "step": 1.5}], "'step' .* no whole number"),
        ([{"detector": "x", "message": "y", "node": ["z"]}], "'node' .* no text"),
        ([{"detector": "x", "message": "y", "foo": 1}], "no field 'foo'"),
    ],
)
def test_other_data_is_refused_with_a_reason(tmp_path: Path, data: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read_findings(written(tmp_path, data))
    assert "findings.json" in str(caught.value)
    assert "audit --json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\ufeff[]"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "findings.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"findings\.json: it cannot be read"):
        read_findings(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json"):
        read_findings(tmp_path / "gone.json")
