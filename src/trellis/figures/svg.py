"""Pictures as SVG text: no script, no font, nothing to load."""

from collections.abc import Iterable

from trellis.figures.html import Markup, tag


def shape(name: str, /, *, title: str = "", **attributes: object) -> Markup:
    """An element, with a title that shows under the pointer. Fractions are written with one digit.

    >>> shape("rect", title="a", x=1.0, y=2, class_="axis")
    '<rect x="1.0" y="2" class="axis"><title>a</title></rect>'
    """
    written = {key: f"{value:.1f}" if isinstance(value, float) else value for key, value in attributes.items()}
    return tag(name, *[tag("title", title)] * bool(title), **written)


def box(x: float, y: float, width: float, height: float, *, title: str = "", **attributes: object) -> Markup:
    """A rectangle, never too thin to be seen."""
    return shape("rect", title=title, x=x, y=y, width=max(width, 0.3), height=height, **attributes)


def dot(x: float, y: float, radius: float, *, title: str = "", **attributes: object) -> Markup:
    """A circle."""
    return shape("circle", title=title, cx=x, cy=y, r=radius, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> Markup:
    """A straight line."""
    return shape("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def path(points: Iterable[tuple[float, float]], **attributes: object) -> Markup:
    """Straight lines from point to point."""
    return shape("path", d="M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points), **attributes)


def text(x: float, y: float, words: str, **attributes: object) -> Markup:
    """Words that begin at a point on their base line, or with `text_anchor` end there or are centred on it."""
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)


def picture(width: float, height: float, parts: Iterable[str], label: str) -> Markup:
    """A picture within a page, which gives it its size and style."""
    inside = Markup("\n".join(parts))
    return tag("svg", inside, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", aria_label=label)


def document(width: float, height: float, parts: Iterable[str], style: str) -> str:
    """A picture by itself, for a file or a notebook."""
    size = {"width": f"{width:.0f}", "height": f"{height:.0f}"}
    ground = tag("rect", fill="#fff", **size)
    inside = Markup(f"<style>{style}</style>{ground}{''.join(parts)}")
    box = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", inside, xmlns="http://www.w3.org/2000/svg", viewBox=box, role="img", **size)
