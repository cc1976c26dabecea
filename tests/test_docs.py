"""The documentation is part of the program: its snippets run, its links lead somewhere.

Each Markdown file with `python` blocks becomes one script, run by a fresh interpreter in an empty
directory with warnings as errors. The script has every line at the number it has in the Markdown,
so that a traceback points at the right place. That it also has to end by itself shows that nothing
Penstock starts keeps a process alive.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).resolve().parents[1]
MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCE_DIRS = (".ci", "bench", "docs", "scripts", "src", "tests")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_lines(markdown: str) -> list[str]:
    """The lines inside `python` blocks, every other line blank."""
    lines: list[str] = []
    fence: str | None = None
    for line in markdown.splitlines():
        if line.startswith("```"):
            fence = line[3:].strip() if fence is None else None
            lines.append("")
        else:
            lines.append(line if fence == "python" else "")
    assert fence is None, "a code block is never closed"
    return lines


def prose(markdown: str) -> str:
    """The text without code, in which a bracket is not a link."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S))


def text_files() -> list[Path]:
    inside = [path for name in SOURCE_DIRS for path in (ROOT / name).rglob("*")]
    return sorted(
        path
        for path in [*ROOT.iterdir(), *inside]
        if path.is_file() and path.suffix != ".pyc" and ".egg-info" not in str(path)
    )


WITH_SNIPPETS = [path for path in MARKDOWN if any(python_lines(path.read_text()))]
SLOW = {"docs/guide/spark-load.md", "docs/guide/spark-pipeline.md"}
"""Each starts a Java and a dozen processes of Spark; one such page is enough for every day."""
RUN = [
    pytest.param(path, marks=pytest.mark.soak if relative(path) in SLOW else ())
    for path in WITH_SNIPPETS
]


@pytest.mark.timeout(300)  # Spark alone takes a while to start
@pytest.mark.parametrize("path", RUN, ids=relative)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    if "penstock.spark" in path.read_text():
        _need_java()
    script = tmp_path / f"{path.name}.py"
    script.write_text("\n".join(python_lines(path.read_text())) + "\n")
    lake = tmp_path / "cwd"
    lake.mkdir()
    result = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=lake,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, f"{relative(path)}\n{result.stdout}\n{result.stderr}"


def _need_java() -> None:
    from penstock.spark.session import check_java

    try:
        check_java()
    except penstock.PenstockError as error:
        pytest.skip(str(error))


def test_readme_has_a_quick_start() -> None:
    assert ROOT / "README.md" in WITH_SNIPPETS


@pytest.mark.parametrize("path", MARKDOWN, ids=relative)
def test_relative_links_resolve(path: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text()))
    local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]
    broken = [t for t in local if not (path.parent / t).exists()]
    assert not broken, f"{relative(path)} links to what is not there"


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [
        name
        for path in (ROOT / "docs").rglob("*.md")
        if (name := path.relative_to(ROOT / "docs").as_posix()) != "README.md"
        and not re.match(r"decisions/\d", name)
        and f"({name})" not in index
    ]
    assert not missing, "docs/README.md does not mention these"


def test_decisions_are_numbered_listed_and_say_what_they_cost() -> None:
    directory = ROOT / "docs" / "decisions"
    pages = sorted(path for path in directory.glob("*.md") if path.name != "README.md")
    assert [int(path.name[:4]) for path in pages] == list(range(1, len(pages) + 1))
    listed = (directory / "README.md").read_text()
    for path in pages:
        assert f"({path.name})" in listed
        headings = re.findall(r"^#+ (.*)", path.read_text(), re.M)
        assert headings[0].startswith(f"{path.name[:4]}: ")
        assert headings[1:] == ["Goals", "Decision", "Cost"], path.name


def test_every_module_says_what_it_is() -> None:
    silent = [
        relative(path)
        for name in ("bench", "src", "tests")
        for path in (ROOT / name).rglob("*.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, "modules without a docstring"


def test_every_metric_is_documented() -> None:
    from penstock import metrics

    names = sorted(metric.name for metric in metrics.registry.collect())
    assert names
    guide = (ROOT / "docs" / "guide" / "metrics.md").read_text()
    missing = [name for name in names if not re.search(rf"\b{name}(_total)?\b", guide)]
    assert not missing, "docs/guide/metrics.md does not mention these"


def test_every_metric_is_used() -> None:
    from penstock import metrics

    package = ROOT / "src" / "penstock"
    sources = "\n".join(path.read_text() for path in package.rglob("*.py"))
    names = [metric.name.removeprefix("penstock_") for metric in metrics.registry.collect()]
    assert [name for name in names if f"metrics.{name}." not in sources] == []


def test_every_error_is_explained() -> None:
    guide = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text()
    explained = set(re.findall(r"^\| `(\w+)` \|", guide, re.M))
    errors = {name for name in penstock.__all__ if _is_error(getattr(penstock, name))}
    assert explained == errors


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, penstock.PenstockError)


def test_every_writer_option_is_documented() -> None:
    from penstock.memwal.config import WriterConfig

    guide = (ROOT / "docs" / "guide" / "writing.md").read_text()
    missing = [field.name for field in fields(WriterConfig) if f"`{field.name}" not in guide]
    assert not missing, "docs/guide/writing.md does not mention these"


def test_every_command_is_documented() -> None:
    from penstock.cli.main import app

    names = [
        command.name or command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
        if command.callback is not None and not command.hidden
    ]
    assert names
    text = "\n".join(path.read_text() for path in MARKDOWN)
    missing = [name for name in names if f"penstock {name}" not in text]
    assert not missing, "no document mentions these commands"


REGISTRIES = "|".join(
    [
        r"pypi\.(?:org|python)",
        r"pythonhosted\.",
        r"registry\.npmjs",
        r"(?:docker|ghcr|quay|crates)\.io",
        r"repo\d?\.maven",
        r"anaconda\.org",
        r"deb\.debian\.org",
        r"--(?:extra-)?index-url",
        r"--find[-]links",
    ]
)
MACHINE_PATHS = r"(?<![\w.}/*-])/(?:tmp|work|home|root|Users|opt|mnt|srv)/\w"
# Neither pattern matches its own source, so this file is searched like any other.


def test_no_file_names_a_registry_or_a_machine_path() -> None:
    found = []
    for path in text_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if hit := re.search(f"{REGISTRIES}|{MACHINE_PATHS}", line):
                found.append(f"{relative(path)}:{number}: {hit.group()}")
    assert not found
