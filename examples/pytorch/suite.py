"""Allocator tests of PyTorch's own suite (test/test_cuda.py), which ships in no wheel, written again for granule, and multi-stream
use checked for data races.

    python3 examples/pytorch/suite.py [--json FILE] [WORD...]     # tests whose names contain a word; each in a process of its own

What PyTorch's suite tests of its allocator alone (statistics, snapshots, history, expandable segments, IPC of its segments) has no
counterpart: `torch.cuda.memory_stats` and its like raise under any pluggable allocator, and granule's own take their place.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
MIB, GIB = 1 << 20, 1 << 30
TESTS = {}


def test(function):
    TESTS[function.__name__] = function
    return function


def raises(kind, body):
    """The exception that `body` raises, which has to be of that kind."""
    try:
        body()
    except kind as error:
        error.__traceback__ = None
        return error
    raise AssertionError(f"no {kind.__name__}")


def settle(torch, g):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return g.stats()


@test
def out_of_memory(torch, g):
    """test_out_of_memory: a typed exception with figures, and the process goes on."""
    tensor = torch.zeros(1024, device="cuda")
    error = raises(torch.OutOfMemoryError, lambda: torch.empty(1024 * GIB * 8, dtype=torch.int8, device="cuda"))
    assert "CUDA out of memory. granule" in str(error), error
    error = raises(torch.OutOfMemoryError, lambda: torch.empty(400 * GIB, dtype=torch.int8, device="cuda"))
    assert "requested 400 GiB" in str(error), error
    raises(torch.cuda.OutOfMemoryError, lambda: torch.empty(4096 * GIB, dtype=torch.int8, device="cuda"))
    tensor.fill_(1)
    assert bool((tensor == 1).all())


@test
def set_per_process_memory_fraction(torch, g):
    """test_set_per_process_memory_fraction: the limit holds, and no allocation is lost at it."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.5)
    held = torch.empty(int(total * 0.499) - 128 * MIB, dtype=torch.int8, device="cuda")
    del held
    torch.cuda.empty_cache()
    raises(torch.OutOfMemoryError, lambda: torch.empty(int(total * 0.5) + MIB, dtype=torch.int8, device="cuda"))
    tensor = torch.zeros(1024, device="cuda")
    tensor.fill_(1)
    assert bool((tensor == 1).all())
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.empty(int(total * 0.5) + MIB, dtype=torch.int8, device="cuda")


@test
def out_of_memory_retry(torch, g):
    """test_out_of_memory_retry: what was freed is found again when memory is short, in whole."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.5)
    size = int(total * 0.5) // 3
    first, second = (torch.empty(size, dtype=torch.int8, device="cuda") for _ in range(2))
    del first, second
    torch.empty(int(total * 0.49), dtype=torch.int8, device="cuda")


@test
def zero_bytes(torch, g):
    """A tensor of no bytes: PyTorch asks a pluggable allocator for them."""
    for _ in range(3):
        empty = torch.empty(0, device="cuda")
        assert empty.numel() == 0 and torch.cat((empty, torch.ones(2, device="cuda"))).sum().item() == 2
        del empty


@test
def memory_allocation(torch, g):
    """test_memory_allocation, caching_allocator_alloc: raw blocks of many sizes, counted, freed."""
    before = settle(torch, g)["requested"]
    for size in (1, 511, 512, 513, MIB, 20 * MIB, 1001 * MIB):
        block = torch.cuda.caching_allocator_alloc(size)
        assert g.stats()["requested"] == before + size, (size, g.stats())
        assert block % 256 == 0
        torch.cuda.caching_allocator_delete(block)
        assert g.stats()["requested"] == before
    raises(RuntimeError, lambda: torch.cuda.caching_allocator_delete(12345))


@test
def memory_is_returned(torch, g):
    """test_memory_stats, empty_cache: what is freed is idle, and goes back to the device when asked."""
    before = settle(torch, g)
    tensors = [torch.empty(n * MIB, dtype=torch.int8, device="cuda") for n in (1, 7, 64, 300, 1000)]
    held = g.stats()
    assert held["requested"] - before["requested"] == 1372 * MIB
    assert held["reserved"] >= before["reserved"] + 1372 * MIB
    del tensors
    after = settle(torch, g)
    assert after["requested"] == before["requested"] and after["reserved"] <= before["reserved"] + 4 * MIB, (before, after)


@test
def copies_between_streams(torch, g):
    """test_copy_streams, test_noncontiguous_pinned_memory and their like: copies to and from pinned memory on side streams."""
    side = torch.cuda.Stream()
    host = torch.randn(3 << 20).pin_memory()
    for _ in range(20):
        with torch.cuda.stream(side):
            device = host.to("cuda", non_blocking=True)
            doubled = device * 2
        torch.cuda.current_stream().wait_stream(side)
        doubled.record_stream(torch.cuda.current_stream())
        assert bool((doubled.cpu() == host * 2).all())


@test
def record_stream(torch, g):
    """test_record_stream: memory used on another stream is not handed out while that one works."""
    cycles = 1_000_000_000 // 50
    values = torch.tensor([1.0, 2.0, 3.0, 4.0]).pin_memory()
    result = torch.empty(4, device="cuda")
    stream = torch.cuda.Stream()
    where = [None]

    def work():
        with torch.cuda.stream(stream):
            tmp = torch.zeros(4, device="cuda").copy_(values, non_blocking=True)
            where[0] = tmp.data_ptr()
        torch.cuda.current_stream().wait_stream(stream)
        tmp.record_stream(torch.cuda.current_stream())
        torch.cuda._sleep(cycles)
        result.copy_(tmp)

    work()
    with torch.cuda.stream(stream):
        other = torch.zeros(4, device="cuda").copy_(values * 9, non_blocking=True)
        assert other.data_ptr() != where[0], "handed out while in use"
    torch.cuda.synchronize()
    assert result.tolist() == [1, 2, 3, 4], result
    torch.cuda.current_stream().synchronize()


@test
def record_stream_on_shifted_view(torch, g):
    """test_record_stream_on_shifted_view: a view that starts later names the same block."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        base = torch.zeros(10, 10, device="cuda")
    view = base[5:]
    assert view.storage_offset() > 0
    event = torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.current_stream()):
        torch.cuda._sleep(50_000_000)
    view.record_stream(torch.cuda.current_stream())
    at = base.data_ptr()
    del base, view
    with torch.cuda.stream(side):
        again = torch.zeros(10, 10, device="cuda")
        assert again.data_ptr() != at, "handed out while in use"
    event.record()
    torch.cuda.synchronize()


@test
def reuse_on_one_stream(torch, g):
    """test_caching_allocator's reuse: freed memory serves the same stream at once, in order, without a wait."""
    a = torch.full((1 << 22,), 1.0, device="cuda")
    at = a.data_ptr()
    torch.cuda._sleep(50_000_000)
    total = a.sum()
    del a
    b = torch.full((1 << 22,), 2.0, device="cuda")
    assert b.data_ptr() == at
    assert total.item() == 1 << 22 and b.sum().item() == 2 << 22


def churn(torch, seconds, record, seed):
    """Producers and consumers on many streams: each block is written on one stream, read on another after a delay, and freed at
    once. Answers how many reads saw other values than were written."""
    import random
    rng = random.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(6)]
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    rounds, stop = 0, time.time() + seconds
    while time.time() < stop:
        producer, consumer = rng.sample(streams, 2)
        size = rng.choice((256, 4096, 1 << 16, 1 << 20, 9 << 20, 40 << 20))
        with torch.cuda.stream(producer):
            block = torch.full((size,), rounds, dtype=torch.int32, device="cuda")
        consumer.wait_stream(producer)
        with torch.cuda.stream(consumer):
            if rng.random() < 0.5:
                torch.cuda._sleep(rng.choice((200_000, 2_000_000)))
            bad = (block != rounds).sum()
            wrong.add_(bad)
            wrong.record_stream(consumer)
        if record:
            block.record_stream(consumer)
        del block, bad
        rounds += 1
        if rounds % 64 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return int(wrong.item()), rounds


def without_record_stream():
    """The same churn without record_stream, in a process of its own: words that were wrong, and blocks. Freed memory that is still read
    may be unmapped by then, which ends that process' context: a race that was seen, too."""
    done = subprocess.run([sys.executable, os.path.abspath(__file__), "--control"], capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        missed, blocks = done.stdout.split()[-2:]
        return int(missed), f"{blocks} without: {missed}"
    assert "illegal memory access" in done.stderr, done.stderr[-2000:]
    return 1, "without: an illegal access"


def control():
    import torch
    import granule_torch as g
    g.switch_on()
    print(*churn(torch, 4, False, 2), flush=True)


@test
def record_stream_without_races(torch, g):
    """Many streams, blocks freed while others read them: with record_stream, no read sees foreign bytes. The same without
    record_stream shows that the check can see them."""
    seen, rounds = churn(torch, 6, True, 1)
    missed, without = without_record_stream()
    print(f"    {rounds} blocks with record_stream: {seen} wrong words; {without}", file=sys.stderr)
    assert seen == 0 and rounds > 500
    assert missed > 0, "the check sees no races at all"
    h = g.stats()["heap"]
    assert h["broken"] == 0, h


@test
def record_stream_without_races_when_short(torch, g):
    """The same in little memory, where blocks of other streams are waited for and granules move."""
    settle(torch, g)
    g.set_budget(768 * MIB)
    seen, rounds = churn(torch, 6, True, 3)
    print(f"    {rounds} blocks, {seen} wrong words, {g.stats()['heap']}", file=sys.stderr)
    assert seen == 0


@test
def threads_on_their_own_streams(torch, g):
    """Eight threads allocate, compute and free on streams of their own; every result is checked."""
    failures = []

    def work(n):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for i in range(150):
                    size = 1 + (i * 7919 * (n + 1)) % (3 << 20)
                    tensor = torch.full((size,), n, dtype=torch.int32, device="cuda")
                    total = (tensor + tensor).sum(dtype=torch.int64)
                    assert total.item() == 2 * n * size, (n, i)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures


@test
def backward_on_side_streams(torch, g):
    """test_streaming_backwards_*: the backward pass runs on the streams of the forward pass, in threads of PyTorch's."""
    side = torch.cuda.Stream()
    for _ in range(20):
        x = torch.randn(512, 512, device="cuda", requires_grad=True)
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            y = (x * 3) @ x.t()
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        z = (y * 2).sum()
        z.backward()
        torch.cuda.synchronize()
        expected = 6 * 2 * x.detach().sum(0, keepdim=True).expand_as(x)
        assert torch.allclose(x.grad, expected, rtol=1e-3, atol=1e-1), (x.grad - expected).abs().max()


@test
def graph_capture_simple(torch, g):
    """test_graph_capture_simple."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        a = torch.full((1000,), 1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        graph.capture_begin()
        b = a
        for _ in range(10):
            b = b + 1
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    assert b.sum().item() == 11000


@test
def graph_memory_is_kept(torch, g):
    """test_graph_two_successive, test_graph_memory_stats_and_use_result_after_destroy_graph: memory that a graph writes goes to
    nobody else while the graph lives, though its tensors are gone, and comes back after it."""
    before = settle(torch, g)["reserved"]
    x = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        temporary = x + 1
        for _ in range(4):
            temporary = temporary * 2
        out = temporary + x
    del temporary
    others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    for i in range(5):
        x.fill_(float(i))
        graph.replay()
        assert bool((out == (i + 1) * 16 + i).all()), i
        assert all(bool((other == 7).all()) for other in others), "a graph wrote to foreign memory"
    kept = out
    graph.reset()
    del graph
    assert bool((kept == 5 * 16 + 4).all()), "the result outlives its graph"
    del kept, out, others, x
    after = settle(torch, g)["reserved"]
    assert after <= before + 64 * MIB, (before, after)


@test
def graphs_share_a_pool(torch, g):
    """test_graph_concurrent_replay's and graph_pool_handle's use: two graphs in one pool, one after the other."""
    pool = torch.cuda.graph_pool_handle()
    x = torch.ones(1 << 16, device="cuda")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, pool=pool):
        y = x * 3
    with torch.cuda.graph(second, pool=pool):
        z = y + 1
    for value in (1.0, 5.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert bool((z == value * 3 + 1).all())


@test
def graph_of_a_training_step(torch, g):
    """test_graph_grad_scaling's and make_graphed_callables' use: forward, backward and optimizer, captured whole."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    data, goal = torch.randn(64, 256, device="cuda"), torch.randn(64, 1, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(data), goal)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            first = step().item()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()
    noise = []
    for i in range(100):
        graph.replay()
        noise.append(torch.full((1 << 18,), float(i), device="cuda"))
        noise = noise[-8:]
    assert loss.item() < first / 2, (first, loss.item())
    assert all(bool((tensor == tensor[0]).all()) for tensor in noise)


@test
def mem_pool(torch, g):
    """test_mempool_*: memory of a pool of the user's."""
    try:
        pool = torch.cuda.MemPool()
    except RuntimeError as error:
        assert "support" in str(error), error
        print(f"    not for pluggable allocators in this PyTorch: {str(error).splitlines()[0]}", file=sys.stderr)
        return
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.full((1 << 20,), 3.0, device="cuda")
    other = torch.full((1 << 20,), 4.0, device="cuda")
    assert bool((tensor == 3).all()) and bool((other == 4).all())
    del tensor, pool


@test
def recorded_use_in_a_private_pool(torch, g):
    """What another stream still uses is not handed out again within its pool either; what nobody uses is, at once."""
    lib, side, size = g.library(), torch.cuda.Stream(), 8 * MIB
    here = torch.cuda.current_stream().cuda_stream
    lib.granule_torch_begin_pool(0, 77, 1, None)
    try:
        first = lib.granule_torch_alloc(size, 0, here)
        lib.granule_torch_free(first, size, 0, here)
        assert lib.granule_torch_alloc(size, 0, here) == first
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
        lib.granule_torch_record_stream(first, side.cuda_stream)
        lib.granule_torch_free(first, size, 0, here)
        second = lib.granule_torch_alloc(size, 0, here)
        assert second and second != first
        lib.granule_torch_free(second, size, 0, here)
    finally:
        lib.granule_torch_end_pool(0, 77, 1)
        lib.granule_torch_release_pool(0, 77, 1)


@test
def caches_in_arenas(torch, g):
    """KV caches in arenas hold what caches by `torch.cat` do, over requests that come and go, and leave next to nothing."""
    import random
    import arena_cache
    from transformers import DynamicCache, LlamaConfig
    rng, layers, shelf = random.Random(5), 4, arena_cache.Shelf(0)
    config = LlamaConfig(hidden_size=512, num_hidden_layers=layers, num_attention_heads=8)
    before, active = settle(torch, g)["reserved"], []
    for _ in range(60):
        while len(active) < 3:
            batch, length = rng.choice((1, 4, 8)), rng.randint(1, 2000)
            ours = arena_cache.ArenaCache(config, shelf)
            if rng.random() < 0.5:
                ours.reserve(batch, length, torch.bfloat16)
            active.append([DynamicCache(), ours, batch, length, rng.randint(1, 20)])
        for request in list(active):
            for layer in range(layers):
                new = [torch.randn(request[2], 8, request[3], 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
                want, got = request[0].update(*new, layer), request[1].update(*new, layer)
                assert all(torch.equal(a, b) for a, b in zip(want, got))
            request[3:] = 1, request[4] - 1
            if not request[4]:
                active.remove(request)
        request = ours = new = want = got = None
    active.clear()
    torch.cuda.synchronize()
    shelf.sweep()
    assert not shelf.ending and len(shelf.ready) <= 4
    shelf.close()
    assert settle(torch, g)["reserved"] <= before + 4 * MIB


@test
def named_snapshot(torch, g):
    """test_memory_snapshot's counterpart: every live byte is in the snapshot, and the figures add up."""
    keep = [torch.empty(n * MIB + 13, dtype=torch.int8, device="cuda") for n in (1, 3, 50)]
    snap = g.snapshot()
    blocks = {block["addr"]: block["len"] for stream in snap["streams"] for block in stream["blocks"]}
    for tensor in keep:
        assert blocks[tensor.data_ptr()] >= tensor.numel()
    s = snap["stats"]
    assert s["held"] == s["live"] + s["free"] and sum(blocks.values()) == s["live"]
    g.dump_snapshot(os.path.join(os.environ.get("TMPDIR", "/tmp"), "granule-snapshot.json"))
    print("    " + g.summary().replace("\n", "\n    "), file=sys.stderr)


@test
def growable_tensors(torch, g):
    """A tensor that grows in place: same address, same bytes, in stream order, up to its capacity and no further."""
    total = torch.cuda.mem_get_info()[1]
    tensor = g.GrowableTensor(1 << 31, (64,), torch.bfloat16)
    first = tensor.append(torch.ones(1000, 64, dtype=torch.bfloat16, device="cuda"))
    for n in range(1, 40):
        everything = tensor.append(torch.full((50_000, 64), float(n % 8), dtype=torch.bfloat16, device="cuda"))
    assert everything.data_ptr() == first.data_ptr() and tensor.rows == 1000 + 39 * 50_000
    assert bool((everything[:1000] == 1).all())
    for n in range(1, 40):
        assert bool((everything[1000 + (n - 1) * 50_000:1000 + n * 50_000] == float(n % 8)).all()), n
    error = raises(g.GranuleError, lambda: tensor.grow(total // 128 + (1 << 20)))
    assert error.status == g.OUT_OF_MEMORY and tensor.rows == 1000 + 39 * 50_000
    side = torch.cuda.Stream()
    tensor.record_stream(side)
    g.library().granule_clear_error()
    tensor.view().record_stream(side)
    assert not g.last_error(), g.last_error()
    tensor.shrink(1000)
    assert bool((tensor.view() == 1).all())
    before = settle(torch, g)["reserved"]
    tensor.grow(1_000_000)
    del first, everything
    tensor.close()
    del tensor
    assert settle(torch, g)["reserved"] <= before


@test
def dlpack_round_trip(torch, g):
    """DLPack of tensors on granule to another library and back."""
    tensor = torch.arange(1000, device="cuda", dtype=torch.float32).reshape(10, 100)
    again = torch.utils.dlpack.from_dlpack(tensor)
    assert again.data_ptr() == tensor.data_ptr()
    try:
        import cupy
    except ImportError:
        return
    other = cupy.from_dlpack(tensor)
    assert float(other.sum()) == tensor.sum().item()


@test
def exit_with_live_tensors(torch, g):
    """Tensors, graphs and arenas that are alive when the interpreter ends: the process has to end well (the parent looks)."""
    global _kept
    tensor = g.GrowableTensor(1 << 20, (64,), torch.float32)
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(1024, device="cuda")
    with torch.cuda.graph(graph):
        y = x * 2
    _kept = [torch.ones(1 << 20, device="cuda"), tensor, tensor.grow(100), graph, y, torch.cuda.Stream()]


@test
def errors_reach_python(torch, g):
    """What the library says: unknown keys, settings that come too late."""
    torch.ones(1, device="cuda")
    late = raises(g.GranuleError, lambda: g.configure("budget:1GiB"))
    assert "already" in str(late), late
    unknown = raises(g.GranuleError, lambda: g.configure("expandable_segments:True"))
    assert "expandable_segments" in str(unknown), unknown


def child(name):
    import torch
    import granule_torch as g
    g.switch_on()
    TESTS[name](torch, g)
    torch.cuda.synchronize()
    print("passed", flush=True)


def run(name):
    start = time.time()
    env = dict(os.environ, PYTHONUNBUFFERED="1")
    try:
        done = subprocess.run([sys.executable, os.path.abspath(__file__), "--child", name], capture_output=True, text=True,
                              timeout=120, env=env)
        good = done.returncode == 0 and "passed" in done.stdout
        output = done.stderr[-4000:]
        code = done.returncode
    except subprocess.TimeoutExpired as error:
        good, code = False, "timeout"
        output = (error.stderr or b"").decode(errors="replace")[-4000:]
    return {"name": name, "passed": good, "code": code, "seconds": time.time() - start, "output": output}


def main():
    from concurrent.futures import ThreadPoolExecutor
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json")
    parser.add_argument("--child")
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    # Tests that look at the whole device run by themselves.
    parser.add_argument("--parallel", type=int, default=4)
    args = parser.parse_args()
    if args.child:
        return child(args.child)
    if args.control:
        return control()
    wanted = [name for name in TESTS if not args.words or any(word in name for word in args.words)]
    alone = [name for name in wanted if name in ("out_of_memory", "set_per_process_memory_fraction", "out_of_memory_retry",
                                                 "growable_tensors", "record_stream_without_races")]
    results = []

    def report(result):
        results.append(result)
        print(f"{'passed' if result['passed'] else 'FAILED'}  {result['name']} ({result['seconds']:.1f} s)", flush=True)
        if result["output"].strip():
            print(result["output"] if not result["passed"] else "\n".join(
                line for line in result["output"].splitlines() if line.startswith("    ")), flush=True)

    with ThreadPoolExecutor(args.parallel) as pool:
        for result in pool.map(run, [name for name in wanted if name not in alone]):
            report(result)
    for name in alone:
        report(run(name))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file)
    failed = [result["name"] for result in results if not result["passed"]]
    print(f"{len(results) - len(failed)} of {len(results)} passed" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
