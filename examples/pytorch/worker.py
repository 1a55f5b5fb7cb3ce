"""A process with one of PyTorch's allocators that runs jobs on request: a JSON object a line in, one out.

    {"job": "llama_varlen", "steps": 20, "budget": null}

`{"ready": true}` is answered before the process touches the GPU, so that several can be started beforehand. `"cache": "arena"` serves with
caches in arenas; `"count": true` adds what the allocator did in a step, for a worker that was started with `counted`.

`"paced": true` runs a job step by step: before each one the worker says `{"at": 3}` and waits for a line.

`Worker` starts and talks to one. `budget` limits the memory: granule by its budget, the caching allocators by
`set_per_process_memory_fraction`, and cudaMallocAsync, whose reserved memory that does not limit, by filling the device
with a ballast until only so much is free (`ballast`: it needs the device for itself).
"""

import gc
import json
import os
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ALLOCATORS = ("native", "expandable", "async", "granule")
CONF = {"native": "expandable_segments:False", "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
MIB = 1 << 20


class Worker:
    """A worker process; `ask` waits for its answer for a while at most."""

    def __init__(self, allocator, size="big", quiet=False, exact=False, counted=False, cores=None):
        env = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONUNBUFFERED="1", GRANULE_JOBS_EXACT="1" if exact else "")
        env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        env.pop("PYTORCH_ALLOC_CONF", None)
        if allocator in CONF:
            env["PYTORCH_CUDA_ALLOC_CONF"] = CONF[allocator]
        if cores:
            env["GRANULE_JOBS_CORES"] = str(cores)
        if counted:
            env["GRANULE_CONF"] = ",".join(filter(None, (env.get("GRANULE_CONF"), "timing:True")))
        self.allocator = allocator
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), allocator, size], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None, text=True, env=env)

    def ask(self, patience=120, **request):
        """The answer; one with `error` if the process died or took too long (it is ended then). To a paced job it is the word that
        the worker is at a step, and each `go` answers the next one, or what the job came to."""
        return self.go(patience, json.dumps(request))

    def go(self, patience=120, request="go"):
        """Lets a paced job take a step."""
        timer = threading.Timer(patience, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith("{"):
                    return json.loads(line)
        except (OSError, ValueError) as error:
            return {"error": f"{self.allocator}: {error}"}
        finally:
            timer.cancel()
        return {"error": f"{self.allocator}: the worker ended with {self.process.wait()} on {request}"}

    def close(self):
        """Ends the process."""
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()


class Native:
    """PyTorch's own allocators."""

    def __init__(self, torch, name):
        self.torch, self.name, self.ballast = torch, name, []

    def reset(self):
        self.torch.cuda.reset_peak_memory_stats()

    def figures(self):
        stats = self.torch.cuda.memory_stats()
        requested = stats.get("requested_bytes.all.peak", 0) or stats["allocated_bytes.all.peak"]
        return {"requested_peak": requested, "reserved_peak": stats["reserved_bytes.all.peak"]}

    def costs(self):
        return None

    def reserved(self):
        return self.torch.cuda.memory_reserved()

    def limit(self, budget):
        torch = self.torch
        if self.name != "async":
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(1.0 if budget is None else min(1.0, budget / total))
            return
        import ctypes
        cuda = ctypes.CDLL("libcuda.so.1")
        while self.ballast:
            cuda.cuMemFree_v2(ctypes.c_uint64(self.ballast.pop()))
        if budget is None:
            return
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # What the pool still holds is part of the budget.
        fill = torch.cuda.mem_get_info()[0] - (budget - self.reserved())
        piece = 1 << 33
        while fill >= 2 * MIB:
            size = min(piece, fill - fill % (2 * MIB))
            at = ctypes.c_uint64()
            if cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)) == 0:
                self.ballast.append(at.value)
                fill -= size
            elif size > 2 * MIB:
                piece = size // 2
            else:
                break


class Granule:
    """granule."""

    def __init__(self, torch):
        import granule_torch
        self.torch, self.module = torch, granule_torch
        granule_torch.switch_on()

    def reset(self):
        self.module.reset_peaks()

    def figures(self):
        stats = self.module.stats()
        return {"requested_peak": stats["requested_peak"], "reserved_peak": stats["reserved_peak"], "heap": stats["heap"]}

    def costs(self):
        """What it has done so far; allocations, frees and driver calls only if they are counted."""
        heap = self.module.stats()["heap"]
        figures = {name: heap[name] for name in ("allocs", "misses", "creates", "remaps", "host_waits", "device_waits")}
        try:
            costs = self.module.costs()
        except self.module.GranuleError:
            return figures
        for name in ("allocs", "frees"):
            figures[name] = costs[name]["calls"]
            figures[name + "_ms"] = costs[name]["nanos"] / 1e6
        calls = costs["driver"].items()
        figures["driver_calls"] = sum(count["calls"] for _, count in calls)
        figures["driver_ms"] = sum(count["nanos"] for _, count in calls) / 1e6
        figures.update({"driver_" + name: count["calls"] for name, count in calls})
        return figures

    def reserved(self):
        return self.module.stats()["reserved"]

    def limit(self, budget):
        total = self.torch.cuda.mem_get_info()[1]
        self.module.set_budget(total if budget is None else budget)


def clean(torch):
    gc.collect()
    if "arena_cache" in sys.modules:
        sys.modules["arena_cache"].shelf().close()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def is_shortage(torch, error):
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def in_arenas(model, rows, length):
    """A cache in an arena, with the memory for its prompt."""
    import arena_cache
    cache = arena_cache.ArenaCache(model.config)
    cache.reserve(rows, length, model.dtype, model.device.index or 0)
    return cache


def attention(torch, layers=8, batch=16, heads=16, width=128, length=1024, rounds=50):
    """Microseconds of a decode step's attention in one layer over caches as `torch.cat` makes them and over rows of an arena, and of
    adding a token to each: what the layout costs or saves by itself."""
    import arena_cache
    from torch.nn.functional import scaled_dot_product_attention as attend
    shape, dtype = (batch, heads, width), torch.bfloat16
    store = arena_cache.Store(arena_cache.shelf(), layers, shape, shape, dtype)
    store.begin_step(0, length)
    keys, values = (torch.randn(batch, heads, length, width, device="cuda", dtype=dtype) for _ in range(2))
    for layer in range(layers):
        store.to_keys[layer].copy_(keys)
        store.to_values[layer].copy_(values)
    query, new = (torch.randn(batch, heads, 1, width, device="cuda", dtype=dtype) for _ in range(2))
    store.begin_step(length - 1, 1)

    def timed(body):
        for layer in range(layers):
            body(layer)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for number in range(rounds):
            body(number % layers)
        end.record()
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(end) / rounds

    far = (attend(query, keys, values) - attend(query, store.all_keys[0], store.all_values[0])).abs().max().item()
    return {
        "attend_cat_us": timed(lambda _: attend(query, keys, values)),
        "attend_arena_us": timed(lambda layer: attend(query, store.all_keys[layer], store.all_values[layer])),
        "add_cat_us": timed(lambda _: torch.cat((keys, new), 2)), "add_arena_us": timed(lambda layer: store.to_keys[layer].copy_(new)),
        "differ": far, "length": length, "batch": batch, "heads": heads, "width": width}


def run(torch, jobs, memory, size, request):
    """One run of a job: times, results, peaks, or that memory ran out."""
    device = torch.device("cuda")
    memory.limit(None)
    clean(torch)
    before = memory.reserved()
    memory.limit(request.get("budget"))
    memory.reset()
    make = jobs.JOBS[request["job"]]
    if request.get("cache") == "arena":
        make = lambda steps, device, size: jobs.serving(steps, device, size, in_arenas)
    times, cpu, results, answer = [], [], [], {"reserved_before": before}
    steps = request.get("steps") or jobs.STEPS[request["job"]]
    half = None
    job = make(steps, device, size)
    try:
        while True:
            if request.get("paced"):
                print(json.dumps({"at": len(results)}), flush=True)
                sys.stdin.readline()
            if len(results) == steps // 2 and half is None:
                half = memory.costs()
            start, used = time.perf_counter(), time.process_time()
            result = next(job, None)
            if result is None:
                break
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
            results.append(result)
        answer["completed"] = True
        if half is not None and steps > 1:
            whole, count = memory.costs(), steps - steps // 2
            answer["in_a_step"] = {name: (value - half.get(name, 0)) / count for name, value in whole.items()}
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_shortage(torch, error):
            raise
        answer.update(completed=False, steps_done=len(results), message=str(error).splitlines()[0][:1500])
        error.__traceback__ = None
    finally:
        job.close()
        del job
    answer.update(memory.figures(), times=times, cpu=cpu, results=results)
    memory.limit(None)
    clean(torch)
    answer["reserved_after"] = memory.reserved()
    return answer


def main():
    allocator, size = sys.argv[1:3]
    if os.environ.get("GRANULE_JOBS_CORES"):
        # The same for all that are compared: which cores a process gets made as much of a difference as anything else.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(os.environ["GRANULE_JOBS_CORES"])])
    sys.path.insert(0, HERE)
    import torch
    memory = Granule(torch) if allocator == "granule" else Native(torch, allocator)
    import jobs
    import transformers
    transformers.logging.set_verbosity_error()
    jobs.deterministic()
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("ready"):
            print(json.dumps({"ready": True}), flush=True)
            continue
        if not torch.cuda.is_initialized():
            torch.cuda.init()
            torch.ones(1, device="cuda").item()
        if request.get("hello"):
            answer = {"torch": torch.__version__, "transformers": transformers.__version__,
                      "device": torch.cuda.get_device_name(), "backend": torch.cuda.get_allocator_backend(),
                      "total": torch.cuda.mem_get_info()[1]}
        else:
            try:
                answer = attention(torch) if request.get("attention") else run(torch, jobs, memory, size, request)
            except Exception as error:  # the parent has to hear of it, whatever it is
                import traceback
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
