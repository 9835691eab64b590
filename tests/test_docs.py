"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("colab/*.md")])
PATH = re.compile(r"`((?:shared|jaxtrain|torchtrain|tests|configs|docs|colab)/[\w./-]*)(?:::(\w+))?`")

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


@documents
def test_paths_and_tests_that_a_document_names_exist(document: Path) -> None:
    for path, test in PATH.findall(document.read_text()):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
        if test:
            assert f"def {test}(" in (ROOT / path).read_text(), f"{document.name} names {path}::{test}"


@documents
def test_links_inside_the_project_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_every_rule_of_the_semantics_names_its_test() -> None:
    rows = [line for line in (ROOT / "docs/semantics.md").read_text().splitlines() if line.startswith("| ")]
    rules = [row for row in rows if not row.startswith(("| trap", "| ---"))]
    assert len(rules) > 25
    for rule in rules:
        assert PATH.search(rule.split(" | ")[-1]), rule


def test_every_file_of_one_backend_has_a_twin_or_a_reason() -> None:
    alone = {
        "parallel.py": "a JAX program needs a mesh even for one device",
    }
    files = [
        {p.relative_to(ROOT / name).as_posix() for p in (ROOT / name).rglob("*.py")}
        for name in ("jaxtrain", "torchtrain")
    ]
    assert files[0] ^ files[1] == alone.keys()


def test_the_top_level_holds_what_it_should() -> None:
    code = {"jaxtrain", "torchtrain", "shared", "configs", "tests", "colab", "docs"}
    found = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert found - {"runs", "build"} - {p.name for p in ROOT.glob("*.egg-info")} == code
