"""The report's colours of steps can be told apart, also by people who see fewer colours."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

STYLE = (files("compiled_engine_debug.report") / "assets" / "report.css").read_text(encoding="utf-8")
TOLD_APART = ("full", "piecewise", "bucket", "eager", "padding")

# From linear RGB to what is seen without one kind of cone (Machado, Oliveira, Fernandes 2009, severity 1).
SEEN_WITH = {
    "all cones": np.eye(3),
    "no long cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no middle cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no short cones": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def palette(scheme: str) -> dict[str, str]:
    """The colours by name in one scheme; the dark one replaces those of the light one."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", light))
    return colours if scheme == "light" else colours | dict(re.findall(r"--([\w-]+): (#\w{6});", dark))


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* under D65, in which equal distances look about equally different."""
    xyz = TO_XYZ @ rgb / TO_XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("cones", list(SEEN_WITH))
def test_modes_and_padding_look_different(scheme: str, cones: str) -> None:
    colours = palette(scheme)
    seen = {name: lab(np.clip(SEEN_WITH[cones] @ linear(colours[name]), 0, 1)) for name in TOLD_APART}
    for one, other in itertools.combinations(TOLD_APART, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 15, f"{one} and {other}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_stand_out_from_their_background(scheme: str) -> None:
    """As much as WCAG 2.2 asks of what is no text (1.4.11)."""
    colours = palette(scheme)

    def luminance(name: str) -> float:
        return float(TO_XYZ[1] @ linear(colours[name]))

    for name in TOLD_APART:
        high, low = sorted((luminance(name), luminance("sunken")), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, name
