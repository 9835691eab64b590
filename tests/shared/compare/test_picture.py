import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shared.compare.picture
from shared.compare.comparison import compare_runs
from shared.compare.picture import draw
from shared.compare.runs import load_run
from shared.errors import UserError
from tests.shared.compare.made_runs import make_run

LONG = {"kind": "NVIDIA A100-SXM4-80GB", "count": 8}
CURVE = tuple(2.0 + 4.0 * math.exp(-step / 50) for step in range(400))
NOISY = tuple(loss + 1e-6 * math.sin(step) for step, loss in enumerate(CURVE))

PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a usual pair": ({"held_out": {200: 2.5, 400: 2.25}}, {"losses": NOISY, "held_out": {200: 2.5}}),
    "float64": (
        {"recipe": {"precision": {"compute": "float64"}}},
        {"losses": NOISY, "recipe": {"precision": {"compute": "float64"}}},
    ),
    "long names": ({"device": LONG}, {"device": LONG}),
    "far apart": ({}, {"losses": tuple(2 * loss for loss in CURVE)}),
    "equal to the last bit": ({}, {}),
    "no records": ({"losses": (), "tokens_per_s": None}, {"losses": ()}),
    "no speed": ({"tokens_per_s": None}, {"tokens_per_s": None}),
    "one record": ({"losses": (1.0,)}, {"losses": (1.5,)}),
    "diverged": ({"losses": (1.0, math.nan, math.inf)}, {"losses": (1.1, 2.0, math.nan), "held_out": {2: math.inf}}),
    "many reasons": ({}, {"recipe": {f"field_{i}": "x" * 40 for i in range(9)}, "fingerprints": {"recipe": "e"}}),
    "signs of formulas": ({}, {"device": {"kind": "$x_{1", "count": 1}}),
}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collects the figures that are drawn."""
    pages: list[Any] = []
    compose = shared.compare.picture._compose

    def keep(comparison: Any, figure: Any) -> None:
        compose(comparison, figure)
        pages.append(figure)

    monkeypatch.setattr(shared.compare.picture, "_compose", keep)
    yield pages


def drawn(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> Path:
    one = load_run(make_run(folder / "one", **{"losses": CURVE, **first}))
    two = load_run(make_run(folder / "two", **{"losses": CURVE, "backend": "torch", **second}))
    draw(compare_runs(one, two), folder / "picture.png")
    return folder / "picture.png"


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.filterwarnings("error")
def test_no_text_overlaps_another_or_leaves_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str
) -> None:
    from matplotlib.text import Text

    texts: dict[Text, Any] = {}
    draw_text = Text.draw

    def watch(text: Text, renderer: Any) -> None:
        # Only what is drawn: labels of ticks outside an axis exist as well.
        draw_text(text, renderer)
        if text.get_text().strip() and text.get_visible():
            texts[text] = text.get_window_extent(renderer)

    monkeypatch.setattr(Text, "draw", watch)
    drawn(tmp_path, *PAIRS[pair])
    assert len(texts) >= 5
    for text, box in texts.items():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= 1800 and box.y1 <= 1160, text
    for (text, box), (other, other_box) in itertools.combinations(texts.items(), 2):
        assert not box.overlaps(other_box), (text, other)


def test_the_picture_is_a_png_of_the_size_that_is_promised(tmp_path: Path) -> None:
    from matplotlib.image import imread

    image = imread(drawn(tmp_path, *PAIRS["a usual pair"]))
    assert image.shape[:2] == (1160, 1800)
    colours = np.unique((image[..., :3] * 255).round().astype(int).reshape(-1, 3), axis=0).tolist()
    assert [0x1F, 0x4E, 0x79] in colours and [0xE8, 0xA3, 0x3D] in colours


def test_the_curves_are_the_recorded_losses(tmp_path: Path, page: list[Any]) -> None:
    drawn(tmp_path, *PAIRS["a usual pair"])
    loss, _, difference, _ = page[0].axes
    first, second, *held_out = loss.get_lines()
    assert tuple(first.get_ydata()) == CURVE
    assert tuple(second.get_ydata()) == NOISY
    assert [tuple(line.get_ydata()) for line in held_out] == [(2.5, 2.25), (2.5,)]
    raw = difference.get_lines()[0]
    expected = np.abs(np.subtract(CURVE, NOISY))
    # Steps of equal losses have no place on a logarithmic axis.
    np.testing.assert_array_equal(raw.get_ydata(), expected[expected > 0])


def test_drawing_leaves_the_settings_of_others_alone(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    drawn(tmp_path, {}, {})
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"--picture needs matplotlib, .*; pip install matplotlib"):
        drawn(tmp_path, {}, {})
