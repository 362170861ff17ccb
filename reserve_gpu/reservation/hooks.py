"""What keeps frameworks of this very process within a part where a variable alone does not.

PyTorch before 2.10 has no variable, a later one may have been imported before it was set, and
TensorFlow has none at all. They are told as soon as the user's own code starts them, never before.
All of it is best effort: a framework that works otherwise is said to have no cap, and goes on.
"""

from __future__ import annotations

import sys
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import host
from reserve_gpu.model import MIB
from reserve_gpu.report import capping
from reserve_gpu.reservation import caps, environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from reserve_gpu.model import Device
    from reserve_gpu.reservation.caps import Cap

NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX", "cupy": "CuPy"}
NO_FRACTION = 1.0
CLOSE = 1e-6  # PyTorch answers with a fraction that it has computed anew from bytes


class Hook:
    """On sys.meta_path while a part is held: is told of what is imported.

    notes: what there is to say of the caps, as of the last call.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._cap: Cap | None = None
        self._theirs: Sequence[str] = ()  # the variables that are the user's
        self._fractions = {NO_FRACTION}  # that PyTorch may have, if the user has set none
        self._limits = {0}  # likewise of CuPy, in bytes
        self._is_queued = False  # in PyTorch's list of what to do once CUDA has started
        self._is_awaited = False  # TensorFlow's start
        self._tensorflow_mib: int | None = None  # that TensorFlow has started with
        # By thread and name: other finders may ask all the others as well, this one among them.
        self._searches: set[tuple[int, str]] = set()

    def install(self, cap: Cap, theirs: Sequence[str]) -> None:
        """Keep the frameworks of this process to it, those that it imports later as well.

        theirs: the variables of caps that the user has set.
        """
        before, self._cap, self._theirs, self.notes = self._cap, cap, theirs, []
        self._fractions.update(cap.fractions)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        steps = {"torch": self._torch, "tensorflow": self._tensorflow, "cupy": self._cupy}
        for name, step in steps.items():
            if sys.modules.get(name):
                self._try(name, step, self.notes.append)
        if _jax_runs() and before != cap and not set(theirs) & {*environment.XLA_NAMES}:
            self.notes.append(capping.keeps(NAMES["jax"]))

    def remove(self) -> None:
        """Let the frameworks go that can be let go, and hear of no import any more."""
        if self._cap is None:
            return
        self._cap, self.notes = None, []
        # A list of its own: an import of another thread that goes through the old one skips none.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        for name, step in {"torch": self._set_torch, "cupy": self._cupy}.items():
            if sys.modules.get(name):
                self._try(name, step, lambda _: None)

    # -- imports -----------------------------------------------------------------------------------

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What the other finders find, with a loader that says when it is done."""
        search = threading.get_ident(), name
        if name not in ("torch", "tensorflow") or search in self._searches:
            return None
        self._searches.add(search)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                if finder is self or find is None:
                    continue
                if spec := find(name, path, target):
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(spec.loader, lambda: self._imported(name))
                    return spec  # type: ignore[no-any-return]
        finally:
            self._searches.discard(search)
        return None

    def _imported(self, name: str) -> None:
        step = {"torch": self._torch, "tensorflow": self._tensorflow}[name]
        if self._cap is not None:
            self._try(name, step, _warn)

    def _try(self, name: str, step: Callable[[], object], say: Callable[[str], object]) -> None:
        """Whatever goes wrong in a framework's own parts, the user's code goes on."""
        try:
            step()
        except Exception as error:  # noqa: BLE001
            say(capping.uncapped(NAMES[name], error))

    # -- PyTorch -----------------------------------------------------------------------------------

    def _torch(self) -> None:
        """Cap it now if it has started CUDA, else as soon as it does.

        It goes through a list of calls then
        (https://github.com/pytorch/pytorch/blob/v2.9.1/torch/cuda/__init__.py, _lazy_call).
        """
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized():
            self._set_torch()
        elif not self._is_queued:
            queue = cuda._lazy_call  # noqa: SLF001 - no public way leads there
            queue(lambda: self._try("torch", self._set_torch, _warn))
            self._is_queued = True

    def _set_torch(self) -> None:
        cuda = sys.modules["torch"].cuda
        is_started = cuda.is_initialized() or self._cap is not None
        if not is_started or set(self._theirs) & {*environment.TORCH_NAMES}:
            return
        read = getattr(cuda, "get_per_process_memory_fraction", lambda _: NO_FRACTION)
        count = cuda.device_count()
        fractions = self._cap.fractions if self._cap else [NO_FRACTION] * count
        for number, fraction in enumerate(fractions[:count]):
            now = read(number)
            if any(abs(now - own) < CLOSE for own in self._fractions):
                cuda.set_per_process_memory_fraction(fraction, number)

    # -- CuPy --------------------------------------------------------------------------------------

    def _cupy(self) -> None:
        """Cap it anew if CUDA has started; before, it reads its variable."""
        limit = int(self._cap.room_mib * MIB) if self._cap else 0
        if environment.CUPY_LIMIT not in self._theirs and environment.cuda_started():
            cupy = sys.modules["cupy"]
            pool = cupy.get_default_memory_pool()
            for number in range(cupy.cuda.runtime.getDeviceCount()):
                with cupy.cuda.Device(number):
                    if pool.get_limit() in self._limits:
                        pool.set_limit(size=limit)
        self._limits.add(limit)

    # -- TensorFlow --------------------------------------------------------------------------------

    def _tensorflow(self) -> None:
        """Cap it as the first thing when it starts: after that it takes no other limit.

        https://www.tensorflow.org/api_docs/python/tf/config/set_logical_device_configuration
        """
        context = sys.modules["tensorflow.python.eager.context"].context()
        if context._context_handle is not None:  # noqa: SLF001 - asking in public starts it
            if self._cap and int(self._cap.room_mib) != self._tensorflow_mib:
                self.notes.append(capping.keeps(NAMES["tensorflow"]))
            return
        if self._is_awaited:
            return
        start = context.ensure_initialized

        def capped_start() -> None:
            if vars(context).pop("ensure_initialized", None):
                self._try("tensorflow", self._set_tensorflow, _warn)
            start()

        context.ensure_initialized = capped_start
        self._is_awaited = True

    def _set_tensorflow(self) -> None:
        self._is_awaited = False
        if self._cap is None:
            return
        config, room_mib = sys.modules["tensorflow"].config, int(self._cap.room_mib)
        for gpu in config.list_physical_devices("GPU"):
            if not config.get_logical_device_configuration(gpu):
                limit = config.LogicalDeviceConfiguration(memory_limit=room_mib)
                config.set_logical_device_configuration(gpu, [limit])
        self._tensorflow_mib = room_mib


class _Loader:
    """A loader that calls `done` once it has loaded its module, and then leaves no trace."""

    def __init__(self, loader: Any, done: Callable[[], object]) -> None:
        self._loader, self._done = loader, done

    def __getattr__(self, name: str) -> Any:
        # Without going in circles where there is none yet, as while it is copied.
        return getattr(object.__getattribute__(self, "_loader"), name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As its own loader does it."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As its own loader does it, and then what is to be done."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._done()


def install(devices: Sequence[Device], part_mib: float | None, theirs: Sequence[str]) -> list[str]:
    """Keep the frameworks of this process within a part of each of the devices, None for no part.

    theirs: the variables of caps that the user has set. Returns what to say of it.
    """
    if part_mib is None:
        remove()
        return []
    hook = _hook()
    hook.install(caps.cap(devices, part_mib), theirs)
    return hook.notes


def remove() -> None:
    """Let the frameworks go that can be let go."""
    _hook().remove()


def _hook() -> Hook:
    return host.kept("hook", Hook)


def _jax_runs() -> bool:
    """Whether JAX has started on a GPU; it reads its limit then, and never again."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    backends = getattr(bridge, "_backends", None)
    return isinstance(backends, dict) and "cuda" in backends


def _warn(text: str) -> None:
    """Say it in the midst of the user's code, which a warning must not end."""
    with suppress(Warning):
        warnings.warn(text, stacklevel=2)
