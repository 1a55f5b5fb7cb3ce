"""PyTorch on granule: switches the allocator on, shows what it holds, and hands out tensors that grow in place.

    import granule_torch
    granule_torch.switch_on()                   # before PyTorch first allocates on a GPU
    ...
    print(granule_torch.summary())
    granule_torch.dump_snapshot("heap.json")

    cache = granule_torch.GrowableTensor(100_000, (8, 64), torch.bfloat16)
    keys = cache.grow(500)                      # a torch tensor of 500 rows; growing moves nothing

Settings come from the variable GRANULE_CONF, as `key:value,key:value` (see `Conf` in the crate's documentation for the
keys; unknown ones are errors). The library is `libgranule.so` of a build with `--features capi`: GRANULE_LIBRARY names it,
else it is looked for beside this file, in `target/release` and in `.gpu` of the repository.
"""

import ctypes as c
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import weakref

HERE = os.path.dirname(os.path.abspath(__file__))
DIMS = 16
OUT_OF_MEMORY = 1


class GranuleError(RuntimeError):
    """What a function of the library answered. `status` is one of the GRANULE_... numbers of `granule.h`."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class HeapStats(c.Structure):
    _fields_ = [(name, c.c_uint64) for name in (
        "live", "live_peak", "blocks", "held", "held_peak", "granules", "free", "largest_free", "idle", "limbo", "aliases",
        "allocs", "hits", "misses", "remaps", "creates", "host_waits", "device_waits", "failures", "broken", "scoped")]


class TorchStats(c.Structure):
    _fields_ = [(name, c.c_uint64) for name in (
        "requested", "requested_peak", "reserved", "reserved_peak", "budget")] + [("heap", HeapStats)]


class ArenaConfig(c.Structure):
    _fields_ = [(name, c.c_uint64) for name in ("capacity", "min_capacity", "look_ahead", "granule")]


class PoolStats(c.Structure):
    _fields_ = [(name, c.c_uint64) for name in (
        "budget", "created", "mapped", "idle", "in_flight", "pending", "peak_created", "peak_mapped", "creates", "releases",
        "recycled")]


class ArenaInfo(c.Structure):
    _fields_ = [(name, c.c_uint64) for name in ("base", "len", "capacity", "mapped")]


class Tensor(c.Structure):
    _fields_ = [("shape", c.c_int64 * DIMS), ("strides", c.c_int64 * DIMS), ("start", c.c_uint64), ("ndim", c.c_uint32),
                ("device_type", c.c_int32), ("device_id", c.c_int32), ("code", c.c_uint8), ("bits", c.c_uint8),
                ("lanes", c.c_uint16), ("read_only", c.c_uint32)]


U64, PTR, INT = c.c_uint64, c.c_void_p, c.c_int
SIGNATURES = {
    "granule_version": (c.c_char_p, []),
    "granule_last_error": (c.c_char_p, []),
    "granule_last_status": (c.c_int32, []),
    "granule_clear_error": (None, []),
    "granule_device_open": (c.c_int32, [c.c_char_p, c.POINTER(U64)]),
    "granule_device_close": (c.c_int32, [U64]),
    "granule_pool_create": (c.c_int32, [U64, PTR, c.POINTER(U64)]),
    "granule_pool_close": (c.c_int32, [U64]),
    "granule_pool_set_budget": (c.c_int32, [U64, U64]),
    "granule_pool_trim": (c.c_int32, [U64, U64, c.POINTER(U64)]),
    "granule_pool_get_stats": (c.c_int32, [U64, c.POINTER(PoolStats)]),
    "granule_stream_close": (c.c_int32, [U64]),
    "granule_arena_create": (c.c_int32, [U64, c.POINTER(ArenaConfig), c.POINTER(U64)]),
    "granule_arena_close": (c.c_int32, [U64]),
    "granule_arena_get_info": (c.c_int32, [U64, c.POINTER(ArenaInfo)]),
    "granule_arena_grow": (c.c_int32, [U64, U64, U64]),
    "granule_arena_grow_all": (c.c_int32, [c.POINTER(U64), c.POINTER(U64), c.c_size_t, U64]),
    "granule_arena_shrink": (c.c_int32, [U64, U64]),
    "granule_arena_shrink_deferred": (c.c_int32, [U64, U64]),
    "granule_arena_record_use": (c.c_int32, [U64, U64]),
    "granule_arena_export_dlpack": (c.c_int32, [U64, c.POINTER(Tensor), c.c_uint32, c.POINTER(PTR)]),
    "granule_string_free": (None, [PTR]),
    "granule_torch_configure": (c.c_int32, [c.c_char_p]),
    "granule_torch_set_raise": (None, [PTR, PTR]),
    "granule_torch_get_stats": (c.c_int32, [INT, c.POINTER(TorchStats)]),
    "granule_torch_costs": (c.c_int32, [INT, c.POINTER(PTR)]),
    "granule_torch_reset_peaks": (c.c_int32, [INT]),
    "granule_torch_pool": (c.c_int32, [INT, c.POINTER(U64)]),
    "granule_torch_heap": (c.c_int32, [INT, c.POINTER(U64)]),
    "granule_torch_stream": (c.c_int32, [INT, PTR, c.POINTER(U64)]),
    "granule_torch_snapshot": (c.c_int32, [INT, c.POINTER(PTR)]),
    "granule_torch_alloc": (PTR, [c.c_ssize_t, INT, PTR]),
    "granule_torch_free": (None, [PTR, c.c_ssize_t, INT, PTR]),
    "granule_torch_record_stream": (None, [PTR, PTR]),
    "granule_torch_memory_fraction": (None, [c.c_double, INT]),
    "granule_torch_empty_cache": (None, []),
    "granule_torch_begin_pool": (None, [INT, U64, U64, PTR]),
    "granule_torch_end_pool": (None, [INT, U64, U64]),
    "granule_torch_release_pool": (None, [INT, U64, U64]),
}

_library = None
_path = None
_allocator = None
_shim = None
_devices = {}
_streams = {}


def library_path():
    """Where the library is, or an error that says where it was looked for."""
    root = os.path.join(HERE, "..", "..")
    named = os.environ.get("GRANULE_LIBRARY")
    places = [named] if named else [os.path.join(place, "libgranule.so") for place in (
        HERE, os.path.join(root, "target", "release"), os.path.join(root, ".gpu"))]
    for place in places:
        if os.path.isfile(place):
            return os.path.realpath(place)
    raise GranuleError(0, "no libgranule.so at " + ", ".join(places) + "; cargo build --release --features capi")


def library():
    """The library, loaded once."""
    global _library, _path
    if _library is None:
        _path = library_path()
        lib = c.CDLL(_path)
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        _library = lib
    return _library


def check(status):
    """Raises what the library says about a status that is not 0."""
    if status != 0:
        raise GranuleError(status, library().granule_last_error().decode())


def last_error():
    """The last message of this thread; empty if there was none."""
    return library().granule_last_error().decode()


def _address(function):
    return c.cast(function, PTR).value


def _build_shim(torch):
    """Compiles `raise.cpp` against PyTorch's headers once for each version, or answers None and why not."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        return None, "no C++ compiler"
    source = os.path.join(HERE, "raise.cpp")
    root = os.path.dirname(torch.__file__)
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    with open(source, "rb") as file:
        key = hashlib.sha256(file.read() + f"{torch.__version__} {abi} {root}".encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(tempfile.gettempdir(), f"granule-{os.getuid()}")
    target = os.path.join(cache, f"raise-{key}.so")
    if not os.path.isfile(target):
        os.makedirs(cache, exist_ok=True)
        fresh = f"{target}.{os.getpid()}"
        command = [compiler, "-shared", "-fPIC", "-O1", "-std=c++17", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
                   f"-I{root}/include", source, f"-L{root}/lib", "-lc10", "-o", fresh]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return None, done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the compiler failed"
        os.replace(fresh, target)
    shim = c.CDLL(target)
    shim.granule_shim_bind(PTR(_address(library().granule_torch_begin_filtered)))
    return shim, None


def _set_raise(torch):
    """PyTorch looks at no answer of an allocator, so a failure has to throw. Answers how it does."""
    global _shim
    lib = library()
    _shim, why = _build_shim(torch)
    if _shim is not None:
        lib.granule_torch_set_raise(_address(_shim.granule_raise_out_of_memory), _address(_shim.granule_raise_error))
        return "torch.OutOfMemoryError"
    c10 = c.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    try:
        thrower = _address(getattr(c10, "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"))
    except AttributeError:
        raise GranuleError(0, f"nothing throws PyTorch's exceptions here: {why}, and libc10 has no torchCheckFail") from None
    print(f"granule: RuntimeError stands in for torch.OutOfMemoryError ({why})", file=sys.stderr)
    lib.granule_torch_set_raise(thrower, thrower)
    return "RuntimeError"


def configure(conf=None):
    """Reads settings: `conf`, or GRANULE_CONF. For devices that were not used yet."""
    conf = os.environ.get("GRANULE_CONF", "") if conf is None else conf
    check(library().granule_torch_configure(conf.encode()))


def switch_on(conf=None):
    """Makes granule PyTorch's allocator for the rest of the process. Raises if PyTorch has allocated on a GPU already."""
    global _allocator
    import torch
    if _allocator is not None:
        return _allocator
    lib = library()
    configure(conf)
    _set_raise(torch)
    made = torch.cuda.memory.CUDAPluggableAllocator(_path, "granule_torch_alloc", "granule_torch_free")
    inner = made.allocator()
    inner.set_reset_fn(_address(lib.granule_torch_empty_cache))
    inner.set_memory_fraction_fn(_address(lib.granule_torch_memory_fraction))
    inner.set_base_alloc_fn(_address(lib.granule_torch_base_alloc))
    inner.set_record_stream_fn(_address(lib.granule_torch_record_stream))
    begin = _shim.granule_shim_begin if _shim is not None else lib.granule_torch_begin_pool
    inner.set_begin_allocate_to_pool(_address(begin))
    inner.set_end_allocate_to_pool_fn(_address(lib.granule_torch_end_pool))
    inner.set_release_pool(_address(lib.granule_torch_release_pool))
    torch.cuda.memory.change_current_allocator(made)
    _allocator = made
    return made


def raw_stats(device=0):
    """The figures of a device, as the library's structure."""
    stats = TorchStats()
    check(library().granule_torch_get_stats(device, c.byref(stats)))
    return stats


def stats(device=0):
    """The figures of a device in bytes: what `torch.cuda.memory_stats` cannot say under a pluggable allocator."""
    raw = raw_stats(device)
    figures = {name: getattr(raw, name) for name, *_ in TorchStats._fields_ if name != "heap"}
    figures["heap"] = {name: getattr(raw.heap, name) for name, *_ in HeapStats._fields_}
    return figures


def costs(device=0):
    """What serving has cost so far: calls and nanoseconds of `allocs`, of `frees`, and of each call of the `driver`. Raises
    unless the settings say `timing:True`."""
    text = PTR()
    check(library().granule_torch_costs(device, c.byref(text)))
    try:
        return json.loads(c.cast(text, c.c_char_p).value)
    finally:
        library().granule_string_free(text)


_pools = {}


def _pool(device):
    """A handle of the pool that serves a device, kept."""
    if device not in _pools:
        pool = U64()
        check(library().granule_torch_pool(device, c.byref(pool)))
        _pools[device] = pool.value
    return _pools[device]


def pool_stats(device=0):
    """The figures of the pool that serves a device, in bytes: of PyTorch's memory and of arenas together."""
    raw = PoolStats()
    check(library().granule_pool_get_stats(_pool(device), c.byref(raw)))
    return {name: getattr(raw, name) for name, *_ in PoolStats._fields_}


def make_room(bytes, device=0):
    """Before memory for an arena is taken: if the pool would have to pass its highest footprint for it, what PyTorch has freed
    goes to the pool first, as far as no queued work uses it. Costs nothing when the pool has enough."""
    raw = PoolStats()
    check(library().granule_pool_get_stats(_pool(device), c.byref(raw)))
    if bytes > raw.idle and raw.created + bytes - raw.idle > raw.peak_created:
        # Nothing of the pool's own is released: as much as there is may stay.
        check(library().granule_pool_trim(_pool(device), c.c_uint64(-1).value, None))


def reset_peaks(device=0):
    """Sets the peaks of a device to what there is now."""
    check(library().granule_torch_reset_peaks(device))


def set_budget(bytes, device=0):
    """Sets the most that may be created on a device. Raises if more is in use."""
    check(library().granule_pool_set_budget(_pool(device), int(bytes)))


def summary(device=0):
    """The figures of a device as text."""
    s = stats(device)
    h = s["heap"]
    mib = lambda n: f"{n / 2**20:,.0f} MiB"
    return "\n".join((
        f"granule on device {device}: budget {mib(s['budget'])}",
        f"  requested {mib(s['requested'])} (peak {mib(s['requested_peak'])})",
        f"  reserved  {mib(s['reserved'])} (peak {mib(s['reserved_peak'])}, {ratio(s):.4f} of the peak of requested bytes)",
        f"  heap      {h['blocks']} blocks, {mib(h['free'])} free, longest run {mib(h['largest_free'])}, {h['granules']} granules",
        f"  served    {h['allocs']} allocations, {h['misses']} by the driver: {h['creates']} granules created, "
        f"{h['remaps']} moved, {h['host_waits']} waits, {h['failures']} failed"))


def ratio(figures):
    """Peak of reserved over peak of requested bytes."""
    return figures["reserved_peak"] / max(figures["requested_peak"], 1)


def snapshot(device=0):
    """Every block, free run and granule of a device, by stream."""
    text = PTR()
    check(library().granule_torch_snapshot(device, c.byref(text)))
    try:
        return json.loads(c.cast(text, c.c_char_p).value)
    finally:
        library().granule_string_free(text)


def dump_snapshot(path, device=0):
    """Writes `snapshot` and `stats` as JSON."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"stats": stats(device), "heap": snapshot(device)}, file)


def _stream(device, raw):
    """A handle of a stream of PyTorch; PyTorch never destroys its streams."""
    key = (device, raw)
    if key not in _streams:
        handle = U64()
        check(library().granule_torch_stream(device, raw, c.byref(handle)))
        _streams[key] = handle.value
    return _streams[key]


def _capsule(managed):
    new = c.pythonapi.PyCapsule_New
    new.restype, new.argtypes = c.py_object, [PTR, c.c_char_p, PTR]
    return new(managed, b"dltensor", None)


class Arena:
    """A range of addresses on a device with memory behind its first bytes, which grows in place: its address never changes,
    nothing is copied. Memory comes from the pool that serves PyTorch there, under the same budget.

    `bytes` is one flat tensor of `uint8` over all of the addresses, made once: everything else is a view of it, in any type
    and shape. Only what was grown into may be touched.
    """

    def __init__(self, capacity, device=0, look_ahead=0, granule=0):
        import torch
        self.capacity, self.device = int(capacity), device
        lib = library()
        arena, managed = U64(), PTR()
        config = ArenaConfig(self.capacity, 0, look_ahead, granule)
        check(lib.granule_arena_create(_pool(device), c.byref(config), c.byref(arena)))
        self.handle = arena.value
        self.close = weakref.finalize(self, lib.granule_arena_close, self.handle)
        # PyTorch asks the driver about the address, so something has to be there.
        check(lib.granule_arena_grow(self.handle, 1, 0))
        described = Tensor(start=0, ndim=1, code=1, bits=8, lanes=1)
        described.shape[0] = self.capacity
        check(lib.granule_arena_export_dlpack(self.handle, c.byref(described), 0, c.byref(managed)))
        self.bytes = torch.utils.dlpack.from_dlpack(_capsule(managed))

    def stream(self):
        """The library's handle of PyTorch's current stream; 0 for memory of the host."""
        if not self.bytes.is_cuda:
            return 0
        import torch
        return _stream(self.device, torch._C._cuda_getCurrentRawStream(self.device))

    def grow(self, to):
        """Memory for at least `to` bytes, for use on the current stream at once."""
        check(library().granule_arena_grow(self.handle, to, self.stream()))

    def grow_step(self, to):
        """As `grow`, and answers how many bytes may be used: all that the step has mapped."""
        lib, info = library(), ArenaInfo()
        stream = self.stream()
        check(lib.granule_arena_grow(self.handle, to, stream))
        check(lib.granule_arena_get_info(self.handle, c.byref(info)))
        check(lib.granule_arena_grow(self.handle, info.mapped, stream))
        return info.mapped

    def shrink(self, to):
        """Gives memory past `to` bytes back. Waits for the streams that used it."""
        # At least a byte stays, for the view of everything.
        check(library().granule_arena_shrink(self.handle, max(to, 1)))

    def give_back(self):
        """Gives all memory back once the work queued so far is done, without waiting: what is done is looked at now, at the
        next call, and when memory is short. Answers the bytes that are still mapped."""
        check(library().granule_arena_shrink_deferred(self.handle, 1))
        return self.info()["mapped"]

    def use_on(self, stream):
        """Says that work on a stream (its handle, as `stream` answers it) uses the memory from now on."""
        if stream:
            check(library().granule_arena_record_use(self.handle, stream))

    def info(self):
        """Address, length, capacity and mapped bytes."""
        info = ArenaInfo()
        check(library().granule_arena_get_info(self.handle, c.byref(info)))
        return {name: getattr(info, name) for name, *_ in ArenaInfo._fields_}


class GrowableTensor:
    """A tensor of up to `max_rows` rows of `row_shape` that grows in place: its address never changes, nothing is copied, and
    views stay valid. Memory comes from the pool that serves PyTorch on the device, under the same budget.

    Views of `grow` and `view` share the memory: shrinking or closing makes those that reach past the rest invalid.
    """

    def __init__(self, max_rows, row_shape, dtype, device=0, look_ahead=0, granule=0):
        self.max_rows, self.row_shape, self.dtype, self.device = int(max_rows), tuple(row_shape), dtype, device
        self.row_bytes = dtype.itemsize
        for dim in self.row_shape:
            self.row_bytes *= dim
        if self.row_bytes <= 0 or self.max_rows <= 0:
            raise ValueError(f"{max_rows} rows of {row_shape} have no bytes")
        self.rows = 0
        self._open = 0
        self._arena = Arena(self.max_rows * self.row_bytes, device, look_ahead, granule)
        # All of the addresses as one tensor, once: growing then costs no new one, only a narrower view.
        self.full = self._arena.bytes.view(dtype).view(self.max_rows, *self.row_shape)

    def grow(self, rows):
        """Grows to at least `rows` rows and answers a view of them, for use on the current stream at once."""
        self.reserve(rows)
        self.rows = max(self.rows, rows)
        return self.full[:self.rows]

    def reserve(self, rows):
        """Memory for at least `rows` rows, without changing how many there are."""
        if rows > self._open:
            self._arena.grow(rows * self.row_bytes)
            self._open = rows

    @staticmethod
    def grow_all(tensors, rows):
        """Grows each of several tensors of one device to `rows` rows, or none of them."""
        behind = [tensor for tensor in tensors if rows > tensor._open]
        if behind:
            arenas = (U64 * len(behind))(*(tensor._arena.handle for tensor in behind))
            lens = (U64 * len(behind))(*(rows * tensor.row_bytes for tensor in behind))
            check(library().granule_arena_grow_all(arenas, lens, len(behind), behind[0]._arena.stream()))
        for tensor in behind:
            tensor._open = rows
        for tensor in tensors:
            tensor.rows = max(tensor.rows, rows)

    def append(self, rows):
        """Adds rows at the end, as `torch.cat` would, and answers a view of all."""
        at = self.rows
        everything = self.grow(at + rows.shape[0])
        everything[at:].copy_(rows)
        return everything

    def view(self):
        """The rows there are."""
        return self.full[:self.rows]

    def shrink(self, rows):
        """Gives memory past `rows` rows back. Waits for the streams that grew it."""
        if rows < self._open:
            self._arena.shrink(rows * self.row_bytes)
            self._open = rows
        self.rows = min(self.rows, rows)

    def record_stream(self, stream):
        """Says that another stream uses the memory: giving it back waits for that one too."""
        self._arena.use_on(_stream(self.device, stream.cuda_stream))

    def info(self):
        """Address, length, capacity and mapped bytes."""
        return self._arena.info()

    def close(self):
        """Gives the memory back once no tensor points into it any more."""
        self.full = self._arena.bytes = None
        self._arena.close()
