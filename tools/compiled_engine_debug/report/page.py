"""The page: all sections, put into the template. Everything that comes from a recording is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from compiled_engine.errors import ConfigError
from compiled_engine_debug.findings import Finding
from compiled_engine_debug.recording import Recording
from compiled_engine_debug.report import bindings, findings, memory_use, strip, summary, text, timeline, waterfall
from compiled_engine_debug.report.generated import Sources
from compiled_engine_debug.report.key_use import key_uses

_FILTERS = (
    text.count_text,
    text.bytes_text,
    text.seconds_text,
    text.share_text,
    text.shape_text,
    text.address_text,
    text.counted,
    text.listed,
)
_ASSETS = files("compiled_engine_debug.report") / "assets"


def render_report(
    recording: Recording,
    warm: Recording | None = None,
    found: Sequence[Finding] | None = None,
    generated: Mapping[str, Sources] | None = None,
) -> str:
    """The HTML page of ``recording``: one file that loads nothing from elsewhere.

    ``warm``: a second start to show beside this one's. ``found``: the findings of an audit or a bisection, which
    come first; None where there was none. ``generated``: what ``generated_code`` found, shown with each piece.
    """
    uses = key_uses(recording)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            facts=summary.facts(recording),
            figures=summary.figures(recording),
            has_others=found is not None,
            cards=[*findings.given_findings(found or ()), *findings.own_findings(recording, uses)],
            waterfall=waterfall.waterfall(recording, warm),
            strip=strip.strip(recording, generated),
            caches=recording.caches,
            bindings=bindings.binding_table(recording),
            timeline=timeline.timeline_of(recording.steps),
            uses=uses,
            compiles=recording.compiles,
            memory=memory_use.memory_use(recording),
            style=_asset("report.css"),
            script=_asset("report.js"),
        )
    )


def write_report(path: Path, page: str) -> None:
    """Write ``page`` to ``path``. Raises ``ConfigError`` where that is not possible."""
    try:
        path.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: give another file to --output") from error


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("compiled_engine_debug.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({function.__name__: function for function in _FILTERS})
    return environment


def _asset(name: str) -> Markup:
    """A file of the package's own, for the page as it is."""
    return Markup((_ASSETS / name).read_text(encoding="utf-8"))
