"""What pictures that matplotlib draws have in common: colours by method, and how one stands in a page.

A picture is drawn in the colours of light paper. In a page they become the page's own, so that they change with light
and dark.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from spillway.errors import UsageError
from spillway.internals.python_warnings import unwarned
from spillway.report.figures import format_share
from spillway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK: Final = "#1c2126"
SOFT: Final = "#5d6770"
LINE: Final = "#d9dee2"
PAPER: Final = "#ffffff"
_PAGE: Final = (("ink", INK), ("soft", SOFT), ("line", LINE), ("paper", PAPER))
"""Colours that every page names."""


class Colour(NamedTuple):
    """The same on light and on dark paper."""

    light: str
    dark: str

    @property
    def variable(self) -> str:
        """What a page calls it."""
        return f"c{self.light.removeprefix('#')}"


class Family(NamedTuple):
    """Methods of one kind share a colour; each has a mark of its own."""

    colour: Colour
    methods: tuple[str, ...]


GREY: Final = Colour("#56606a", "#a5b0ba")
YELLOW: Final = Colour("#8a6d00", "#e3c14a")
PINK: Final = Colour("#b8004e", "#ff6f9f")
BLUE: Final = Colour("#0060a8", "#56b4e9")
GREEN: Final = Colour("#007a5e", "#2fc79c")
ORANGE: Final = Colour("#b34a00", "#f5924e")
VIOLET: Final = Colour("#6c4ba0", "#b79be8")
"""After Okabe and Ito, darker on light paper so that a thin line is seen."""

MARKS: Final = ("o", "s", "^", "D", "v", "P", "X")
"""By place within a kind."""


def check_drawing(what: str = "a comparison", without: str = "--output and --png the table and --json need") -> None:
    """Raise UsageError where matplotlib is not installed.

    Arguments:
        without: What leaves the drawing out, and what then needs nothing.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(
            f"Drawing {what} takes matplotlib, which is not installed: pip install 'torch-spillway[pictures]' "
            f"adds it; without {without} nothing."
        )


def style_of(method: str, families: Sequence[Family]) -> tuple[str, str]:
    """Colour on light paper, and mark; the last family is for whatever else."""
    for family in families:
        if method in family.methods:
            return family.colour.light, MARKS[family.methods.index(method) % len(MARKS)]
    return families[-1].colour.light, "*"


def svg_of(draw: Callable[[], Figure], colours: Iterable[Colour], *, name: str = "", told: str = "") -> Markup:
    """A picture as an element of a page, its colours by the names that the page gives them.

    Texts are taken as they are: names may stand in them that look like formulas or like HTML.

    Arguments:
        name: Tells its elements from those of other pictures of the page.
        told: What it shows, for who cannot see it.
    """
    import matplotlib

    written = StringIO()
    with matplotlib.rc_context({
        "svg.fonttype": "none", "svg.hashsalt": f"spillway{name}", "font.family": "sans-serif",
        "text.parse_math": False,
    }):  # fmt: skip
        figure = draw()
        figure.patch.set_visible(False)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        # The reader's font is asked for the letters, and not the one that measures them here.
        with unwarned(UserWarning, "Glyph .* missing from font"):
            figure.savefig(written, format="svg", metadata=nothing)
    text = written.getvalue()
    text = re.sub(r'font-family: [^;"]*', "font-family: system-ui, sans-serif", text[text.index("<svg") :])
    for variable, colour in (*_PAGE, *((colour.variable, colour.light) for colour in colours)):
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1))
    if name:
        text = re.sub(r'<g id="[^"]*"', "<g", text)
    if told:
        text = text.replace("<svg", f'<svg role="img" aria-label="{escape(told)}"', 1)
    return Markup(text)


@functools.cache
def template(name: str) -> Template:
    """A page of this folder, with what pages need."""
    environment = Environment(
        loader=PackageLoader("spillway.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"nbytes": format_bytes, "duration": format_seconds, "share": format_share}
    return environment.get_template(name)


class End(NamedTuple):
    """What stands beside a line, in which colour, and where the line ends."""

    text: str
    colour: str
    x: float
    y: float

    def place_in(self, axes: Axes) -> tuple[float, float]:
        """Where that is, as shares of the axes."""
        x, y = axes.transAxes.inverted().transform(axes.transData.transform((self.x, self.y)))
        return float(x), float(y)

    def write(self, axes: Axes, place: tuple[float, float], *, before: bool = False, **how: Any) -> None:
        """The text, there in the axes, with a thin line to where its own ends: behind the text, or `before` it."""
        axes.annotate(
            self.text, xy=(self.x, self.y), xycoords="data", xytext=place, textcoords="axes fraction",
            color=self.colour, fontsize=9, ha="left" if before else "right", va="center", annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": self.colour, "linewidth": 0.5, "alpha": 0.5, "shrinkA": 1, "shrinkB": 3,
                "relpos": (0 if before else 1, 0.5),
            }, **how,
        )  # fmt: skip


def frameless(axes: Axes) -> None:
    """No frame, and a thin grid."""
    axes.tick_params(colors=SOFT, labelsize=9, length=0)
    axes.grid(color=LINE, linewidth=0.8, zorder=0)
    for side in axes.spines.values():
        side.set_visible(False)


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """Heights, at least `apart` from each other and otherwise as near as can be to the given ones."""
    order = sorted(range(len(heights)), key=lambda index: (heights[index], index))
    groups: list[tuple[float, list[int]]] = []  # where the lowest of each group would be, on average
    for place, index in enumerate(order):
        groups.append((heights[index] - apart * place, [index]))
        while len(groups) > 1 and groups[-2][0] >= groups[-1][0]:
            (above, over), (below, under) = groups.pop(), groups.pop()
            mean = (above * len(over) + below * len(under)) / (len(over) + len(under))
            groups.append((mean, under + over))
    placed = dict[int, float]()
    for base, members in groups:
        for index in members:
            placed[index] = base + apart * len(placed)
    return [placed[index] for index in range(len(heights))]
