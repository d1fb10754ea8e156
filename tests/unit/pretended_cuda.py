"""A GPU that is not there: tensors that say `cuda`, computed on the CPU, with the rules of the real one.

An operator that gets tensors of both devices fails as it does on a GPU (scalars, copies and host indices are let through, as there). What
makes the host wait for the device is counted: `reads` (device → host) and `uploads` (host → device from memory that is not pinned).
So is what is launched; a recorder (`recorded_graph`) gets every launch of a capture, in which nothing may wait.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import torch

_DEVICE = torch.device("cuda", 0)
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}
_READS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.is_nonzero.default,
}
_HOST_READS = {
    torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__bool__, torch.Tensor.__index__,
}  # fmt: skip


class PretendedTensor(torch.Tensor):
    """`inner`: the CPU tensor that holds the values."""

    @staticmethod
    def __new__(cls, inner):
        one = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=_DEVICE,
        )
        one.inner = inner
        return one

    def __repr__(self):
        return f"pretended {self.inner!r}"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:  # C++ would ask the GPU's driver before it asks us
            return _PRESENT[-1].get_item(*args)
        if func is torch.Tensor.__setitem__:
            return _PRESENT[-1].set_item(*args)
        if func in _HOST_READS:
            _PRESENT[-1].wait("reads", func.__name__)
            return func(args[0].inner)
        if func is torch.Tensor.copy_:  # as above
            _PRESENT[-1].run(_aten.copy_.default, args[:2], {})
            return args[0]
        if func is torch.Tensor.numpy:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.nonzero:  # as above
                return _aten.nonzero.default(*args)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func._can_decompose():  # inference mode hands over composite operators whole
            return func.decompose(*args, **(kwargs or {}))
        return _PRESENT[-1].run(func, args, kwargs or {})


class PretendedCuda:
    """waits: what made the host wait, by kind and operator, since `waits.clear()`. uncounted: a folder whose code stands in for kernels.
    num_launches: what went to the device; kernels count one. recorder: of a capture that is on."""

    def __init__(self):
        self.waits = Counter()
        self.uncounted = None
        self.num_launches = 0
        self.recorder = None
        self._in_kernel = False

    def kernel(self, operator):
        """An operator whose kernel is one launch, however its reference computes."""

        def call(*args, **kwargs):
            return self._launch(lambda: operator(*args, **kwargs), _tensors([*args, *kwargs.values()]))

        return call

    def replay(self, launches):
        """Launches again, as one."""
        self.num_launches += 1
        self._in_kernel = True
        try:
            launches()
        finally:
            self._in_kernel = False

    def _launch(self, compute, given):
        if self._in_kernel:
            return compute()
        given = {_storage(one) for one in given}
        self._in_kernel = True
        try:
            result = compute()
        finally:
            self._in_kernel = False
        self._launched(compute, given, result)
        return result

    def _launched(self, compute, given, result, views=False):
        """given: storages of the operands. A view is no launch."""
        if self._in_kernel or views:
            return
        self.num_launches += 1
        if self.recorder is not None:
            self.recorder.note(compute, [(_unwrapped(one), _storage(one) not in given) for one in _tensors([result])])

    def count(self, kind):
        return sum(number for (own, _), number in self.waits.items() if own == kind)

    def get_item(self, one, index):
        self._check_index(one, index, "__getitem__")
        result = PretendedTensor(one.inner[_unwrapped(index)])
        views = _storage(result) == _storage(one)
        self._launched(lambda: PretendedTensor(one.inner[_unwrapped(index)]), set(), result, views)
        return result

    def set_item(self, one, index, value):
        self._check_index(one, index, "__setitem__")
        if (
            isinstance(value, torch.Tensor)
            and value.dim()
            and isinstance(value, PretendedTensor) != isinstance(one, PretendedTensor)
        ):
            self.wait("reads" if isinstance(value, PretendedTensor) else "uploads", "__setitem__")

        def write():
            _unwrapped(one)[_unwrapped(index)] = _unwrapped(value)

        write()
        self._launched(write, set(), None)

    def _check_index(self, one, index, name):
        parts = index if isinstance(index, tuple) else (index,)
        if not isinstance(one, PretendedTensor) and any(isinstance(part, PretendedTensor) for part in parts):
            raise RuntimeError(
                f"{name}: indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        if isinstance(one, PretendedTensor):
            for part in parts:
                if isinstance(part, PretendedTensor) and (_is_mask(part) or part.dim() == 0):
                    self.wait("reads", name)
                elif isinstance(part, (list, torch.Tensor)) and not isinstance(part, PretendedTensor):
                    self.wait("uploads", name)

    def wait(self, kind, what):
        frame = sys._getframe(1) if self.uncounted else None
        while frame is not None:
            if self.uncounted in frame.f_code.co_filename:
                return
            frame = frame.f_back
        if self.recorder is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} makes the host wait ({kind})")
        self.waits[kind, what] += 1

    def run(self, func, args, kwargs):
        given = list(_tensors([*args, *kwargs.values()]))
        wrappers = {id(one.inner): one for one in given if isinstance(one, PretendedTensor)}
        self._check(func, args, given)
        self._note(func, args, kwargs)
        kwargs = dict(kwargs)
        to = kwargs.get("device")
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        own_args, own_kwargs = _unwrapped(args), _unwrapped(kwargs)
        result = func(*own_args, **own_kwargs)
        stays = (torch.device(to).type == "cuda") if to is not None else bool(wrappers)
        if func is _aten.copy_.default:
            stays = isinstance(args[0], PretendedTensor)
        known = {_storage(one) for one in given}
        views = not func._schema.is_mutable and all(_storage(one) in known for one in _tensors([result]))
        self._launched(lambda: func(*own_args, **own_kwargs), known, result, views)
        return _wrapped(result, wrappers) if stays else result

    def _check(self, func, args, given):
        if func in _COPIES:
            return
        if func in _INDEXED and isinstance(args[0], PretendedTensor):
            given = [args[0], *args[2:3]] if len(args) > 2 else []
        on_host = [one for one in given if not isinstance(one, PretendedTensor)]
        if torch.Tag.pointwise in func.tags or func in _INDEXED:
            on_host = [one for one in on_host if one.dim() > 0]
        if on_host and len(on_host) < len(given):
            raise RuntimeError(
                f"{func}: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            )

    def _note(self, func, args, kwargs):
        kind = None
        if func in _READS or (func in _INDEXED and any(_is_mask(one) for one in args[1])):
            kind = "reads"
        elif func is _aten._to_copy.default:
            to = kwargs.get("device")
            if to is not None and torch.device(to).type == "cpu":
                kind = "reads"
        elif func is _aten.copy_.default:
            into, source = args[0], args[1]
            if not isinstance(into, PretendedTensor):
                kind = "reads"
            elif not isinstance(source, PretendedTensor) and not getattr(source, "is_pretended_pinned", False):
                kind = "uploads"
        if kind is not None:
            self.wait(kind, str(func))


_PRESENT = []


def _tensors(values):
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _storage(one):
    return _unwrapped(one).untyped_storage().data_ptr()


def _is_mask(one):
    return isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)


def _unwrapped(value):
    if isinstance(value, PretendedTensor):
        return value.inner
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrapped(one) for one in value)
    if isinstance(value, dict):
        return {key: _unwrapped(one) for key, one in value.items()}
    return value


def _wrapped(value, known):
    """Results as wrappers; what was worked on in place is the wrapper that was given."""
    if isinstance(value, torch.Tensor):
        return known.get(id(value)) if id(value) in known else PretendedTensor(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrapped(one, known) for one in value)
    return value


@contextmanager
def pretended_cuda():
    """For a while `cuda` is there, in every thread of this process."""
    library = torch.library.Library("aten", "IMPL")

    def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        return PretendedTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))

    def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
        return PretendedTensor(torch.empty_strided(size, stride, dtype=dtype))

    def arange(*bounds, dtype=None, layout=None, device=None, pin_memory=None):  # C++ makes it empty and lets it grow
        return PretendedTensor(torch.arange(*bounds, dtype=dtype))

    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, arange, "CUDA")
    library.impl("empty.memory_format", empty, "CUDA")
    library.impl("empty_strided", empty_strided, "CUDA")
    with (
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(torch.Tensor, "to", _to_numbered),
        patch.object(torch.Tensor, "pin_memory", _pinned),
        patch.object(torch, "tensor", _tensor_then_to),
    ):
        gpu = PretendedCuda()
        _PRESENT.append(gpu)
        try:
            yield gpu
        finally:
            _PRESENT.pop()
            library._destroy()


def _number(value):
    """Which GPU is the present one only a build for GPUs can say."""
    return _DEVICE if isinstance(value, (str, torch.device)) and str(value) == "cuda" else value


_tensor, _to = torch.tensor, torch.Tensor.to


def _tensor_then_to(data, *, dtype=None, device=None, requires_grad=False):
    """`torch.tensor`, which otherwise fills the device's memory past the dispatcher."""
    one = _tensor(data, dtype=dtype)
    return one if device is None else one.to(device)


def _pinned(one):
    copy = one.clone()
    copy.is_pretended_pinned = True
    return copy


def _to_numbered(one, *args, **kwargs):
    return _to(one, *map(_number, args), **{key: _number(value) for key, value in kwargs.items()})
