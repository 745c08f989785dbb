"""Blocks that were compiled with `block.compile()`, and compilations that would pass blocks by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, cast, final

import torch
from torch import nn

from spillway.engines.blocks.hook import Bypassed, Hook, OwnForward
from spillway.errors import ModelError

_NAME: Final = "_compiled_call_impl"


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled itself, by its own `compile` or by `torch.compile`."""
    return hasattr(module, "_orig_mod") or vars(module).get(_NAME) is not None


@final
class CompiledHook:
    """Stands in front of what `block.compile()` has put in front of the block. Copies of the module lose both.

    Dynamo leaves the hook alone and compiles what it calls.
    """

    def __init__(self, module: nn.Module, instead: Callable[..., Any]) -> None:
        self.module = module
        self.original: Callable[..., Any] = vars(module)[_NAME]
        disable = cast(Callable[..., Callable[..., Any]], torch._dynamo.disable)  # imported when the block was compiled
        self._mine = disable(instead, recursive=False)

    @property
    def replaced(self) -> bool:
        """Whether the block was compiled anew since."""
        return vars(self.module).get(_NAME) is not self._mine

    def install(self) -> None:
        vars(self.module)[_NAME] = self._mine

    def remove(self) -> None:
        """Leave everything as it was found."""
        if not self.replaced:
            vars(self.module)[_NAME] = self.original

    @contextlib.contextmanager
    def back(self) -> Iterator[None]:
        """Stand there for a while, also after `remove`."""
        found = vars(self.module).get(_NAME)
        self.install()
        try:
            yield
        finally:
            vars(self.module)[_NAME] = found


def in_front_of(module: nn.Module) -> OwnForward:
    """Gives what a call of this module calls, and a hook has to stand in front of."""
    return OwnForward(module, vars(module).get(_NAME))


HOOKS: Final = (Hook, CompiledHook)


def hook_for(module: nn.Module, instead: Callable[..., Any], owner: Bypassed) -> Hook | CompiledHook:
    """A hook for a block, compiled or not."""
    return Hook(module, instead, owner) if vars(module).get(_NAME) is None else CompiledHook(module, instead)


def check_compiled(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Blocks may be compiled, and parts of them; what they are parts of may not. Raises ModelError if a compiled module
    has blocks inside."""
    chosen = {module: name for name, module in blocks.items()}
    for name, module in model.named_modules():
        inside = (chosen[part] for part in module.modules() if part is not module and part in chosen)
        first = next(inside, None) if is_compiled(module) else None
        if first is not None:
            raise ModelError(passes_by(f"{name or 'The model'} is compiled as a whole, and so", first))


def passes_by(compiled: str, block: str) -> str:
    """The sentence about a block that is part of something compiled, as is seen of modules that are, or while a forward
    runs."""
    return (
        f"{compiled} passes its block {block} by; compile the blocks instead ({block}.compile()) before they are "
        f"managed, or do not compile."
    )


def check_still(hook: Hook | CompiledHook, name: str) -> None:
    """A block is as it was when it was managed. Raises ModelError if it was compiled since."""
    if hook.replaced if isinstance(hook, CompiledHook) else vars(hook.module).get(_NAME) is not None:
        raise ModelError(
            f"{name} was compiled after it had been managed, and so would pass its actions by; close the engine, "
            f"compile the block, and open the engine again."
        )


@contextlib.contextmanager
def uncompiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, modules run as they were before their own `compile`."""
    before = {module: vars(module)[_NAME] for module in modules if vars(module).get(_NAME) is not None}
    for module in before:
        vars(module)[_NAME] = None
    try:
        yield
    finally:
        for module, compiled in before.items():
            vars(module)[_NAME] = compiled
