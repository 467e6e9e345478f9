"""How results are shown and kept: console, JSON Lines, JSON, Markdown, plots."""
