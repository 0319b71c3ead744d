"""The picture of memory: valid, to scale, with all that is said in it."""

import re
from xml.etree import ElementTree

from irpar.tables.memory_picture import Panel, memory_picture

SVG = "{http://www.w3.org/2000/svg}"
HELD = {
    "parameters": [100, 100, 100, 100],
    "gradients": [0, 0, 50, 0],
    "optimizer": [0, 0, 0, 0],
    "activations": [10, 200, 300, 0],
    "buffers": [0, 0, 0, 0],
}
PANEL = Panel("all of it", HELD, 2, "MatMul <h.0>", (("forward", 1), ("backward", 2)))


def texts(picture: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def areas(picture: str) -> dict[str, list[tuple[float, float]]]:
    """Of each use the corners of its area."""
    found = {}
    for path in ElementTree.fromstring(picture).iter(f"{SVG}path"):
        x = y = 0.0
        corners = []
        for letter, numbers in re.findall(r"([MHV])([-\d. ]+)", path.attrib["d"]):
            if letter == "M":
                x, y = map(float, numbers.split())
            elif letter == "H":
                x = float(numbers)
            else:
                y = float(numbers)
            corners.append((x, y))
        found[path[0].text or ""] = corners
    return found


def test_areas_are_stacked_and_to_scale() -> None:
    found = areas(memory_picture("rank 0", [PANEL]))
    assert list(found) == ["activations", "gradients", "parameters"]  # What is drawn later covers what is below it.
    (_, floor), *_ = found["parameters"]
    heights = {use: {round(floor - y, 1) for _, y in corners} - {0.0} for use, corners in found.items()}
    (unit,) = heights["parameters"]
    assert [round(height / unit, 1) for height in sorted(heights["gradients"])] == [1.0, 1.5]
    assert [round(height / unit, 1) for height in sorted(heights["activations"])] == [1.0, 1.1, 3.0, 4.5]
    assert max(x for x, _ in found["activations"]) == max(x for x, _ in found["parameters"])


def test_all_that_is_to_be_read_is_there() -> None:
    said = texts(memory_picture("rank 0: memory", [PANEL, Panel("after", HELD, 2, "Add")], ("memory budget", 400)))
    for words in ("rank 0: memory", "all of it", "after", "forward", "backward", "bytes that a rank holds"):
        assert words in said
    assert "peak 450 B, step 2: MatMul <h.0>" in said
    assert said.count("memory budget: 400 B") == 2
    assert {"parameters", "gradients", "activations"} <= set(said)
    assert "optimizer" not in said
    assert {"0 B", "100 B", "200 B"} <= set(said)


def test_a_limit_far_above_is_said_and_not_drawn() -> None:
    picture = memory_picture("rank 0", [PANEL], ("device", 10**9))
    assert "device: 1 GB" in texts(picture)
    assert areas(picture) == areas(memory_picture("rank 0", [PANEL]))


def test_many_steps_are_few_columns_and_the_peak_stays() -> None:
    totals = [step % 7 for step in range(50_000)]
    totals[31_234] = 1000
    panel = Panel("long", {"activations": totals}, 31_234, "x" * 10)
    picture = memory_picture("long", [panel])
    assert len(picture) < 40_000
    corners = areas(picture)["activations"]
    floor, top = corners[0][1], min(y for _, y in corners)
    assert floor - top > 150
    assert "30,000" in texts(picture)


def test_names_are_no_markup() -> None:
    panel = Panel("a\x1b<&>", {"activations": [0]}, 0, 'before "x" & y\x00')
    said = texts(memory_picture("\ud800", [panel]))
    assert "a\\x1b<&>" in said
    assert 'peak 0 B, step 0: before "x" & y\\x00' in said
