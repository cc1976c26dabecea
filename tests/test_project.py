"""The project's own promises: exact pins, a complete lock, working entry points, small modules."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import penstock

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULE_LIMIT_LINES = 600

# A package may import those listed before it, never one after.
LAYERS = ("storage", "index", "packed", "memwal", "table", "spark", "server", "cli")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(requirements: list[str]) -> dict[str, str]:
    found = [re.fullmatch(r"([\w.-]+)==([\w.!+]+)", line) for line in requirements]
    loose = [line for line, match in zip(requirements, found, strict=True) if match is None]
    assert not loose, "not pinned with =="
    return {canonical(match[1]): match[2] for match in found if match is not None}


def test_every_dependency_is_pinned_and_locked() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = pins([line for line in lines if line and not line.startswith("#")])
    extras = PROJECT["optional-dependencies"]
    direct = pins(PROJECT["dependencies"]) | pins(extras["spark"]) | pins(extras["dev"])
    assert direct.items() <= locked.items()


def test_the_version_is_told_once() -> None:
    assert penstock.__version__ == PROJECT["version"]


def test_the_readme_commands_and_the_others_are_make_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    promised = {"help", "setup", "demo", "test", "check", "bench", "soak", "format", "clean"}
    assert promised <= targets
    readme = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.M)
    assert {"demo", "test"} <= set(readme) <= targets


def test_ci_runs_the_readme_command_and_the_check(tmp_path: Path) -> None:
    """The real script, with a `make` on its path that only writes down how it was called."""
    calls = tmp_path / "calls"
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "make $*" >> "{calls}"\n')
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([ROOT / ".ci" / "run"], env=environment, check=True, capture_output=True)
    readme = (ROOT / "README.md").read_text()
    command = next(line for line in readme.splitlines() if line.startswith("make test"))
    assert calls.read_text().splitlines() == ["make check", command.split("#")[0].strip()]

    make.write_text("#!/bin/sh\n[ $1 != check ]\n")
    assert subprocess.run([ROOT / ".ci" / "run"], env=environment, check=False).returncode == 1


def test_no_module_outgrows_a_reader() -> None:
    sizes = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for directory in ("src", "tests", "bench")
        for path in (ROOT / directory).rglob("*.py")
    }
    assert not {name: lines for name, lines in sizes.items() if lines > MODULE_LIMIT_LINES}


def imported(path: Path) -> set[str]:
    """Dotted names a module imports from Penstock, relative imports included."""
    names = set()
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith(("penstock.", "pyspark"))}


def test_a_layer_imports_only_layers_below() -> None:
    package = ROOT / "src" / "penstock"
    wrong = []
    for path in package.rglob("*.py"):
        own = path.relative_to(package).with_suffix("").parts[0]
        if own not in LAYERS:
            continue
        for name in imported(path):
            if name.startswith("pyspark"):
                allowed = own == "spark"
            else:
                other = name.split(".")[1]
                allowed = other not in LAYERS or LAYERS.index(other) <= LAYERS.index(own)
            if not allowed:
                wrong.append(f"{own}: {path.name} imports {name}")
    assert not wrong
