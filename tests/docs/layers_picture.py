"""Draws the layers of the package, with the imports between them, for docs/how-it-works.md.

python -m tests.docs.layers_picture    # writes docs/assets/layers.svg
"""

from html import escape

from tests.fresh import ROOT
from tests.unit.test_layers import FILES, LAYERS, imported_at_run_time, module_of, parse, unit_of

PICTURE = ROOT / "docs" / "assets" / "layers.svg"
WIDTH, ROW, BOX = 760, 54, 30


def imports() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {unit: set() for layer in LAYERS for unit in layer}
    for path in FILES:
        unit = unit_of(module_of(path))
        if unit in found:
            names = map(unit_of, imported_at_run_time(parse(path)))
            found[unit] |= {name for name in names if name in found} - {unit}
    return found


def nearest(found: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports downwards that do not follow from two others, one behind the other."""
    heights = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}
    below: dict[str, set[str]] = {}
    kept = []
    for unit in sorted(found, key=heights.__getitem__):
        down = {one for one in found[unit] if heights[one] < heights[unit]}
        beyond = set().union(*(below[one] for one in down)) if down else set()
        below[unit] = down | beyond
        kept += [(unit, one) for one in sorted(down - beyond)]
    return kept


def drawing() -> str:
    """The picture as SVG: the lowest layer at the bottom, a line to what a unit imports."""
    centres = {}
    boxes = []
    for height, layer in enumerate(LAYERS):
        y = (len(LAYERS) - 1 - height) * ROW + 12
        room = WIDTH / len(layer)
        for place, unit in enumerate(layer):
            width = 20 + 8 * len(unit)
            x = place * room + room / 2
            centres[unit] = x, y
            left = x - width / 2
            boxes.append(
                f'<rect x="{left:g}" y="{y}" width="{width}" height="{BOX}" rx="5"/>'
                f'<text x="{x:g}" y="{y + 20}">{escape(unit)}</text>'
            )
    lines = []
    for unit, other in nearest(imports()):
        (x, y), (to_x, to_y) = centres[unit], centres[other]
        y, middle = y + BOX, (y + BOX + to_y) / 2
        lines.append(
            f'<path d="M{x:g} {y} C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y}"/>'
        )
    size = f"0 0 {WIDTH} {len(LAYERS) * ROW}"
    style = (
        "rect{fill:#e8eaf6;stroke:#3f51b5}text{font:14px monospace;text-anchor:middle;fill:#111}"
        "path{fill:none;stroke:#7986cb}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}">',
            f"<style>{style}</style>",
            '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
