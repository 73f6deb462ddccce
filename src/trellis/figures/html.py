"""HTML from Python: escaped text, and tags around it."""

import html


class Markup(str):
    """Text that is already HTML."""


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. Children that are not `Markup` are escaped; an attribute `class_` is written `class`.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{words}>" if name in ("br", "meta") else f"<{name}{words}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Children one after the other; None is left out."""
    parts = (child if isinstance(child, Markup) else html.escape(str(child)) for child in children if child is not None)
    return Markup("".join(parts))


def section(title: str, *children: object, note: str | None = None, wide: bool = False) -> Markup:
    """A section of the page under a heading."""
    head = tag("h2", title, tag("small", note) if note else None)
    return tag("section", head, *children, class_="panel wide" if wide else "panel")


def table(rows: list[tuple[object, ...]], head: tuple[str, ...] = (), right: tuple[int, ...] = ()) -> Markup:
    """A table; the columns in `right` are aligned to the right."""
    cell = lambda kind, i, value: tag(kind, value, class_="num" if i in right else None)
    top = tag("thead", tag("tr", *(cell("th", i, value) for i, value in enumerate(head)))) if head else None
    body = tag("tbody", *(tag("tr", *(cell("td", i, value) for i, value in enumerate(row))) for row in rows))
    return tag("div", tag("table", top, body), class_="scroll")
