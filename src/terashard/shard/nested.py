"""Tensors inside what modules take and return: containers of the kinds that torch looks into.

A function of its own, not a closure that calls itself: such a closure is a reference cycle, and
tensors that it has seen would live until Python's collector comes by.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """``tree`` with ``function`` of every tensor in its place; other values stay as they are."""
    match tree:
        case Tensor():
            return function(tree)
        case PackedSequence():
            return tree._replace(data=function(tree.data))
        case OrderedDict():
            made = type(tree)()
            made.update((key, map_tensors(function, value)) for key, value in tree.items())
            return made
        case dict():
            return {key: map_tensors(function, value) for key, value in tree.items()}
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*(map_tensors(function, value) for value in tree))
        case list() | tuple() | set():
            return type(tree)(map_tensors(function, value) for value in tree)
        case _ if is_dataclass(tree) and not isinstance(tree, type):
            changes = {
                field.name: map_tensors(function, getattr(tree, field.name))
                for field in fields(tree)
            }
            return replace(tree, **changes)
        case _:
            return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor of ``tree``."""
    match tree:
        case Tensor():
            yield tree
        case PackedSequence():
            yield tree.data
        case dict():
            for value in tree.values():
                yield from tensors_in(value)
        case list() | tuple() | set():
            for value in tree:
                yield from tensors_in(value)
        case _ if is_dataclass(tree) and not isinstance(tree, type):
            for field in fields(tree):
                yield from tensors_in(getattr(tree, field.name))
        case _:
            return


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` with its floating-point tensors in ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, tree)
