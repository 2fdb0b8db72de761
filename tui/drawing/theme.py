"""Themes: what colours mean. Everything also has a word or a glyph, for users without them."""

from __future__ import annotations

from dataclasses import dataclass

from textual.theme import Theme


@dataclass(frozen=True)
class ColourTheme:
    """Styles, as rich reads them, by what they say."""

    textual_theme: Theme
    good: str
    warn: str
    bad: str
    dim: str
    accent: str
    weights: str
    kv: str
    prefetched: str
    graphs: str
    models: tuple[str, ...]
    """One for each model, in the order in which they are met, then from the start again."""
    strong: str = "bold"
    cursor: str = "reverse"
    """The row under the cursor: also seen where there are no colours."""

    def model(self, number: int) -> str:
        return self.models[number % len(self.models)]


DARK = ColourTheme(
    textual_theme=Theme(
        name="dark", primary="#61afef", secondary="#56b6c2", accent="#c678dd", warning="#e5b567",
        error="#e06c75", success="#7ec16e", foreground="#d8dee9", background="#101418",
        surface="#161b21", panel="#1d242c", dark=True,
    ),
    good="#7ec16e", warn="#e5b567", bad="#e06c75", dim="#7f8795", accent="#61afef",
    weights="#61afef", kv="#c678dd", prefetched="#56b6c2", graphs="#e5b567",
    models=(
        "#61afef", "#e5b567", "#c678dd", "#7ec16e", "#e06c75", "#56b6c2", "#d19a66", "#8fa7ff",
        "#ff9ac1", "#b5cc6a", "#9d8cff", "#5fd7a7",
    ),
)  # fmt: skip
LIGHT = ColourTheme(
    textual_theme=Theme(
        name="light", primary="#0550ae", secondary="#1b7c83", accent="#8250df", warning="#9a6700",
        error="#cf222e", success="#1a7f37", foreground="#24292f", background="#fbfbf8",
        surface="#f2f2ee", panel="#e6e6e0", dark=False,
    ),
    good="#1a7f37", warn="#9a6700", bad="#cf222e", dim="#6e7781", accent="#0550ae",
    weights="#0550ae", kv="#8250df", prefetched="#1b7c83", graphs="#9a6700",
    models=(
        "#0550ae", "#9a6700", "#8250df", "#1a7f37", "#cf222e", "#1b7c83", "#953800", "#3f51b5",
        "#bf3989", "#55730b", "#6639ba", "#00735c",
    ),
)  # fmt: skip
COLOUR_BLIND = ColourTheme(
    # The eight colours of Okabe and Ito, which differ for every kind of colour vision.
    textual_theme=Theme(
        name="colour-blind", primary="#56b4e9", secondary="#009e73", accent="#cc79a7",
        warning="#f0e442", error="#d55e00", success="#56b4e9", foreground="#e8e8e8",
        background="#101010", surface="#181818", panel="#222222", dark=True,
    ),
    good="#56b4e9", warn="#f0e442", bad="bold #d55e00", dim="#8c8c8c", accent="#56b4e9",
    weights="#0072b2", kv="#e69f00", prefetched="#009e73", graphs="#cc79a7",
    models=(
        "#56b4e9", "#e69f00", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#bbbbbb",
    ),
)  # fmt: skip
THEMES = {theme.textual_theme.name: theme for theme in (DARK, LIGHT, COLOUR_BLIND)}
