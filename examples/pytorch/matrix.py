"""Real jobs on four allocators: time per step, equal losses, peak of reserved memory, least budget that completes.

    python3 examples/pytorch/matrix.py --json matrix.json            # ten minutes on one H200
    python3 examples/pytorch/matrix.py --jobs serving --allocators native,granule --phases time,arena

In parts, each within a few minutes: `--phases time,arena --json a.json`, then `--phases budget,demo --resume a.json --json b.json`. A part that
ran out of time goes on with `--resume` of its own file.

Phases: `time` (a process for each allocator; all run a job in step: one takes a step while the others wait, then the next one, in an order that
turns, and on the same cores, so that what the machine does meanwhile strikes all alike; two are compared by the ratios of the same steps, whose median counts if its
interval of 95 % does not hold 1), `arena` (with `time`: serving with caches that grow in place, in step with those that are
concatenated), `budget` (bisection between the peak of requested bytes and the peak of reserved ones,
several processes at a time; cudaMallocAsync alone at the end), `exact` (a few steps with kernels that give the same bits every time, so that equal
losses mean equal data), `demo` (a budget at which the native allocator dies of fragmentation and granule completes).
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from worker import ALLOCATORS, Worker

JOBS = ("llama_varlen", "llama_lora_ckpt", "segmentation_multires", "serving")
GIB = 1 << 30
START = time.time()


def say(text):
    print(f"[{time.time() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


def show(run):
    if "error" in run:
        return run["error"]
    done = "completed" if run["completed"] else f"out of memory in step {run['steps_done'] + 1}"
    return (f"{done}, {1e3 * statistics.median(run['times'] or [0]):.1f} ms a step, requested {run['requested_peak'] / GIB:.3f} GiB, "
            f"reserved {run['reserved_peak'] / GIB:.3f} GiB, left {run['reserved_after'] / GIB:.3f} GiB")


ARENAS = "granule, arenas"


def measured(run):
    """What counts of a run of a job."""
    if "error" in run:
        return {"error": run["error"]}
    # The first step makes the model.
    later, cpu = run["times"][1:] or [0], run["cpu"][1:] or [0]
    return {
        "step_ms_median": 1e3 * statistics.median(later), "step_ms_mean": 1e3 * statistics.mean(later), "steps_ms": [1e3 * one for one in later],
        "cpu_ms_median": 1e3 * statistics.median(cpu), "total_s": sum(run["times"]), "requested_peak": run["requested_peak"],
        "reserved_peak": run["reserved_peak"], "results": run["results"], "completed": run["completed"],
        "reserved_after": run["reserved_after"], "in_a_step": run.get("in_a_step")}


def summed(rounds):
    """The rounds of a job on an allocator as one: medians of what they say, and all of their steps."""
    good = [one for one in rounds if "error" not in one]
    if not good:
        return {"error": rounds[0]["error"]}
    middle = lambda key: statistics.median(one[key] for one in good)
    return {
        "rounds": len(good), "failed_rounds": len(rounds) - len(good), "step_ms_median": middle("step_ms_median"),
        "step_ms_mean": middle("step_ms_mean"), "steps_ms": [one.get("steps_ms") for one in rounds], "total_s": middle("total_s"),
        "cpu_ms_median": middle("cpu_ms_median"), "requested_peak": max(one["requested_peak"] for one in good),
        "reserved_peak": max(one["reserved_peak"] for one in good), "results": good[0]["results"], "again": good[-1]["results"],
        "completed": all(one["completed"] for one in good), "reserved_after": max(one["reserved_after"] for one in good)}


def paired(mine, theirs):
    """The ratios of the times of the same steps: their median, its interval of 95 % (by order, so for any distribution), and how many."""
    pairs = [pair for a, b in zip(mine["steps_ms"], theirs["steps_ms"]) if a and b for pair in zip(a, b)]
    ratios = sorted(a / b for a, b in pairs if b)
    if not ratios:
        return None
    half = 0.98 * len(ratios) ** 0.5
    low, high = int(max(0, len(ratios) / 2 - half)), int(min(len(ratios) - 1, len(ratios) / 2 + half))
    return {"ratio": statistics.median(ratios), "interval": [ratios[low], ratios[high]], "steps": len(ratios)}


def said(pair, what):
    """A comparison in words."""
    if pair is None:
        return f"no steps to compare with {what}"
    change, (low, high) = 100 * (pair["ratio"] - 1), pair["interval"]
    words = "no clear difference" if low <= 1 <= high else "more" if change > 0 else "less"
    return (f"{change:+.1f} % time a step against {what} ({100 * (low - 1):+.1f} .. {100 * (high - 1):+.1f} %, {pair['steps']} steps): {words}")


def together(workers, body):
    """Asks all workers at once."""
    with ThreadPoolExecutor(max(len(workers), 1)) as pool:
        return dict(zip(workers, pool.map(body, workers.values())))


def in_step(workers, requests, steps, first):
    """Runs a job on each worker, a step of one at a time; what it came to. Who is first turns, from `first` on."""
    answers = {name: workers[name].ask(paced=True, steps=steps, patience=120, **request) for name, request in requests.items()}
    names = list(requests)
    turn = first
    while any("at" in answers[name] for name in names):
        order = names[turn % len(names):] + names[:turn % len(names)]
        for name in order:
            if "at" in answers[name]:
                answers[name] = workers[name].go()
        turn += 1
    return answers


def phase_time(args, out, save):
    names = list(args.allocators)
    workers = {name: Worker(name, args.size, cores=args.cores) for name in names}
    with_arenas = "granule" in names and "arena" in args.phases and "serving" in args.jobs
    if with_arenas:
        workers[ARENAS] = Worker("granule", args.size, cores=args.cores)
    together(workers, lambda worker: worker.ask(ready=True, patience=120))
    out["machine"].update(together(workers, lambda worker: worker.ask(hello=True, patience=120)))
    say(f"{out['machine'].get(names[0])}")
    done = min((len(rounds) for runs in out["rounds"].values() for rounds in runs.values()), default=0)
    for number in range(done, args.rounds):
        for job in args.jobs:
            if time.time() - START > args.deadline:
                say(f"round {number + 1}: time is up before {job}")
                break
            requests = {name: {"job": job} for name in names}
            if with_arenas and job == "serving":
                requests[ARENAS] = {"job": job, "cache": "arena"}
            if number == done:
                busy = {name: workers[name] for name in requests}
                together(busy, lambda worker: worker.ask(job=job, steps=args.warm, patience=240, **(
                    {"cache": "arena"} if worker is workers.get(ARENAS) else {})))
            for name, run in in_step(workers, requests, args.steps, number).items():
                out["rounds"].setdefault(job, {}).setdefault(name, []).append(measured(run))
                say(f"round {number + 1}: {job} on {name}: {show(run)}")
        save()
    for worker in workers.values():
        worker.close()
    for job, runs in out["rounds"].items():
        out["time"][job] = {name: summed(rounds) for name, rounds in runs.items() if name != ARENAS}
    if "granule" in names and not out["costs"] and time.time() - START < args.deadline:
        phase_costs(args, out)
        save()


def phase_costs(args, out):
    """What granule does in a step. Counting costs some time by itself, so it is done apart."""
    worker = Worker("granule", args.size, counted=True)
    tasks = [(job, job, None) for job in args.jobs]
    if "arena" in args.phases and "serving" in args.jobs:
        tasks.append(("serving in arenas", "serving", "arena"))
    for label, job, cache in tasks:
        worker.ask(job=job, cache=cache, steps=args.warm, patience=120)
        run = worker.ask(job=job, cache=cache, steps=args.steps, patience=180)
        if "error" in run:
            out["costs"][label] = {"error": run["error"]}
            continue
        steps = run["times"][len(run["times"]) // 2:] or [0]
        out["costs"][label] = dict(run.get("in_a_step") or {}, step_ms=1e3 * statistics.mean(steps))
    if "arena" in args.phases:
        out["attention"] = worker.ask(attention=True, patience=60)
        say(f"attention by layout: {out['attention']}")
    worker.close()


def phase_arena(args, out):
    """Tokens a second and peaks of serving: caches by cat on each allocator, and in arenas on granule."""
    for name, rounds in out["rounds"].get("serving", {}).items():
        run = summed(rounds)
        label = "arenas on granule" if name == ARENAS else f"cat on {name}"
        if "error" in run:
            out["serving"][label] = run
            continue
        tokens = sum(result[0] for result in run["results"])
        out["serving"][label] = {
            "tokens_a_second": tokens / run["total_s"], "checks": run["results"], "step_ms_median": run["step_ms_median"], "steps_ms": run["steps_ms"],
            "cpu_ms_median": run["cpu_ms_median"], "reserved_peak": run["reserved_peak"], "requested_peak": run["requested_peak"]}


def least(args, worker, job, low, high, tolerance):
    """The least budget that completes, by bisection; the trials too. `high` is tried first and raised until it completes."""
    trials = []

    def completes(budget):
        run = worker.ask(job=job, steps=args.steps, budget=budget, patience=180)
        good = run.get("completed")
        trials.append({"budget": budget, "completed": good, "message": run.get("message") or run.get("error"),
                       "steps_done": run.get("steps_done")})
        say(f"{job} on {worker.allocator} in {budget / GIB:.3f} GiB: {'completed' if good else trials[-1]['message'] or run}"[:230])
        return good

    unit = 2 << 20
    while not completes(high):
        if "error" in (trials[-1]["message"] or "") and worker.process.poll() is not None or len(trials) > 4:
            return None, trials
        low, high = high, int(high * 1.03)
    while high - low > max(unit, int(tolerance * low)) and time.time() - START < args.deadline:
        middle = (low + high) // 2 // unit * unit
        if middle <= low:
            break
        if completes(middle):
            high = middle
        else:
            low = middle
        if worker.process.poll() is not None:
            return None, trials
    return high, trials


def requested(out, job):
    """Peak of requested bytes, from an allocator that counts them."""
    for name in ("granule", "native", "expandable"):
        run = out["time"].get(job, {}).get(name)
        if run and run.get("requested_peak"):
            return run["requested_peak"]
    return None


def phase_budget(args, out):
    def one(job, name):
        base = requested(out, job)
        run = out["time"].get(job, {}).get(name, {})
        if base is None or "error" in run or not run:
            return job, name, {"error": "no run without a limit"}
        worker = Worker(name, args.size, quiet=True)
        try:
            # A run without a limit: what it loads lazily must not look like the job's.
            warm = worker.ask(job=job, steps=2, patience=240)
            if "error" in warm:
                return job, name, warm
            high = max(run["reserved_peak"], base) + (2 << 20)
            budget, trials = least(args, worker, job, int(base), int(high), args.tolerance * (3 if name == "async" else 1))
            return job, name, {"least_budget": budget, "trials": trials}
        finally:
            worker.close()

    pairs = [(job, name) for job in args.jobs for name in args.allocators]
    beside = [pair for pair in pairs if pair[1] != "async"]
    with ThreadPoolExecutor(args.parallel) as pool:
        for job, name, answer in pool.map(lambda pair: one(*pair), beside):
            out["budget"].setdefault(job, {})[name] = answer
    for job, name in pairs:
        if name == "async":
            out["budget"].setdefault(job, {})[name] = one(job, name)[2]


def phase_demo(args, out):
    """For each job a budget half-way between what granule needs and what the native allocator needs; both, in fresh processes."""
    for job in args.jobs:
        needs = {name: answer.get("least_budget") for name, answer in out["budget"].get(job, {}).items()}
        if not needs.get("granule") or not needs.get("native") or needs["granule"] * 1.01 >= needs["native"]:
            continue
        budget = (needs["granule"] + needs["native"]) // 2
        out["demo"][job] = {"budget": budget}
        for name in ("native", "granule"):
            worker = Worker(name, args.size)
            out["demo"][job][name] = run = worker.ask(job=job, steps=args.steps, budget=budget)
            worker.close()
            say(f"demonstration: {job} on {name} in {budget / GIB:.3f} GiB: {show(run)}\n    {run.get('message', '')}")
        return


def phase_exact(args, out):
    """A few steps of each job with kernels that give the same bits every time, twice on native and once on granule."""
    def one(name):
        worker = Worker(name, args.size, quiet=True, exact=True)
        runs = {}
        for job in args.jobs:
            runs[job] = [worker.ask(job=job, steps=6) for _ in range(2 if name == "native" else 1)]
        if name == "granule" and "serving" in args.jobs:
            runs["serving"].append(worker.ask(job="serving", cache="arena", steps=6))
        worker.close()
        return runs

    with ThreadPoolExecutor(2) as pool:
        native, granule = pool.map(one, ("native", "granule"))
    for job in args.jobs:
        runs = native[job] + granule[job]
        errors = [run["error"] for run in runs if "error" in run]
        out["exact"][job] = {"error": errors[0]} if errors else {"results": [run["results"] for run in runs]}
        say(f"exact: {job}: {out['exact'][job]}"[:400])


def same(a, b):
    """How far two lists of results are apart."""
    if len(a) != len(b):
        return float("inf")
    flat = lambda rows: [x for row in rows for x in (row if isinstance(row, list) else [row])]
    return max((abs(x - y) for x, y in zip(flat(a), flat(b))), default=0.0)


def verdict(runs, name):
    """How an allocator stands against each of the others."""
    if "error" in runs[name]:
        return []
    others = {other: run for other, run in runs.items() if other != name and "error" not in run}
    return [f"  {name}: {said(paired(runs[name], run), other)}" for other, run in others.items()]


def table(out):
    lines = []
    for job, runs in out["time"].items():
        base = requested(out, job)
        if base is None:
            continue
        rounds = max(run.get("rounds", 0) for run in runs.values())
        lines.append(f"\n{job} (peak of requested bytes {base / GIB:.3f} GiB; {rounds} rounds)")
        lines.append(f"  {'allocator':<12}{'ms a step':>10}{'mean':>9}{'cpu':>9}{'total s':>9}{'reserved':>10}{'ratio':>8}"
                     f"{'least':>9}{'ratio':>8}  results")
        native = runs.get("native", {})
        for name, run in runs.items():
            if "error" in run:
                lines.append(f"  {name:<12}{run['error']}")
                continue
            need = out["budget"].get(job, {}).get(name, {}).get("least_budget")
            budget = f"{need / GIB:>9.3f}{need / base:>8.3f}" if need else f"{'-':>9}{'-':>8}"
            far = same(run["results"], native["results"]) if native.get("results") else float("nan")
            again = same(run["results"], run["again"])
            words = "equal to native" if far == 0 else f"differ from native by {far:g}"
            words += "" if again == 0 else f" (two runs differ by {again:g})"
            lines.append(f"  {name:<12}{run['step_ms_median']:>10.2f}{run['step_ms_mean']:>9.2f}{run['cpu_ms_median']:>9.2f}"
                         f"{run['total_s']:>9.2f}{run['reserved_peak'] / GIB:>10.3f}{run['reserved_peak'] / base:>8.3f}{budget}  {words}")
        if "granule" in runs:
            lines.extend(verdict(runs, "granule"))
    if out["costs"]:
        lines.append("\ngranule in a step, later half of a run of its own that counts")
        lines.append(f"  {'job':<24}{'step ms':>9}{'allocs':>9}{'frees':>9}{'misses':>8}{'alloc+free ms':>15}{'driver calls':>14}"
                     f"{'driver ms':>11}  create/map/access/unmap/release/events")
        for label, cost in out["costs"].items():
            if "error" in cost:
                lines.append(f"  {label:<24}{cost['error']}")
                continue
            of = lambda *names: "/".join(f"{cost.get('driver_' + name, 0):.2f}" for name in names)
            events = sum(cost.get("driver_" + name, 0) for name in ("record_event", "query_event"))
            lines.append(f"  {label:<24}{cost['step_ms']:>9.2f}{cost.get('allocs', 0):>9.0f}{cost.get('frees', 0):>9.0f}{cost.get('misses', 0):>8.2f}"
                         f"{cost.get('allocs_ms', 0) + cost.get('frees_ms', 0):>15.3f}{cost.get('driver_calls', 0):>14.2f}{cost.get('driver_ms', 0):>11.3f}"
                         f"  {of('create', 'map', 'set_access', 'unmap', 'release')}/{events:.2f}")
    if out["serving"]:
        lines.append("\nserving, KV caches by cat and in arenas")
        for name, run in out["serving"].items():
            if run and "error" not in run:
                lines.append(f"  {name:<20}{run['tokens_a_second']:>10.0f} tokens/s "
                             f"{run['step_ms_median']:>8.2f} ms a step, {run['cpu_ms_median']:.2f} ms of it CPU, {run['reserved_peak'] / GIB:>8.3f} GiB reserved")
            else:
                lines.append(f"  {name:<20}{run}")
        good = {name: run for name, run in out["serving"].items() if run and "error" not in run}
        checks = [run["checks"] for run in good.values()]
        lines.append(f"  tokens and check sums equal: {all(check == checks[0] for check in checks)}")
        ours = good.get("arenas on granule")
        for name, theirs in good.items():
            if ours and theirs is not ours:
                lines.append(f"  arenas: {said(paired(ours, theirs), name)}")
    layout = out["attention"]
    if "error" in layout:
        lines.append(f"  attention by layout: {layout['error']}")
    elif layout:
        lines.append("  a layer's attention for one token over {length} of {batch} sequences: {attend_cat_us:.1f} us over tensors of torch.cat, "
                     "{attend_arena_us:.1f} us over rows of an arena;\n  adding the token's keys: {add_cat_us:.1f} us by torch.cat, "
                     "{add_arena_us:.1f} us in place (results differ by {differ:g})".format(**layout))
    for job, exact in out["exact"].items():
        if "error" in exact:
            lines.append(f"\n{job}, kernels that give the same bits: {exact['error']}")
            continue
        first, again, ours, *arenas = exact["results"]
        lines.append(f"\n{job}, kernels that give the same bits: granule differs from native by {same(first, ours):g}, "
                     f"two runs of native by {same(first, again):g}" + "".join(f", arenas on granule by {same(first, one):g}" for one in arenas))
    for job, demo in out["demo"].items():
        lines.append(f"\n{job} in {demo['budget'] / GIB:.3f} GiB:")
        for name in ("native", "granule"):
            lines.append(f"  {name:<12}{show(demo[name])}\n      {demo[name].get('message', '')}")
    return "\n".join(lines)


def main():
    listed = lambda text: tuple(text.split(","))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all figures there, after each phase")
    parser.add_argument("--jobs", type=listed, default=JOBS)
    parser.add_argument("--allocators", type=listed, default=ALLOCATORS)
    parser.add_argument("--phases", type=listed, default=("time", "arena", "budget", "demo", "exact"))
    parser.add_argument("--resume", help="go on with the figures of that file; the phase time adds the rounds that are missing")
    parser.add_argument("--deadline", type=float, default=500, help="seconds after which no round begins and bisections end where they are")
    parser.add_argument("--rounds", type=int, default=3, help="of the phase time: runs of each job")
    parser.add_argument("--cores", type=int, default=4, help="of the phase time: the same first ones for all processes; 0 leaves them free")
    parser.add_argument("--warm", type=int, default=3, help="steps of a job before it is timed")
    parser.add_argument("--steps", type=int, default=None, help="steps of a job; its own number by default")
    parser.add_argument("--size", choices=("big", "small"), default="big")
    parser.add_argument("--parallel", type=int, default=5, help="processes of the bisection at a time")
    parser.add_argument("--tolerance", type=float, default=0.003, help="of the least budget, as a part of it")
    args = parser.parse_args()
    out = {"machine": {}, "rounds": {}, "time": {}, "costs": {}, "attention": {}, "serving": {}, "budget": {}, "demo": {}, "exact": {}}
    if args.resume:
        with open(args.resume, encoding="utf-8") as file:
            out.update(json.load(file))
    elif "time" not in args.phases and args.phases != ("exact",):
        parser.error("without the phase time, --resume names a file of an earlier run")

    def save():
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(out, file)

    if "time" in args.phases:
        phase_time(args, out, save)
        save()
    if "arena" in args.phases:
        phase_arena(args, out)
        save()
    if "budget" in args.phases:
        phase_budget(args, out)
        save()
    if "demo" in args.phases:
        phase_demo(args, out)
        save()
    if "exact" in args.phases:
        phase_exact(args, out)
        save()
    print(table(out))


if __name__ == "__main__":
    main()
