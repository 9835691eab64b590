from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.config.__main__ import main
from shared.config.recipe import recipe_hash
from shared.config.reference import json_schema, json_schema_text, reference_text
from shared.config.schema import Config
from tests.shared.config.example import load

ROOT = Path(__file__).parents[3]


def test_the_committed_json_schema_is_current() -> None:
    # To mend: python -m shared.config --schema configs/schema.json
    assert (ROOT / "configs/schema.json").read_text(encoding="utf-8") == json_schema_text()


def test_the_committed_reference_is_current() -> None:
    # To mend: python -m shared.config --reference docs/configuration.md
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == reference_text()


def objects(node: Any) -> list[dict[str, Any]]:
    """Every object type in a JSON Schema."""
    inner = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    found = [node] if isinstance(node, dict) and "properties" in node and node.get("type") == "object" else []
    return found + [item for value in inner for item in objects(value)]


def test_every_section_is_closed_and_every_field_documented() -> None:
    sections = objects(json_schema())
    assert len(sections) > 20
    for section in sections:
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            assert field.get("description"), name
            assert "``" not in field["description"] and ":mod:" not in field["description"]


def test_every_reference_in_the_json_schema_leads_somewhere() -> None:
    schema = json_schema()
    text = json.dumps(schema)
    for name in schema["$defs"]:
        assert f'"#/$defs/{name}"' in text
    assert text.count("#/$defs/") == sum(text.count(f'"#/$defs/{name}"') for name in schema["$defs"])


def test_every_key_of_a_config_stands_in_the_reference(tmp_path: Path) -> None:
    def keys(value: Any) -> set[str]:
        return set(value) | {k for v in value.values() for k in keys(v)} if isinstance(value, dict) else set()

    dump = load(tmp_path).config.model_dump(exclude={"targets"})
    for key in keys(dump) - {"family", "kind", "name"}:
        assert f"`{key}`" in reference_text() or f".{key}`" in reference_text(), key
    assert set(Config.model_fields) <= set(json_schema()["properties"])


def test_the_tables_of_the_reference_have_four_cells_a_row() -> None:
    for line in reference_text().splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 5, line


# ------------------------------------------------------------------------------------------------------- command line


def test_check_prints_the_recipe_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(tmp_path, "schedule.steps=7", "schedule.warmup_steps=0").config
    path = str(tmp_path / "config.yaml")
    assert main(["--check", path, "schedule.steps=7", "--target", "cpu", "schedule.warmup_steps=0"]) == 0
    assert capsys.readouterr() == (f"ok, recipe {recipe_hash(config)}\n", "")


def test_schema_and_reference_are_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    assert capsys.readouterr().out == json_schema_text()
    assert main(["--reference", str(tmp_path / "reference.md")]) == 0
    assert (tmp_path / "reference.md").read_text(encoding="utf-8") == reference_text()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--check"],
        ["--check", "nowhere.yaml"],
        ["--check", "configs/demo.yaml", "--target", "nowhere"],
        ["--check", "configs/demo.yaml", "--schema"],
        ["--check", "configs/demo.yaml", "--unknown"],
        ["--schema", "/nowhere/schema.json"],
        ["--schema", "schema.json", "seed=3"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_one_line_and_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_help_is_answered_without_importing_pydantic() -> None:
    code = (
        "import sys\nfrom shared.config.__main__ import main\nimport shared.config.load\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'pydantic' not in sys.modules, 'pydantic is slow to import'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)
