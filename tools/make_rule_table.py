"""Writes docs/rules.md from src/surespec/rules/rules.toml: ``python tools/make_rule_table.py``."""

from __future__ import annotations

from pathlib import Path

from surespec.rules import Rule, rules

PAGE = Path(__file__).parents[1] / "docs" / "rules.md"
GROUPS = {
    "W": "When it fits",
    "B": "Before",
    "C": "Configuration",
    "P": "Proof",
    "F": "Faults",
    "D": "Dynamo",
    "M": "Memory",
    "V": "Versions",
    "H": "Heads and drafts",
    "E": "Engines",
    "G": "Beyond k",
    "K": "Number of tokens",
    "X": "Exactness",
}
INTRODUCTION = """# The rules

What `surespec plan` decides by, and what `surespec explain NAME` prints. Written by `tools/make_rule_table.py` from
`src/surespec/rules/rules.toml`; change that file, not this one.

S1 is the Jetson speculative-decoding skill (NVIDIA-AI-IOT/jetson-device-skills), S2 the speculative-decoding guide of
ai-dynamo/dynamo. Where sources disagree, the rule is the default and the other view stands under *but*.
"""


def cell(text: str) -> str:
    """Text for a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def row(rule: Rule) -> str:
    """One line of a table."""
    why = f"{rule.why} *But:* {rule.contradiction}" if rule.contradiction else rule.why
    return f"| {rule.name} | {cell(rule.rule)} | {cell(why)} | {cell(rule.source)} |"


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for letter, title in GROUPS.items():
        lines = [row(rule) for name, rule in rules().items() if name.startswith(letter)]
        parts.append(
            f"## {title}\n\n| Rule | What holds | Why | Source |\n|---|---|---|---|\n" + "\n".join(lines) + "\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
