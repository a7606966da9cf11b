"""What a bundle does to texts: of paths the last component stays, and of addresses a number."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine_debug.bundle.scrub import scrub_findings, scrub_text
from compiled_engine_debug.findings import Finding

BASE = 0x7F00_1234_5000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("traced f (/home/ann/work/model.py:68)", "traced f (model.py:68)"),
        ("'/srv/data/x' and /srv/y", "'x' and y"),
        ("~/secret/run.jsonl", "run.jsonl"),
        (r"C:\Users\ann\model.py", "model.py"),
        (f"{Path.home()}/a b.py", "a b.py"),
        ("3 of 4 pieces, 7/8 full, s0//2, a / b", "3 of 4 pieces, 7/8 full, s0//2, a / b"),
        ("org/name at https://example.org/a/b", "org/name at https://example.org/a/b"),
        ("(s0 + 1)//2, x[0]/2, s0 //2", "(s0 + 1)//2, x[0]/2, s0 //2"),
        ("in file:///home/jane/store/x.so", "in file:x.so"),
        ("s3://bucket/jane/x.bin, file://host/jane/y", "s3:x.bin, file:y"),
        (r"\\server\share\jane\x.py:3", "x.py:3"),
        (r"'\\\\server\\share\\jane\\x'", "'x'"),
        (r"\\?\C:\Users\jane\x", "x"),
        ("see ../jane/secret/x.py:3", "see x.py:3"),
        ("./jane/x", "x"),
        ("in work/jane/../models/y", "in y"),
        ("~jane/models/x", "x"),
        ("/home/Jane Doe/models/secret", "secret"),
        ("from /home/Jane Doe/models/x to '/srv/Jane Doe/y'", "from x to 'y'"),
        (r"C:\Users\Jane Doe\x.py:3", "x.py:3"),
        ("/home/Doe, Jane (old)/x, /home/O'Brien/y", "x, y"),
        ("/srv/jane:v2/models/x", "x"),
        ("/srv/jane/a:/srv/jane/b", "a:b"),
        ("['/srv/jane/a', '/srv/jane/b'], (/srv/jane/c,/srv/jane/d)", "['a', 'b'], (c,d)"),
        ("at /home/jane, /Users/jane/ or /home/Jane Doe: none", "at ~, ~ or ~: none"),
        ("/srv/jane/out/ is full", "out is full"),
        (r"\\server\share\jane\out\ is full", "out is full"),
    ],
)
def test_paths_become_their_last_component(text: str, expected: str) -> None:
    assert scrub_text(text) == expected


@given(text=st.text("ab ./\\:~'(,C9", max_size=30))
def test_no_folder_of_a_path_is_left(text: str) -> None:
    assert "jane/" not in scrub_text(f"/srv/jane/{text}/x")


@pytest.mark.parametrize("part", ["/", "/a b", "/a ", "a/", "x ", " b", "a.b-", "a b,", "\\", ":a", "../"])
def test_long_texts_take_no_time_to_speak_of(part: str) -> None:
    assert len(scrub_text("/a" + part * 10_000)) <= 2 + len(part) * 10_000


def test_addresses_in_findings_become_numbers() -> None:
    findings = [
        Finding("address-changed", f"was at {BASE:#x} and is at {BASE + 64:#x}", step=3, slot=16),
        Finding("cache-alias", f"{BASE + 64:#x} in /home/ann/x.so has 0x10 bytes", node="/home/ann/x.so"),
    ]

    assert scrub_findings(findings) == (
        Finding("address-changed", "was at address 1 and is at address 2", step=3, slot=16),
        Finding("cache-alias", "address 2 in x.so has 0x10 bytes", node="x.so"),
    )
