"""The Python module of examples/pytorch without PyTorch: what it knows of the library's structures is right."""

import ctypes as c
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples", "pytorch"))
sys.dont_write_bytecode = True
import granule_torch as g

MIB = 1 << 20


def fails(status, body):
    try:
        body()
    except g.GranuleError as error:
        assert error.status == status and str(error), error
        return str(error)
    raise AssertionError("no error")


os.environ["GRANULE_CONF"] = "driver:host,budget:64MiB,wait_ms:100,timing:True"
assert "max_split_size_mb" in fails(2, lambda: g.configure("max_split_size_mb:128"))
g.configure()
lib = g.library()
assert lib.granule_version()

blocks = [lib.granule_torch_alloc(size, 0, None) for size in (1, 1000, 3 * MIB)]
assert all(blocks)
costs = g.costs()
assert costs["allocs"]["calls"] == 3 and costs["frees"]["calls"] == 0 and costs["allocs"]["nanos"] > 0
stats = g.stats()
assert costs["driver"]["create"]["calls"] == stats["heap"]["granules"] >= 2
assert costs["driver"]["map"]["calls"] == stats["heap"]["granules"] and costs["driver"]["map"]["failures"] == 0
assert stats["requested"] == 1001 + 3 * MIB and stats["budget"] == 64 * MIB
heap = stats["heap"]
assert heap["blocks"] == 3 and heap["held"] == heap["live"] + heap["free"] and heap["broken"] == 0
assert stats["reserved"] == heap["held"] <= stats["reserved_peak"]
snapshot = g.snapshot()
found = {block["addr"] for stream in snapshot["streams"] for block in stream["blocks"]}
assert found == set(blocks), (found, blocks)
assert "3 blocks" in g.summary()
path = os.path.join(tempfile.mkdtemp(), "snapshot.json")
g.dump_snapshot(path)
assert os.path.getsize(path) > 100
for block, size in zip(blocks, (1, 1000, 3 * MIB)):
    lib.granule_torch_free(block, size, 0, None)
assert lib.granule_torch_alloc(100 * MIB, 0, None) is None and "CUDA out of memory" in g.last_error()
lib.granule_torch_empty_cache()
g.reset_peaks()
assert g.stats()["requested_peak"] == 0 and g.stats()["reserved"] == 0
fails(7, lambda: g.configure("budget:1GiB"))
g.set_budget(32 * MIB)
assert g.stats()["budget"] == 32 * MIB

pool = g.pool_stats()
assert pool["created"] == pool["mapped"] == g.stats()["reserved"] == 0 and pool["budget"] == 32 * MIB

# An arena, and a tensor of it as DLPack describes it.
pool, arena, managed = c.c_uint64(), c.c_uint64(), c.c_void_p()
g.check(lib.granule_torch_pool(0, c.byref(pool)))
fails(2, lambda: g.check(lib.granule_arena_create(pool, c.byref(g.ArenaConfig(16 * MIB, 0, 0, 3 * MIB)), c.byref(arena))))
config = g.ArenaConfig(16 * MIB, 0, 0, 2 * MIB)
g.check(lib.granule_arena_create(pool, c.byref(config), c.byref(arena)))
g.check(lib.granule_arena_grow(arena, 5 * MIB, 0))
info = g.ArenaInfo()
g.check(lib.granule_arena_get_info(arena, c.byref(info)))
assert info.len == 5 * MIB and info.mapped >= info.len and info.base
described = g.Tensor(start=0, ndim=2, code=2, bits=32, lanes=1)
described.shape[:2] = (1000, 10)
g.check(lib.granule_arena_export_dlpack(arena, c.byref(described), 0, c.byref(managed)))


class DlTensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("kind", c.c_int32), ("number", c.c_int32), ("ndim", c.c_int32), ("code", c.c_uint8),
                ("bits", c.c_uint8), ("lanes", c.c_uint16)]


seen = c.cast(managed, c.POINTER(DlTensor)).contents
assert (seen.data, seen.kind, seen.ndim, seen.code, seen.bits, seen.lanes) == (info.base, 1, 2, 2, 32, 1)
g.check(lib.granule_arena_close(arena))
print("passed")
