"""``python -m shared.huggingface DIR``: the ``model`` section that belongs to a Hugging Face checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shared.arguments import Parser, exit_status


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return exit_status(lambda: _describe(argv))


def _describe(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="python -m shared.huggingface",
        description="Print the model section of a recipe that trains a Hugging Face checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with config.json and safetensors files")
    folder = parser.parse_args(argv).folder

    import yaml
    from pydantic import TypeAdapter

    from shared.config.schema import Model
    from shared.errors import UserError
    from shared.huggingface import Pretrained, model_section, read_settings
    from shared.models import model_spec

    where = str(folder / "config.json")
    section = model_section(read_settings(folder), where)
    try:
        model = TypeAdapter(Model).validate_python(section)
    except ValueError as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from None
    spec = model_spec(model)
    weights = Pretrained(folder, model, spec)
    print(f"# {spec.num_parameters:,} parameters, {weights.dtype('parameters')}; begin with them: --init-from {folder}")
    print(yaml.safe_dump({"model": section}, sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
