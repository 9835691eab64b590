"""What the documents name exists."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("colab/*.md")])
SEMANTICS = ROOT / "docs" / "semantics.md"
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
# A path from the top of the repository; a star stands for anything, as in `*train/loss.py`.
PATH = re.compile(
    r"(?<![\w./*-])((?:shared|jaxtrain|torchtrain|\*train|tests|configs|docs|colab|\.ci)/[\w.*/-]*"
    r"|Makefile|pyproject\.toml|constraints\.txt|[A-Z]+\.md)(?![\w<{])"
)
MODULE = re.compile(r"python -m ((?:shared|jaxtrain|torchtrain)[\w.]*)")

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


def prose(document: Path) -> str:
    """Without the fenced blocks, which hold what programs print."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


@functools.cache
def names_of_tests(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def rules() -> Iterator[tuple[str, list[str]]]:
    """(section, cells) of every row of the semantics that states a rule."""
    for section in re.split(r"^## ", SEMANTICS.read_text(), flags=re.MULTILINE)[1:]:
        for line in section.splitlines():
            if line.startswith("| ") and not line.startswith(("| trap", "| ---")):
                yield section.split("\n", 1)[0], [cell.strip() for cell in line.strip("| ").split(" | ")]


@documents
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    for path, test in TEST.findall(document.read_text()):
        assert (ROOT / path).is_file(), f"{document.name} names {path}"
        assert test in names_of_tests(ROOT / path), f"{document.name} names {path}::{test}"


@documents
def test_every_path_in_backticks_exists(document: Path) -> None:
    for code in re.findall(r"`([^`]+)`", prose(document)):
        for path in PATH.findall(code):
            assert any(ROOT.glob(path)), f"{document.name} names {path}"


@documents
def test_every_command_of_ours_is_one(document: Path) -> None:
    for module in MODULE.findall(document.read_text()):
        path = ROOT / module.replace(".", "/")
        program = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert 'if __name__ == "__main__"' in program.read_text(), f"{document.name}: python -m {module}"


@documents
def test_every_link_inside_the_project_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", prose(document)):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_every_rule_of_the_semantics_names_its_code_and_its_test() -> None:
    found = list(rules())
    assert len(found) > 40
    for section, cells in found:
        assert len(cells) == 4, cells
        assert section != "Not yet"
        assert PATH.search(cells[2]), f"{cells[0]} is carried out nowhere"
        assert TEST.search(cells[3]), f"{cells[0]} is held by no test"


def test_every_file_of_one_backend_has_a_twin() -> None:
    jax, torch = (
        {path.relative_to(ROOT / package).as_posix() for path in (ROOT / package).rglob("*.py")}
        for package in ("jaxtrain", "torchtrain")
    )
    assert jax == torch


def test_every_concept_of_both_backends_has_a_row_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for path in [*ROOT.glob("jaxtrain/*.py"), *ROOT.glob("torchtrain/*.py")]:
        if not path.name.startswith("__"):
            assert f"`{path.relative_to(ROOT).as_posix()}`" in text, path


def test_the_top_level_holds_what_it_should() -> None:
    code = {"jaxtrain", "torchtrain", "shared", "configs", "tests", "colab", "docs"}
    found = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert found - {"runs", "build"} - {p.name for p in ROOT.glob("*.egg-info")} == code
