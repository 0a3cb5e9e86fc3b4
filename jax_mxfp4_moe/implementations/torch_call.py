"""Python half of the bridge: JAX arrays reach a Python callable as torch tensors, inside `jax.jit`.

A `Plan` says what one call is: buffers in, buffers out, workspace, and the Python callable. `call` puts it into a JAX
program. Three ways lead to the callable:

  "eager"     an XLA custom call. The tensors are XLA's own buffers, nothing is copied.
  "graph"     the same custom call with the trait that lets XLA record it into a command buffer on a GPU, so that
              replays run no Python. On a CPU it is the same as "eager".
  "callback"  `jax.pure_callback`: numpy in, numpy out, through the host. For when the extension cannot load.

The rules of ownership, stream, interpreter lock and floating-point mode are numbered in bridge/README.md.
"""

from __future__ import annotations

import atexit
import collections
import contextvars
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import math
import os
import pathlib
import re
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import ml_dtypes
import numpy as np

from jax_mxfp4_moe import device

BRIDGES = ("graph", "eager", "callback")
ENVIRONMENT_VARIABLE = "JAX_MXFP4_MOE_BRIDGE"
DEBUG_VARIABLE = "JAX_MXFP4_MOE_DEBUG"  # set to anything: a callable that writes to an input fails
WORKSPACE_ALIGNMENT = 256
MAX_PLANS = 1024
MIN_JAXLIB = (0, 10)
PLATFORMS = ("cpu", "CUDA", "ROCM")  # XLA's names
TARGETS = {"eager": "jax_mxfp4_moe_eager", "graph": "jax_mxfp4_moe_graph"}

# Every dtype the bridge carries, and the integer it travels as where numpy and torch do not share it (callback only).
_DTYPES: dict[str, str | None] = {
    "bfloat16": "int16",
    "float16": None,
    "float32": None,
    "uint8": None,
    "int8": None,
    "int32": None,
    "int64": None,
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e8m0fnu": "uint8",
    "bool": None,
}
_MODES = ("torch", "pointers", "gil", "noop")  # all but "torch" are for benchmarks and for machines without torch


class BridgeFallbackWarning(UserWarning):
    """The compiled bridge cannot be used, so calls go through `jax.pure_callback`. Given once, with the reason."""


@dataclasses.dataclass(frozen=True)
class BufferSpec:
    """Shape and dtype name of one buffer, for example `BufferSpec((16, 64), "bfloat16")`."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        object.__setattr__(self, "dtype", str(self.dtype))
        if self.dtype not in _DTYPES:
            remedy = (
                "Bitcast it to uint8, two codes a byte, even element in the low nibble."
                if "float4" in self.dtype or "int4" in self.dtype
                else "Cast or bitcast it to one of these."
            )
            raise ValueError(f"BufferSpec: dtype {self.dtype!r}, expected one of {', '.join(_DTYPES)}. {remedy}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"BufferSpec: shape {self.shape}, expected sizes of at least 0. Give a static shape.")

    @functools.cached_property
    def nbytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next along each axis."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype as numpy has it, with the help of ml_dtypes."""
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


# ---------------------------------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_recent: collections.OrderedDict[int, Plan] = collections.OrderedDict()  # bounded; keeps plans that only a trace knows
_plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()  # every living plan


class Plan:
    """What one call is: its buffers, its workspace and the Python callable that fills the outputs.

    Plans are interned: building one with a `name` and `key` that are alive returns the first one, whose `run` stays in
    use. `key` must therefore determine everything that `run` does. It must also have the same `repr` in every process,
    since the program carries only a digest of it: that is how a program that a persistent cache compiled earlier finds
    the plan again.

    Args:
      name: shown in errors.
      key: hashable static configuration.
      run: `run(inputs, outputs, workspace)`. Lists of torch tensors and a uint8 tensor or None. It reads inputs, writes
        every output, keeps no view of any of them, and returns nothing. It runs without gradients. On a GPU torch's
        current device and stream are XLA's; it must not wait for the device, use other streams, or allocate if
        `capturable`. The content of outputs and workspace is undefined on entry.
      inputs, outputs: the buffers in order.
      workspace_bytes: size of the workspace, which XLA allocates; see `workspace_slots`.
      capturable: whether `run` may be recorded into a command buffer. It must then launch work on every call.
      warm: `warm(device)`, called once for each device before the first `run` and never during a capture.
    """

    name: str
    key: Hashable
    run: Callable[[list, list, Any], None]
    inputs: tuple[BufferSpec, ...]
    outputs: tuple[BufferSpec, ...]
    workspace_bytes: int
    capturable: bool
    warm: Callable[[Any], None] | None
    mode: str
    id: int
    _native: Any  # C++'s side, a capsule; None until the first compiled call
    _preparation: _Preparation
    _on_host: Callable[..., tuple[np.ndarray, ...]]

    def __new__(
        cls,
        name: str,
        key: Hashable,
        run: Callable[[list, list, Any], None],
        inputs: Sequence[BufferSpec],
        outputs: Sequence[BufferSpec],
        workspace_bytes: int = 0,
        capturable: bool = False,
        warm: Callable[[Any], None] | None = None,
        *,
        mode: str = "torch",
    ) -> Plan:
        """Builds the plan, or returns the one that has this name and key."""
        if mode not in _MODES:
            raise ValueError(f"Plan: mode={mode!r}, expected one of {', '.join(_MODES)}.")
        facts = (name, key, tuple(inputs), tuple(outputs), int(workspace_bytes), bool(capturable), mode)
        plan_id = _digest(name, key)
        with _lock:
            plan = _plans.get(plan_id)
            if plan is None:
                plan = super().__new__(cls)
                plan.name, plan.key, plan.inputs, plan.outputs, plan.workspace_bytes, plan.capturable, plan.mode = facts
                plan.run, plan.warm, plan.id = run, warm, plan_id
                plan._preparation = _Preparation(warm)
                plan._native = None
                plan._on_host = functools.partial(_run_on_host, plan)  # one object, so that JAX's caches hit
                _plans[plan_id] = plan
            elif (plan.name, plan.key) != (name, key):
                raise ValueError(
                    f"Plan: {name!r} with key {key!r} has the same 64-bit digest as {plan.name!r} with key "
                    f"{plan.key!r}. Change either key."
                )
            elif plan._facts() != facts:
                raise ValueError(
                    f"Plan: {name!r} with key {key!r} exists with other buffers or settings: given {facts[2:]}, "
                    f"expected {plan._facts()[2:]}. Put what differs into the key."
                )
            _recent[plan_id] = plan
            _recent.move_to_end(plan_id)
            while len(_recent) > MAX_PLANS:
                _recent.popitem(last=False)
        return plan

    def _facts(self) -> tuple:
        return (
            self.name,
            self.key,
            self.inputs,
            self.outputs,
            self.workspace_bytes,
            self.capturable,
            self.mode,
        )

    @property
    def calls(self) -> int:
        """How often the compiled bridge has called `run`."""
        return _load().module.plan_calls(self._native) if self._native is not None else 0

    @property
    def results(self) -> tuple[BufferSpec, ...]:
        """The outputs, then the workspace if there is one: what the custom call returns."""
        if not self.workspace_bytes:
            return self.outputs
        return (*self.outputs, BufferSpec((self.workspace_bytes,), "uint8"))

    def __repr__(self) -> str:
        buffers = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"
        return f"Plan({self.name!r}, {buffers}, workspace_bytes={self.workspace_bytes}, capturable={self.capturable})"


def _digest(name: str, key: Hashable) -> int:
    hash(key)  # a list or an array is refused here
    text = repr((name, key))
    if " at 0x" in text:
        raise ValueError(
            f"Plan: the repr of key {text} contains a memory address, expected the same text in every process. "
            "Use names and numbers."
        )
    digest = hashlib.blake2b(f"{_package_version()}\n{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@functools.cache
def _package_version() -> str:
    try:
        return importlib.metadata.version("jax_mxfp4_moe")
    except importlib.metadata.PackageNotFoundError:
        return "source"  # used from a source tree


def workspace_slots(specs: Sequence[BufferSpec]) -> tuple[tuple[tuple[int, BufferSpec], ...], int]:
    """Lays buffers out in a workspace, each at a multiple of 256 bytes.

    Returns:
      the slots that `carve` takes, as (offset, spec); and the number of bytes they need.
    """
    slots, offset = [], 0
    for spec in specs:
        slots.append((offset, spec))
        offset += -(-spec.nbytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return tuple(slots), offset


def carve(workspace: Any, slots: Sequence[tuple[int, BufferSpec]]) -> list:
    """The tensors of `slots` inside a uint8 workspace tensor. Views: they must not outlive the call either."""
    import torch

    # The workspace as each type: one more view a buffer then does it, which counts in every call.
    whole: dict[str, Any] = {}
    tensors = []
    for offset, spec in slots:
        if (base := whole.get(spec.dtype)) is None:
            dtype = getattr(torch, spec.dtype)
            base = workspace[: workspace.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            whole[spec.dtype] = base
        start = base.storage_offset() + offset // base.element_size()
        tensors.append(base.as_strided(spec.shape, spec.strides, start))
    return tensors


def run_with_triton(scratch: Any, body: Callable[..., Any], *arguments: Any) -> Any:
    """Runs `body(*arguments)`, whose Triton kernels take their global scratch from `scratch` and may not be autotuned.

    Triton asks an allocator for the scratch of kernels that need one (tensor descriptors made on the device). The
    allocator is a context variable, so XLA's threads have none, and torch's would allocate inside a capture. Whatever the
    caller's thread has set is back afterwards.

    Args:
      scratch: uint8 tensor, a part of the call's workspace; None for kernels that need no scratch.
      body: launches kernels. They must have been tuned and compiled in the plan's `warm`.
      *arguments: passed on.

    Raises:
      RuntimeError: the scratch is too small, or a kernel wants to autotune.
    """
    import triton

    taken = 0

    def allocate(size: int, alignment: int, stream: int | None) -> Any:
        nonlocal taken
        start = -(-taken // alignment) * alignment
        available = 0 if scratch is None else scratch.numel()
        if start + size > available:
            raise RuntimeError(
                f"a Triton kernel asked for {size} bytes of scratch after {taken}, and the plan's workspace has {available}. "
                "Give the plan a larger workspace_bytes."
            )
        taken = start + size
        return scratch[start:taken]

    def bound() -> Any:
        triton.set_allocator(allocate)
        _in_execute.set(True)
        return body(*arguments)

    _refuse_autotuning()
    return contextvars.copy_context().run(bound)


_in_execute: contextvars.ContextVar[bool] = contextvars.ContextVar("_in_execute", default=False)


@functools.cache
def _refuse_autotuning() -> None:
    """Makes an autotuner that wants to measure inside `run_with_triton` raise: it would time, allocate and wait there."""
    from triton.runtime.autotuner import Autotuner

    measure = Autotuner._bench

    @functools.wraps(measure)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _in_execute.get():
            raise RuntimeError(
                f"Triton kernel {getattr(self.base_fn, '__name__', self)!r} wants to autotune inside a call. "
                "Tune it in the plan's warm, on the shapes of the plan."
            )
        return measure(self, *args, **kwargs)

    Autotuner._bench = guarded


# ---------------------------------------------------------------------------------------------------------------------
# The call
# ---------------------------------------------------------------------------------------------------------------------


def call(plan: Plan, *operands: Any, bridge: str | None = None) -> tuple[jax.Array, ...]:
    """Runs `plan` on JAX arrays, inside or outside `jax.jit`, and returns its outputs.

    Under `jax.vmap` the plan runs once for each slice. It has no derivative: wrap it in `jax.custom_vjp`.

    Args:
      plan: what to run.
      *operands: arrays with exactly the shapes and dtypes of `plan.inputs`.
      bridge: "graph", "eager" or "callback"; None chooses. Fixed when the function is traced, as is the environment
        variable JAX_MXFP4_MOE_BRIDGE, which counts where `bridge` is None.

    Raises:
      ValueError: wrong operands, or an unknown bridge.
      NotImplementedError: "graph" was asked for and the plan cannot be captured.
      ImportError: "graph" or "eager" was asked for and the extension cannot be used.
    """
    chosen = _choose(plan, bridge)
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64 and any(
        spec.dtype == "int64" for spec in (*plan.inputs, *plan.outputs)
    ):
        raise ValueError(
            f"call: {plan.name} has an int64 buffer, expected none while jax_enable_x64 is off. Use int32."
        )
    operands = tuple(jnp.asarray(operand) for operand in operands)
    given = tuple((operand.shape, str(operand.dtype)) for operand in operands)
    if given != tuple((spec.shape, spec.dtype) for spec in plan.inputs):
        shown = ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in given)
        raise ValueError(
            f"call: {plan.name} was given ({shown}), expected ({', '.join(map(str, plan.inputs))}). "
            "Build the plan from the operands' own shapes and dtypes."
        )
    if chosen == "callback":
        shapes = [jax.ShapeDtypeStruct(spec.shape, spec.numpy_dtype) for spec in plan.outputs]
        return tuple(jax.pure_callback(plan._on_host, shapes, *operands, vmap_method="sequential"))
    _make_native(plan)
    _warm_early(plan)
    shapes = [jax.ShapeDtypeStruct(spec.shape, spec.numpy_dtype) for spec in plan.results]
    custom_call = jax.ffi.ffi_call(TARGETS[chosen], shapes, vmap_method="sequential")
    return tuple(custom_call(*operands, plan=np.int64(plan.id), plan_name=plan.name)[: len(plan.outputs)])


def why_not(bridge: str) -> str | None:
    """None if `bridge` can be used in this process, else a sentence that says why not."""
    if bridge not in BRIDGES:
        raise ValueError(f"why_not: bridge={bridge!r}, expected one of {', '.join(BRIDGES)}.")
    return None if bridge == "callback" else _load().reason


def _choose(plan: Plan, bridge: str | None) -> str:
    source = "bridge"
    if bridge is None and os.environ.get(ENVIRONMENT_VARIABLE):
        bridge, source = os.environ[ENVIRONMENT_VARIABLE], ENVIRONMENT_VARIABLE
    if bridge is None:
        reason = why_not("eager")
        if reason is not None:
            _warn_once(reason)
            return "callback"
        return "graph" if plan.capturable and _captures_by_default() else "eager"
    if bridge not in BRIDGES:
        raise ValueError(f"call: {source}={bridge!r}, expected one of {', '.join(BRIDGES)}. Leave it unset to choose.")
    if bridge == "graph" and not plan.capturable:
        raise NotImplementedError(
            f"call: {source}='graph' was asked for, but plan {plan.name!r} cannot be recorded into a command buffer "
            "(capturable=False), expected a capturable plan. Use bridge='eager' or leave it unset."
        )
    reason = why_not(bridge)
    if reason is not None:
        raise ImportError(
            f"call: {source}={bridge!r} was asked for, but {reason}. Repair the installation, or use "
            "bridge='callback', which goes through the host."
        )
    return bridge


def _captures_by_default() -> bool:
    """Whether an unset `bridge` means "graph" for a capturable plan: on CUDA. ROCm waits for its tests (T46)."""
    return device.platforms()[0] == "cuda"


_warned = False


def _warn_once(reason: str) -> None:
    global _warned
    with _lock:
        if _warned:
            return
        _warned = True
    warnings.warn(
        f"jax_mxfp4_moe: {reason}. Calls go through jax.pure_callback instead, which copies every buffer through the "
        "host. Repair the installation, or set bridge='callback' to accept this without a warning.",
        BridgeFallbackWarning,
        stacklevel=4,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The compiled extension
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """The extension after an attempt to load and register it: `reason` is None exactly if it can be used."""

    module: Any
    reason: str | None
    registered: tuple[str, ...] = ()


def _load() -> _Loaded:
    """Loads the extension and registers its targets, once for each process."""
    with _lock:  # functools.cache alone lets two first callers both run
        return _load_once()


@functools.cache
def _load_once() -> _Loaded:
    version = _numbers(jaxlib.__version__)
    if version < MIN_JAXLIB:
        return _Loaded(None, f"the bridge needs jaxlib {'.'.join(map(str, MIN_JAXLIB))}, found {jaxlib.__version__}")
    try:
        module = importlib.import_module("jax_mxfp4_moe._bridge")
    except ImportError as error:
        return _Loaded(None, f"the compiled extension jax_mxfp4_moe._bridge cannot be loaded ({error})")
    # XLA runs handlers up to its own version. A newer one is not merely refused: its backend no longer starts.
    runtime = _runtime_ffi_version()
    if runtime is not None and module.ffi_api_version > runtime:
        return _Loaded(
            None,
            f"the extension was built for XLA FFI API {_dotted(module.ffi_api_version)}, but jaxlib "
            f"{jaxlib.__version__} has {_dotted(runtime)}",
        )
    module.set_error_formatter(_format_error)
    return _register(module)


def _register(module: Any) -> _Loaded:
    # A plugin that starts later would be given queued targets before their state type, and would refuse them. So let
    # all backends start first. Those of absent platforms stay queued, which does nothing.
    jax.local_devices()
    registered: list[str] = []
    for platform in PLATFORMS:
        handlers = module.handlers(platform)
        try:
            jax.ffi.register_ffi_type(f"jax_mxfp4_moe_plan_{platform}", handlers["type"], platform=platform)
            for bridge, target in TARGETS.items():
                jax.ffi.register_ffi_target(target, handlers[bridge], platform=platform)
        except Exception as error:  # noqa: BLE001 - whatever the runtime raises is the reason
            return _Loaded(module, f"{platform} refused the bridge's handlers ({error})", tuple(registered))
        registered.append(platform)
    return _Loaded(module, None, tuple(registered))


def _runtime_ffi_version() -> tuple[int, int] | None:
    """The XLA FFI API version of the installed jaxlib, from its own header; None if it ships none."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.is_file():
        return None
    text = header.read_text(encoding="utf-8")
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    return (int(major[1]), int(minor[1])) if major and minor else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _make_native(plan: Plan) -> None:
    """Builds the C++ side of a plan, once."""
    with _lock:
        if plan._native is not None:
            return
        if plan.mode == "torch":
            _bind_torch()
        plan._native = _load().module.make_plan(
            plan.id,
            plan.name,
            _watched(plan) if os.environ.get(DEBUG_VARIABLE) and plan.mode == "torch" else plan.run,
            plan._preparation if plan.mode == "torch" else None,
            [(spec.dtype, spec.shape) for spec in plan.inputs],
            [(spec.dtype, spec.shape) for spec in plan.results],
            plan.workspace_bytes > 0,
            plan.mode,
        )


def _watched(plan: Plan) -> Callable[[list, list, Any], None]:
    """`plan.run`, failing if a torch operation wrote to an input, which XLA may have handed to someone else as well.

    Seen by torch's version counters, so kernels that are not torch operations go unseen.
    """
    run, name = plan.run, plan.name

    def watched(inputs: list, outputs: list, workspace: Any) -> None:
        before = [tensor._version for tensor in inputs]
        run(inputs, outputs, workspace)
        written = [
            i for i, (tensor, version) in enumerate(zip(inputs, before, strict=True)) if tensor._version != version
        ]
        if written:
            raise RuntimeError(
                f"{name}: its callable wrote to input {', '.join(map(str, written))}, expected inputs to be left alone. "
                "Write to an output or to the workspace."
            )

    return watched


# ---------------------------------------------------------------------------------------------------------------------
# What C++ calls
# ---------------------------------------------------------------------------------------------------------------------


def _warm_early(plan: Plan) -> None:
    """Warms a plan for the default GPU while it is traced; INITIALIZE finds it warm there, and does the other devices."""
    platform = device.platforms()[0]
    if plan.warm is not None and platform in ("cuda", "rocm"):
        plan._preparation(jax.local_devices()[0].local_hardware_id or 0, platform.upper())


class _Preparation:
    """`prepare(ordinal, platform)`: once for each device, before the first run there and outside any capture."""

    def __init__(self, warm: Callable[[Any], None] | None):
        self._warm = warm
        self._done: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, ordinal: int, platform: str) -> None:
        import torch

        with self._lock:
            if ordinal in self._done:
                return
            if platform == "cpu":
                where = torch.device("cpu")
            else:
                _check_torch_gpu(ordinal, platform)
                where = torch.device("cuda", ordinal)
            if self._warm is not None:
                with torch.no_grad(), where:
                    self._warm(where)
            self._done.add(ordinal)


def _check_torch_gpu(ordinal: int, platform: str) -> None:
    """torch must see the device that XLA calls `ordinal` on `platform`, under the same number."""
    import torch

    built_for = "ROCM" if torch.version.hip else "CUDA" if torch.version.cuda else "cpu"
    if built_for != platform:
        raise RuntimeError(
            f"the buffers are on {platform}, but torch {torch.__version__} was built for {built_for}, expected the "
            f"same. Install the {platform} build of torch."
        )
    torch.cuda.init()
    if ordinal >= torch.cuda.device_count():
        raise RuntimeError(
            f"XLA runs on device {ordinal}, but torch sees {torch.cuda.device_count()} devices, expected the same "
            "devices in the same order. Set CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES before importing either."
        )


def _bind_torch(*, route: str | None = None) -> str:
    """Hands torch's C functions to C++. `route` forces "capsule" in tests. Returns the route in use."""
    global _tensor_route
    import torch

    with _lock:
        if _tensor_route is not None and route is None:
            return _tensor_route
        gpu = torch.version.hip is not None or torch.version.cuda is not None
        _tensor_route = _load().module.bind_torch(
            None if route == "capsule" else getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
            torch._C._from_dlpack,
            torch.is_grad_enabled,
            torch._C._set_grad_enabled,
            *_grad_mode_addresses(),
            torch._C._cuda_exchangeDevice if gpu else None,
            torch._C._cuda_getCurrentStream if gpu else None,
            torch._C._cuda_setStream if gpu else None,
            _stream_key if gpu else None,
        )
        return _tensor_route


_tensor_route: str | None = None


def _grad_mode_addresses() -> tuple[int, int]:
    """Addresses of c10::GradMode's `is_enabled()` and `set_enabled(bool)` in the libc10 that torch has loaded, or 0."""
    import torch

    path = pathlib.Path(torch.__file__).parent / "lib" / "libc10.so"
    if not path.is_file():
        return 0, 0
    library = ctypes.CDLL(str(path))

    def address(name: str) -> int:
        symbol = getattr(library, name, None)
        return 0 if symbol is None else ctypes.cast(symbol, ctypes.c_void_p).value or 0

    return address("_ZN3c108GradMode10is_enabledEv"), address("_ZN3c108GradMode11set_enabledEb")


def _stream_key(pointer: int, ordinal: int) -> tuple[int, int, int]:
    import torch

    stream = torch.cuda.ExternalStream(pointer, device=ordinal)
    return stream.stream_id, stream.device_index, stream.device_type


def _format_error(error: BaseException) -> str:
    """Type, message and traceback. Also clears the frames, so that they keep no view of the call's buffers."""
    text = f"{type(error).__name__}: {error}\n\n{''.join(traceback.format_exception(error))}"
    seen: set[int] = set()
    pending = [error]
    while pending:
        error = pending.pop()
        if id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            pending += [other for other in (error.__cause__, error.__context__) if other is not None]
    return text


@atexit.register
def _close() -> None:
    """From here on the interpreter goes away: let no runtime thread in, and wait for those that are inside."""
    if _load_once.cache_info().currsize and _load_once().module is not None:
        _load_once().module.close(timeout_seconds=30.0)


# ---------------------------------------------------------------------------------------------------------------------
# Fallback
# ---------------------------------------------------------------------------------------------------------------------


def _run_on_host(plan: Plan, *arrays: Any) -> tuple[np.ndarray, ...]:
    """The body of the callback. It must not call JAX: a runtime thread waits for it."""
    inputs = [np.asarray(array) for array in arrays]
    for array, spec in zip(inputs, plan.inputs, strict=True):
        if array.shape != spec.shape or array.dtype != spec.numpy_dtype:
            raise ValueError(f"{plan.name}: the callback was given {array.dtype}{list(array.shape)}, expected {spec}.")
    outputs = tuple(np.empty(spec.shape, spec.numpy_dtype) for spec in plan.outputs)
    workspace = np.empty(plan.workspace_bytes, np.uint8) if plan.workspace_bytes else None
    if plan.mode == "pointers":
        given, written = ([array.ctypes.data for array in side] for side in (inputs, outputs))
        plan.run(given, written, None if workspace is None else workspace.ctypes.data)
    if plan.mode != "torch":
        return outputs
    import torch

    plan._preparation(0, "cpu")
    flushes = bool(np.float32(1e-40) * np.float32(1) == 0)  # rule 9, without the extension
    if flushes:
        torch.set_flush_denormal(False)
    try:
        with torch.no_grad():
            plan.run(
                [_tensor(array, spec) for array, spec in zip(inputs, plan.inputs, strict=True)],
                [_tensor(array, spec) for array, spec in zip(outputs, plan.outputs, strict=True)],
                None if workspace is None else torch.from_numpy(workspace),
            )
    finally:
        if flushes:
            torch.set_flush_denormal(True)
    return outputs


def _tensor(array: np.ndarray, spec: BufferSpec) -> Any:
    """A torch tensor on the memory of `array`, by way of an integer where torch refuses numpy's dtype."""
    import torch

    carrier = _DTYPES[spec.dtype]
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    if carrier is not None:
        array = array.view(carrier)
    tensor = torch.from_numpy(np.asarray(_Memory(array)))
    return tensor.view(getattr(torch, spec.dtype)) if carrier is not None else tensor


class _Memory:
    """An array's memory without its read-only flag, which torch has no equivalent for and warns about."""

    def __init__(self, array: np.ndarray):
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


# ---------------------------------------------------------------------------------------------------------------------
# For the doctor and for tests
# ---------------------------------------------------------------------------------------------------------------------


def counters() -> dict[str, int]:
    """Counts since the process started: calls into Python, views kept, and how often XLA ran the other stages."""
    module = _load().module
    return {} if module is None else module.counters()


def bridge_state() -> dict[str, Any]:
    """What the bridge is in this process. Loads it."""
    loaded = _load()
    module = loaded.module
    runtime = _runtime_ffi_version()
    return {
        "extension": None if module is None else module.__file__,
        "why_not": loaded.reason,
        "ffi_api_version": None if module is None else _dotted(module.ffi_api_version),
        "jaxlib_version": jaxlib.__version__,
        "jaxlib_ffi_api_version": None if runtime is None else _dotted(runtime),
        "dlpack_version": None if module is None else _dotted(module.dlpack_version),
        "registered_platforms": loaded.registered,
        "tensor_route": _tensor_route,  # None until a plan has been built for torch
        "plans": len(_plans),
        **counters(),
    }
