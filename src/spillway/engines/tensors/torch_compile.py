"""What `torch.compile` made: within a watched step it runs as it was written, op by op, and compiled again afterwards.

Kernels of a compiler would pass the engine by, and dynamo, left to itself, traces Python code of ours that runs below a
function. So it is not asked: a thread whose step is watched is told that nothing is to be compiled.
Other threads go on. Changing a module is global by nature, so the list of answers is too; with the last one it is as it
was. What is compiled only after dynamo was imported within a step is treated alike: that import is waited for.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, Final, final

from torch._C._dynamo.eval_frame import get_eval_frame_callback

from spillway.errors import SessionError
from spillway.internals.locks import renew_in_children

STEP_COMPILED: Final = (
    "A step of spillway.manage() begins within a function that torch.compile is running, and what is compiled cannot "
    "be watched: leave the step out of what is compiled, or use a method of the block engine, such as method='mimose', "
    "with blocks that are compiled by themselves."
)

_EVAL_FRAME: Final = "torch._dynamo.eval_frame"
_ASKED: Final = "_callback_from_stance"
"""The function of that module that is asked before anything runs compiled."""

_DISABLED: Final = "DisableContext."
"""How the functions of that module are named that have something left alone."""

_answers: Final[dict[int, Callable[[bool], bool]]] = {}
"""Who says whether something may run compiled, by the thread; told whether a higher-order operator asks for itself."""
_lock = threading.RLock()
renew_in_children(sys.modules[__name__], "_lock")


def check_not_compiling() -> None:
    """Raises SessionError within a compiled function."""
    if get_eval_frame_callback() is not None:
        raise SessionError(STEP_COMPILED)


def running_compiled() -> bool:
    """Whether this thread is within something compiled, also if that runs as it was written, and not within something
    that dynamo leaves alone there, as it does `torch.utils.checkpoint.checkpoint`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != _EVAL_FRAME:
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_qualname.startswith(_DISABLED)


def begin_eagerly(tell: Callable[[], None]) -> None:
    """From here on nothing runs compiled in this thread; `tell` hears of everything that would have."""

    def ask(itself: bool) -> bool:
        if not itself:
            tell()
        return itself

    _begin(ask)


def end_eagerly(thread: int) -> None:
    """What is compiled runs compiled again in the thread with this identifier."""
    with _lock:
        _answers.pop(thread, None)
        if not _answers:
            if _import in sys.meta_path:
                sys.meta_path.remove(_import)
            original: Any = getattr(sys.modules.get(_EVAL_FRAME), _ASKED, None)
            if hasattr(original, "__wrapped__"):
                setattr(sys.modules[_EVAL_FRAME], _ASKED, original.__wrapped__)


@contextlib.contextmanager
def asked_before(may: Callable[[], bool]) -> Iterator[None]:
    """Within, this thread runs something compiled only if `may` says so, and whoever was asked so far.

    To be asked before dynamo is: of code that it meets under a dispatch mode it compiles nothing ever again, and what
    compiles itself, as `flex_attention` does, then fails.
    """
    thread = threading.get_ident()
    before = _answers.get(thread)
    _begin(lambda itself: may() and (before is None or before(itself)))
    try:
        yield
    finally:
        if before is None:
            end_eagerly(thread)
        else:
            _begin(before)


def uncompiled(*functions: Any) -> None:
    """Where dynamo meets calls of these functions, between what it has compiled, it leaves them as they are."""
    eval_frame: Any = sys.modules.get(_EVAL_FRAME)
    for function in functions if eval_frame is not None else ():
        eval_frame.skip_code(function.__code__)


def _begin(ask: Callable[[bool], bool]) -> None:
    with _lock:
        _answers[threading.get_ident()] = ask
        if not _ask_first() and _import not in sys.meta_path:  # nothing is compiled before it is imported
            sys.meta_path.insert(0, _import)


def _ask_first() -> bool:
    """Stand in front of what dynamo is asked; False if it is not imported yet."""
    eval_frame: Any = sys.modules.get(_EVAL_FRAME)
    original = getattr(eval_frame, _ASKED, None)
    if original is not None and not hasattr(original, "__wrapped__"):
        setattr(eval_frame, _ASKED, _unless_refused(eval_frame, original))
    return original is not None


@final
class _Import:
    """Hears of dynamo's import, as a finder of modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As all others find it; then it is run with the question in front."""
        if name != _EVAL_FRAME:
            return None
        found = (one.find_spec(name, path, target) for one in list(sys.meta_path) if one is not self)
        spec = next((one for one in found if one is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = run
                run(module)
                with _lock:
                    if _answers:
                        _ask_first()

            loader.exec_module = exec_module
        return spec


_import: Final = _Import()


def _unless_refused(eval_frame: Any, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def callback_from_stance(callback: Any) -> Any:
        found, ask = original(callback), _answers.get(threading.get_ident())
        if found is None or ask is None or ask(_asks_for_itself(sys._getframe(2))):
            return found
        if eval_frame.set_fullgraph_compiled_frame_count(-1) >= 0:  # with fullgraph=True one frame at least is wanted
            eval_frame.set_fullgraph_compiled_frame_count(1)
        return None

    callback_from_stance.__wrapped__ = original  # type: ignore[attr-defined]
    return callback_from_stance


def _asks_for_itself(caller: FrameType) -> bool:
    """Higher-order operators have dynamo find what their functions close over, and run the graph op by op."""
    return str(caller.f_globals.get("__name__")).startswith(("torch._higher_order_ops.", "torch.nn.attention."))


def forget_steps() -> None:
    """In a forked child, where no step is watched."""
    _answers.clear()
    end_eagerly(threading.get_ident())
