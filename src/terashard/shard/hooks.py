r"""Drives the units of a sharded module from its forward and backward passes.

::

    pre-forward     bring its units, wait, show them; inputs cast; inputs' gradients watched
    forward
    post-forward    hide them (or keep, or cut to a smaller group); outputs' gradients watched
    ···
    gradient of an output comes     bring, wait, show (and issue the next one's gather)
    backward
    all its leaves have gradients, or those of its inputs are there      sum, hide

Several modules may share units: a pass is over when each of them ran once, or the root's is over.
Activation checkpointing runs forward again inside a backward pass. A unit that is in its own
backward then stays as it is; any other goes through a forward pass as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from terashard.errors import RunError
from terashard.shard.leaves import Use
from terashard.shard.loading import spread_plain
from terashard.shard.module_unit import ModuleUnit
from terashard.shard.moving import noting
from terashard.shard.nested import cast_floats, map_tensors, tensors_in
from terashard.shard.residence import UnitState
from terashard.shard.root import Root
from terashard.shard.rules import Pool, Rules
from terashard.shard.tree import plant, shardings_in


class Sharding:
    """What ``fully_shard`` knows of the modules of one call."""

    def __init__(
        self, modules: Sequence[nn.Module], units: Sequence[ModuleUnit], rules: Rules, pool: Pool
    ) -> None:
        self.modules = tuple(modules)
        self.units = tuple(units)
        self.rules = rules
        self.pool = pool
        self.root: Root | None = None
        self.is_root = False
        self.forward_prefetch: list[Sharding] = []
        self.backward_prefetch: list[Sharding] = []
        self.handles: list[RemovableHandle] = []
        self.is_open = False
        """Whether plain full parameters stand in the modules, for a look or a change."""
        self._to_run: set[nn.Module] = set()
        self._begun: dict[nn.Module, Use] = {}
        """Passes of modules that run now, if gradients are wanted."""
        self._depth = 0
        """How many forward passes of the modules are running, one inside the other."""
        self._is_entered = False
        """Whether a forward pass has begun and not come to its end."""
        self._is_in_backward = False
        for module in modules:
            self.handles += [
                module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.post_forward, prepend=False),
                module.register_forward_hook(self.leave, always_call=True),
                module.register_state_dict_pre_hook(self._before_state_dict),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(self._before_load),  # type: ignore[no-untyped-call]
            ]

    # ---- the passes -----------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the parameters full; cast and watch the inputs."""
        if self.is_open:
            raise RunError("full_parameters is open; leave it before the next forward pass")
        self._depth += 1
        self._is_entered = True
        root = self.settled(module)
        args, kwargs = self._cast(args), self._cast(kwargs)
        if self._runs_again(root):
            if not all(unit.is_active and unit.is_there for unit in self.units):
                self._bring(root, "backward")
            return args, kwargs
        if self._begins(module):
            self._to_run = set(self.modules)
            recomputed = _in_backward()
            if self.is_root and not recomputed:
                root.begin_forward()
            elif not root.is_in_forward and not recomputed:
                root.let_go(self.units)
            self._bring(root, "backward" if recomputed else "forward")
            for following in self.forward_prefetch:
                following.issue("forward")
        if torch.is_grad_enabled() and self._depth == 1:  # inside another, nothing ends here
            self._begun[module] = self._use()
            self._watch_inputs((args, kwargs), self._begun[module])
        return args, kwargs

    def post_forward(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Let go of the parameters, and watch the outputs."""
        root = self.settled(module)
        if self._depth > 1:
            return self._cast_output(output)
        self._is_entered = False
        if self._runs_again(root):
            return self._cast_output(output)
        self._to_run.discard(module)
        if torch.is_grad_enabled():
            use = self._begun.pop(module) if module in self._begun else self._use()
            output = self._watch_outputs(output, use)
        if not self._to_run:
            self._let_go()
        if self.is_root and not _in_backward():
            for other in root.shardings:
                if other is not self and other._to_run:
                    other._to_run = set()
                    other._let_go()
            root.end_forward()
        return self._cast_output(output)

    def leave(self, *_: Any) -> None:
        """A forward pass of a module is over; if it raised, the DTensors stand there again."""
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            self._begun.clear()
        if self._is_entered and self._depth == 0:
            self._is_entered = False
            if not _in_backward():
                self._retreat()

    def _begins(self, module: nn.Module) -> bool:
        """Whether a pass of all modules begins with ``module``.

        Not if it goes on, because other modules of the call ran before, or ``module`` calls itself
        by another method. One of which no module came to its end was broken off.
        """
        if self._depth > 1:
            return False
        return module not in self._to_run or self._to_run == set(self.modules)

    def pre_backward(self) -> None:
        """A gradient of an output came: make the parameters full for the backward pass."""
        root = self.root
        assert root is not None
        root.begin_backward()
        if self._is_in_backward and all(unit.is_active for unit in self.units):
            return
        self._is_in_backward = True
        if not self.rules.unshard_in_backward:
            return
        self._bring(root, "backward")
        for following in reversed(self.backward_prefetch):
            following.issue("backward")

    def post_backward(self) -> None:
        """The gradients of all inputs are there."""
        root = self.root
        if root is None or not root.is_in_backward:
            return
        self._is_in_backward = False
        for unit in self.units:
            if not unit.uses:
                root.ready(unit)

    def notes(self, module: nn.Module) -> AbstractContextManager[Any]:
        """What a forward pass of ``module`` must run under."""
        return noting(self.settled(module).slots.pool) if self.pool == "any" else nullcontext()

    # ---- by hand --------------------------------------------------------------------------------

    def issue(self, phase: str = "alone") -> None:
        """Issue the gathers of the units."""
        root = self.settled(self.modules[0])
        for unit in self.units:
            root.bring(unit, phase, ahead=True)

    def unshard(self) -> None:
        """Make the parameters full, until ``reshard``."""
        root = self.settled(self.modules[0])
        self.issue()
        for unit in self.units:
            root.show(unit)

    def reshard(self) -> None:
        """Let go of the full parameters."""
        for unit in self.units:
            unit.drop()

    @property
    def is_running(self) -> bool:
        """Whether a forward or backward pass of the modules, or of the tree, is going on."""
        root = self.root
        in_pass = root is not None and (root.is_in_forward or root.is_in_backward)
        return in_pass or bool(self._to_run) or _in_backward()

    def settled(self, module: nn.Module) -> Root:
        """The root of the tree; the first module that asks becomes it."""
        if self.root is None:
            plant(module, shardings_in(module))
        assert self.root is not None
        return self.root

    def _retreat(self) -> None:
        """A pass was broken off: let go, and wait for nothing that may never come."""
        for unit in self.units:
            unit.hide()
            if unit.state is not UnitState.GATHERING:
                unit.drop()

    # ---- pieces ---------------------------------------------------------------------------------

    def forget_backward(self) -> None:
        """Be in no backward pass: a new one begins, or one was broken off."""
        self._is_in_backward = False

    def _runs_again(self, root: Root) -> bool:
        return self._is_in_backward and root.is_in_backward and _in_backward()

    def _bring(self, root: Root, phase: str) -> None:
        for unit in self.units:
            root.bring(unit, phase)
        for unit in self.units:
            root.show(unit)
        root.look_ahead(phase)

    def _let_go(self) -> None:
        for unit in self.units:
            if unit.rules.reshard_after_forward is False:
                continue
            unit.hide()
            if torch.is_grad_enabled():
                unit.shrink()

    def _watch_inputs(self, inputs: Any, use: Use) -> None:
        """Be told when the gradients of all inputs are computed."""
        watched = [t for t in tensors_in(inputs) if t.requires_grad and t.grad_fn is not None]
        left = count = len(watched)

        def computed(_: Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                left = count  # a graph that is retained may be run again
                for unit in self.units:
                    for one in (unit, *unit.lenders):
                        one.uses.discard(use)
                self.post_backward()

        for tensor in watched:
            tensor.register_hook(computed)  # type: ignore[no-untyped-call]

    def _watch_outputs(self, output: Any, use: Use) -> Any:
        def came(_: Any) -> None:
            use.is_reached = True
            self.pre_backward()

        def watch(tensor: Tensor) -> Tensor:
            # On the node, not the tensor: an in-place operation on a view replaces the tensor's.
            base = tensor._base if tensor._is_view() else None
            for node in {tensor.grad_fn, None if base is None else base.grad_fn}:
                if node is not None:
                    node.register_prehook(came)
            return tensor

        return map_tensors(watch, output)

    def _use(self) -> Use:
        use = Use()
        for unit in self.units:
            for one in (unit, *unit.lenders):
                one.uses.add(use)
        return use

    def _cast(self, inputs: Any) -> Any:
        wanted = self.rules.precision.param_dtype
        if wanted is None or not self.rules.precision.cast_forward_inputs:
            return inputs
        return cast_floats(inputs, wanted)

    def _cast_output(self, output: Any) -> Any:
        wanted = self.rules.precision.output_dtype
        return output if wanted is None else cast_floats(output, wanted)

    def _before_state_dict(self, *_: Any) -> None:
        self.reshard()

    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.reshard()
        spread_plain(self.units, module, state, prefix)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
