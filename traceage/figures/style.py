"""What all figures share: colours, axes, ticks, and the way into a page.

Nothing here keeps global state: every figure is a `matplotlib.figure.Figure`, and matplotlib is
imported when a figure is drawn, not when this module is.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.2  # inches; 9 pt text then reads well from 600 to 900 px


@dataclass(frozen=True)
class Theme:
    """The colours of a figure. All hues are from colour-blind safe sets and differ in lightness."""

    background: str
    ink: str
    muted: str
    rule: str
    empty: str
    age: str
    age_band: str
    peak: str
    in_flight: str
    in_queue: str
    fault: str
    ramp: tuple[str, ...]
    fault_ramp: tuple[str, ...]
    lines: tuple[str, ...]


LIGHT = Theme(
    background="#ffffff",
    ink="#1f2430",
    muted="#5a6272",
    rule="#e3e6eb",
    empty="#eceef1",
    age="#0b5a93",
    age_band="#a9cde8",
    peak="#7d8797",
    in_flight="#5aa9d6",
    in_queue="#e8a33d",
    fault="#b8400b",
    ramp=("#d8e8f5", "#9dc6e3", "#4a96c9", "#1a64a0", "#082c58"),
    fault_ramp=("#fbdcc4", "#f2a673", "#dd6b2c", "#a83c08", "#6a2202"),
    lines=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#333a47", "#8c510a"),
)
DARK = Theme(
    background="#171a21",
    ink="#e6e9ef",
    muted="#a2abba",
    rule="#2c323d",
    empty="#242933",
    age="#7cc4f4",
    age_band="#2b4f6d",
    peak="#8a94a5",
    in_flight="#3f88b8",
    in_queue="#dc9838",
    fault="#ff9a5c",
    ramp=("#16324a", "#1f5880", "#2f86bd", "#79bfe9", "#e0f2ff"),
    fault_ramp=("#47250f", "#7f3f15", "#c2611f", "#f29a5e", "#ffe3cf"),
    lines=("#4aa8e0", "#f0793a", "#2fc497", "#e39cc6", "#e2bd45", "#a5dcff", "#cfd5df", "#cf9a5f"),
)


# --- SVG for a page -----------------------------------------------------------------------------


def inline_svg(
    draw: Callable[[Theme], Figure], *, key: str, label: str, themes: Sequence[Theme] = ()
) -> list[str]:
    """A figure as `<svg>` elements to stand in an HTML page; equal input gives equal bytes.

    `draw` makes the figure in the colours of a theme. Without `themes` there is one element, whose
    colours are variables of the page's style sheet (`css_variables`), and it serves light and dark;
    a figure that holds an image needs one for each theme. `label` is the text alternative. `key`
    keeps the ids of several figures on one page apart. Text stays text, in the font of the page.
    The elements name no address, not even a namespace's: inside HTML they need none.
    """
    import matplotlib
    import matplotlib.style

    # A style the caller has set must not leak into the page.
    with matplotlib.style.context("default"), matplotlib.rc_context(_SVG_SETTINGS):
        first = draw(themes[0] if themes else LIGHT)
        drawn = [_svg(first)]
        for theme in themes[1:]:
            other = draw(theme)
            # To lay a figure out takes as long as to draw it, and only its colours are others.
            other.set_layout_engine("none")
            for axes, laid_out in zip(other.axes, first.axes, strict=True):
                axes.set_position(laid_out.get_position(original=True))
            drawn.append(_svg(other))
    variables = {} if themes else {colour: name for name, colour in _colours(LIGHT).items()}
    return [
        _element(svg, f"{key}-{k}" if themes else key, label, variables)
        for k, svg in enumerate(drawn)
    ]


def _svg(figure: Figure) -> str:
    """What matplotlib writes, from `<svg` on."""
    buffer = io.StringIO()
    figure.savefig(
        buffer,
        format="svg",
        transparent=True,
        metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
    )
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :].strip()


def _element(svg: str, key: str, label: str, variables: Mapping[str, str]) -> str:
    """An `<svg>` element that can stand beside others in a page; `variables` names colours."""
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', body))

    def colour(found: re.Match[str]) -> str:
        return f"var(--{variables[found[0]]})" if found[0] in variables else found[0]

    def own_id(found: re.Match[str]) -> str:
        return f' id="{key}-{found[1]}"' if found[1] in used else ""

    def of_the_page(found: re.Match[str]) -> str:
        tag = found[0].replace("xlink:href=", "href=")
        tag = re.sub(r' id="([^"]*)"', own_id, tag)
        tag = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}-", tag)
        tag = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", tag)
        tag = re.sub(r"font-family: [^;\"]*(; )?", "", tag)
        return re.sub(r"#[0-9a-f]{6}\b", colour, tag)

    # Only what matplotlib wrote: a name in a legend may look like an id or a colour.
    body = re.sub(r"<[^>]*>", of_the_page, body)
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg {box[0]} role="img" aria-label="{html.escape(label)}">{body}'


def css_variables(theme: Theme) -> str:
    """The colours of a theme as declarations of a style sheet, for `inline_svg`.

    >>> css_variables(DARK)[:20]
    '--f-ink:#e6e9ef;--f-'
    """
    return ";".join(f"--{name}:{colour}" for name, colour in _colours(theme).items())


def _colours(theme: Theme) -> dict[str, str]:
    """Name of a variable -> colour; the background is that of the page."""
    found: dict[str, str] = {}
    for field in fields(theme):
        value = getattr(theme, field.name)
        name = "f-" + field.name.replace("_", "-")
        if isinstance(value, tuple):
            found |= {f"{name}-{k}": colour for k, colour in enumerate(value)}
        elif field.name != "background":
            found[name] = value
    return found


_SVG_SETTINGS: Any = {
    "svg.hashsalt": "traceage",
    "svg.fonttype": "none",
    "svg.image_inline": True,
    "path.simplify": False,  # every value that goes in comes out
}


# --- common -------------------------------------------------------------------------------------


def by_columns(metrics: pl.DataFrame) -> list[str]:
    """The columns that a metrics frame is grouped by: those before `episodes`.

    >>> import polars as pl
    >>> by_columns(pl.DataFrame({"step": [1], "env": ["math"], "training_version": [0],
    ...                          "episodes": [8]}))
    ['step', 'env']
    """
    names = metrics.columns
    before = names[: names.index("episodes")] if "episodes" in names else ["step"]
    return [name for name in before if name != "training_version" or "step" not in before]


def require(frame: pl.DataFrame, *names: str) -> None:
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise ValueError(
            f"no column {', '.join(map(repr, missing))} to draw; the frame has "
            f"{', '.join(map(repr, frame.columns)) or 'no columns'} (group by 'step')"
        )


def new_figure(theme: Theme, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor=theme.background)
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06, hspace=0.03)  # type: ignore[union-attr, call-arg]
    return figure


def style_axes(ax: Axes, theme: Theme) -> None:
    ax.set_facecolor("none")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(theme.muted)
    ax.spines["bottom"].set_zorder(5)
    ax.tick_params(which="both", colors=theme.muted)
    ax.tick_params(labelsize=8, length=3)
    ax.tick_params(axis="y", which="both", length=0)
    ax.xaxis.label.set(color=theme.ink, fontsize=8.5)
    ax.yaxis.label.set(color=theme.ink, fontsize=8.5)


def one_panel(ax: Axes | None, theme: Theme, height: float) -> tuple[Figure, Axes]:
    """`ax` and its figure, or new ones of `height` inches, with the lines of a value axis."""
    if ax is None:
        ax = new_figure(theme, height=height).add_subplot()
    style_axes(ax, theme)
    ax.grid(axis="y", color=theme.rule, lw=0.7)
    ax.set_axisbelow(True)
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure, ax


def title(ax: Axes, theme: Theme, text: str, pad: float = 6) -> None:
    # At a height of its own: to find one above all ticks would cost a sixth of the drawing.
    ax.set_title(text, loc="left", y=1.0, fontsize=9, color=theme.ink, fontweight="bold", pad=pad)


def say(ax: Axes, theme: Theme, text: str) -> None:
    """Words where there is nothing to draw."""
    ax.text(
        0.5,
        0.5,
        text,
        transform=ax.transAxes,
        ha="center",
        va="center",
        fontsize=9,
        color=theme.muted,
    )
    ax.set_yticks([])


def value_range(column: pl.Series) -> tuple[float, float] | None:
    """The least and the greatest value; None when there is none."""
    data = column.drop_nulls().cast(pl.Float64).to_numpy()
    return (float(data.min()), float(data.max())) if len(data) else None


PLACES: dict[str, dict[str, Any]] = {
    "right of the title": {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 4},
    "under the title": {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": 4},
    "beside": {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.5},
}
"""Where a legend can stand, outside its axes."""

UNDER = 20.0
"""Padding of a title that has a legend under it."""


def legend(
    ax: Axes,
    theme: Theme,
    place: str = "right of the title",
    handles: Sequence[Any] | None = None,
) -> None:
    """The legend of `ax`, at one of `PLACES`; of `handles`, where it is not of what was drawn."""
    options: dict[str, Any] = {"borderaxespad": 0.2, **PLACES[place]}
    if handles is not None:
        options |= {"handles": handles, "ncols": min(6, len(handles))}
    made = ax.legend(
        **options,
        frameon=False,
        fontsize=8,
        labelcolor=theme.ink,
        handlelength=1.6,
        columnspacing=1.2,
        borderpad=0.1,
    )
    for text in made.get_texts():
        text.set_parse_math(False)  # a `$` in the name of a group is a `$`


def step_ticks(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def contrast(ramp: Sequence[str], value: float) -> str:
    """Black or white, whichever reads better on the ramp's colour at `value` (WCAG luminance)."""
    from matplotlib.colors import LinearSegmentedColormap

    parts = LinearSegmentedColormap.from_list("share", ramp, N=64)(value)[:3]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#000000"


def signed(value: int) -> str:
    return str(value).replace("-", "\u2212")


def plain(value: Any) -> str:
    """Any value as text on one line; control characters are written out."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(value)
    )


def percent(share: float, decimals: int = 1) -> str:
    """A share as per cent; what is neither 0 nor 1 never reads as 0% or 100%.

    >>> percent(0.25), percent(1.0), percent(0.99999), percent(0.00001)
    ('25.0%', '100%', '>99.9%', '<0.1%')
    """
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    text = f"{share:.{decimals}%}"
    least = 10**-decimals
    if float(text[:-1]) == 0:
        return f"<{least:.{decimals}f}%"
    if float(text[:-1]) == 100 and share < 1:
        return f">{100 - least:.{decimals}f}%"
    return text
