"""Shape files as parameters of a test: `@pytest.mark.shapes("published.csv", ids=["2"])`."""

from __future__ import annotations

from pathlib import Path

import pytest

import rooflane.shapes
from rooflane.shapes import Shape, ShapeError, load_shapes


def shapes_of(marker: pytest.Mark, metafunc: pytest.Metafunc) -> list[Shape]:
    """Return the shapes a marker names; anything it cannot mean fails the collection in one paragraph.

    The file is looked for beside the test, then in pytest's root, then among those that ship.
    """
    name = metafunc.definition.nodeid
    given = _arguments(marker)
    if isinstance(given, str):
        pytest.fail(f"{name}: @pytest.mark.shapes {given}", pytrace=False)
    if "shape" not in metafunc.fixturenames:
        pytest.fail(f"{name}: is marked with shapes and takes no argument `shape` to hand them to", pytrace=False)
    file, ids = given
    places = [metafunc.definition.path.parent, metafunc.config.rootpath, Path(rooflane.shapes.__file__).parent]
    path = next((folder / file for folder in places if (folder / file).is_file()), None)
    if path is None:
        looked = ", ".join(dict.fromkeys(map(str, places)))
        pytest.fail(f"{name}: there is no shape file {file}; looked in {looked}", pytrace=False)
    try:
        shapes = {shape.id: shape for shape in load_shapes(path)}
    except ShapeError as error:
        pytest.fail(f"{name}: {error}", pytrace=False)
    unknown = [wanted for wanted in ids or () if wanted not in shapes]
    if unknown:
        has = ", ".join(shapes)
        pytest.fail(f"{name}: {path} holds no shape {', '.join(map(repr, unknown))}; its ids: {has}", pytrace=False)
    return [shapes[wanted] for wanted in ids] if ids is not None else list(shapes.values())


def _arguments(marker: pytest.Mark) -> tuple[str, list[str] | None] | str:
    """Return the file and the ids, or what is wrong with them."""
    values = dict(zip(("file", "ids"), marker.args, strict=False)) | marker.kwargs
    file, ids = values.pop("file", None), values.pop("ids", None)
    if values or len(marker.args) > 2 or not isinstance(file, (str, Path)):
        return 'takes a shape file and ids=[...], such as shapes("published.csv", ids=["2"])'
    if ids is None:
        return str(file), None
    if isinstance(ids, str) or not ids:
        return f"ids is {ids!r}; give a list with at least one id, such as ids=['2']"
    return str(file), [str(wanted) for wanted in ids]
