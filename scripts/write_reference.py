"""Writes docs/reference/run-file.md from the schema: ``python scripts/write_reference.py``."""

from pathlib import Path

from terashard.config.fields import help_texts, keys, sections
from terashard.config.schema import RunConfig
from terashard.config.write import to_toml, value_of

PAGE = Path(__file__).parents[1] / "docs/reference/run-file.md"
HEADER = """# The run file, key by key

Made from the code by `scripts/write_reference.py`; `terashard config show` prints the same with the
values of a run. Every key is also an option of `train`, `resume`, `config show` and `schedule
show`: `--section.key value`. A key without a value is left open, and decided as its text says.
"""


def page() -> str:
    """The page as it should be."""
    texts, parts, defaults = help_texts(), [HEADER], RunConfig()
    for section, kind in sections().items():
        parts.append(f"\n## [{section}]\n\n{(kind.__doc__ or '').splitlines()[0]}\n")
        parts.append("| key | default | meaning |\n|---|---|---|")
        for dotted, key in keys().items():
            head, _, leaf = dotted.partition(".")
            if head == section:
                value = value_of(defaults, key)
                shown = "" if value is None else f"`{to_toml(value)}`"
                text = " ".join(texts[kind.__name__].get(leaf, "").split()).replace("|", "\\|")
                parts.append(f"| `{leaf}` | {shown} | {text} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
