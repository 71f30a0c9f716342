"""The schema as a table: every key of a run file with its section, type, default and help text.

Types, defaults and checks are stated once, in ``schema.py``; this module only reads them. A help
text is the string that stands under the field there.
"""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import pairwise
from typing import Any, get_type_hints

from terashard.config import schema
from terashard.config.nearest import closest


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a run file."""

    section: str
    name: str
    type: Any
    """The annotation, resolved."""
    default: Any
    help: str

    @property
    def dotted(self) -> str:
        """``section.name``, as messages and the command line write it."""
        return f"{self.section}.{self.name}"


@cache
def sections() -> Mapping[str, type]:
    """Section name → its dataclass, in the order of the schema."""
    return get_type_hints(schema.RunConfig)


@cache
def keys() -> Mapping[str, Key]:
    """Dotted name → key, in the order of the schema."""
    return {
        key.dotted: key for section, cls in sections().items() for key in _keys_of(section, cls)
    }


def nearest(name: str) -> str | None:
    """The dotted key that ``name`` most probably means, or None.

    A key of the right name in the wrong section comes first (``train.lr`` → ``optimizer.lr``), then
    a misspelt one.
    """
    section, _, leaf = name.rpartition(".")
    leaf = leaf.replace("-", "_")
    same = [dotted for dotted, key in keys().items() if key.name == leaf]
    if same:
        return same[0]
    here = {key.name: dotted for dotted, key in keys().items() if key.section == section}
    if close := closest(leaf, here):
        return here[close]
    if close := closest(f"{section}.{leaf}", keys(), cutoff=0.7):
        return close
    leaves = {key.name: dotted for dotted, key in keys().items()}
    close = closest(leaf, leaves, cutoff=0.7)
    return leaves[close] if close else None


@cache
def help_texts() -> Mapping[str, Mapping[str, str]]:
    """Class name → field name → the string that stands under the field in ``schema.py``."""
    module = ast.parse(inspect.getsource(schema))
    return {node.name: _texts_of(node) for node in module.body if isinstance(node, ast.ClassDef)}


def _texts_of(node: ast.ClassDef) -> dict[str, str]:
    texts: dict[str, str] = {}
    for before, after in pairwise(node.body):
        match before, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = inspect.cleandoc(text)
    return texts


def _keys_of(section: str, cls: type) -> list[Key]:
    hints, texts = get_type_hints(cls), help_texts()[cls.__name__]
    return [
        Key(
            section=section,
            name=field.name,
            type=hints[field.name],
            default=field.default if field.default_factory is MISSING else field.default_factory(),
            help=texts.get(field.name, ""),
        )
        for field in fields(cls)
    ]
