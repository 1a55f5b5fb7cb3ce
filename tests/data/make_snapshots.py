"""Writes the small snapshots beside this file, in the form in which PyTorch writes its own.

A toy caching allocator with segments, split blocks and a ring of events stands in for PyTorch's; the
fields are those of torch/csrc/cuda/Module.cpp and memory_snapshot.cpp of the versions named. Run it
again only to change the files: python3 tests/data/make_snapshots.py
"""

import pathlib
import pickle
import random

HERE = pathlib.Path(__file__).parent
MIB = 1 << 20
FRAMES = [
    [{"filename": "train.py", "line": 10 + i, "name": f"layer{i}"}, {"filename": "train.py", "line": 99, "name": "main"}]
    for i in range(4)
]


class Device:
    """One device's allocator: segments of 20 MiB, or one expandable segment a stream."""

    def __init__(self, number, ring, expandable, times, seed):
        self.number, self.ring, self.expandable, self.times = number, ring, expandable, times
        self.random = random.Random(seed)
        self.events, self.segments, self.next = [], [], 0x7F0000000000 + (number << 40)
        self.now = 1_700_000_000_000_000

    def log(self, action, stream, size, **more):
        self.now += self.random.randrange(1, 50)
        entry = {"action": action, **more, "size": size, "stream": stream}
        if self.times:
            entry["time_us"] = self.now
        if self.random.random() < 0.8:
            entry["frames"] = self.random.choice(FRAMES)
        self.events.append(entry)

    def alloc(self, want, stream=0):
        size = (want + 511) // 512 * 512
        for segment in self.segments:
            if segment["stream"] != stream:
                continue
            for i, block in enumerate(segment["blocks"]):
                if block["state"] == "inactive" and block["size"] >= size:
                    return self.place(segment, i, want, size, stream)
        unit = 2 * MIB if self.expandable else 20 * MIB
        total = (size + unit - 1) // unit * unit
        mine = [s for s in self.segments if s["stream"] == stream]
        if self.expandable and mine:
            segment = mine[0]
            addr = segment["address"] + segment["total_size"]
            self.log("segment_map", stream, total, addr=addr)
            segment["total_size"] += total
            last = segment["blocks"][-1]
            if last["state"] == "inactive":
                last["size"] += total
            else:
                segment["blocks"].append({"address": addr, "size": total, "requested_size": 0, "state": "inactive"})
            return self.place(segment, len(segment["blocks"]) - 1, want, size, stream)
        addr, self.next = self.next, self.next + (1 << 34 if self.expandable else total)
        self.log("segment_map" if self.expandable else "segment_alloc", stream, total, addr=addr)
        segment = {"address": addr, "total_size": total, "stream": stream,
                   "blocks": [{"address": addr, "size": total, "requested_size": 0, "state": "inactive"}]}
        self.segments.append(segment)
        return self.place(segment, 0, want, size, stream)

    def place(self, segment, i, want, size, stream):
        block = segment["blocks"][i]
        rest = block["size"] - size
        block.update(size=size, requested_size=want, state="active_allocated")
        if rest:
            segment["blocks"].insert(i + 1, {"address": block["address"] + size, "size": rest, "requested_size": 0,
                                             "state": "inactive"})
        self.log("alloc", stream, want, addr=block["address"])
        return segment, block

    def free(self, where, complete=True):
        segment, block = where
        if block["state"] == "active_allocated":
            self.log("free_requested", segment["stream"], block["requested_size"], addr=block["address"])
            block["state"] = "active_pending_free"
        if not complete:
            return
        self.log("free_completed", segment["stream"], block["requested_size"], addr=block["address"])
        block.update(state="inactive", requested_size=0)
        blocks = segment["blocks"]
        i = blocks.index(block)
        for left in (i, i - 1):
            if 0 <= left and left + 1 < len(blocks) and blocks[left]["state"] == blocks[left + 1]["state"] == "inactive":
                blocks[left]["size"] += blocks[left + 1]["size"]
                del blocks[left + 1]

    def trim(self):
        for segment in list(self.segments):
            if not self.expandable and all(b["state"] == "inactive" for b in segment["blocks"]):
                self.log("segment_free", segment["stream"], segment["total_size"], addr=segment["address"])
                self.segments.remove(segment)

    def run(self, steps, streams=(0,)):
        live = [self.alloc(self.random.randrange(1, 9 * MIB), self.random.choice(streams)) for _ in range(12)]
        for step in range(steps):
            if self.random.random() < 0.5 and len(live) > 4:
                self.free(live.pop(self.random.randrange(len(live))))
            else:
                live.append(self.alloc(self.random.randrange(1, 6 * MIB), self.random.choice(streams)))
            if step % 100 == 99:
                self.trim()
        return live

    def dump(self, requested=True, device=True):
        segments = []
        for s in self.segments:
            blocks = []
            for b in s["blocks"]:
                block = {"address": b["address"], "size": b["size"], "requested_size": b["requested_size"],
                         "state": b["state"], "frames": FRAMES[0] if b["state"] != "inactive" else []}
                blocks.append(block)
            live = [b for b in s["blocks"] if b["state"] != "inactive"]
            segment = {
                "device": self.number, "address": s["address"], "total_size": s["total_size"],
                "allocated_size": sum(b["size"] for b in live), "active_size": sum(b["size"] for b in live),
                "requested_size": sum(b["requested_size"] for b in live), "stream": s["stream"],
                "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": self.expandable,
                "frames": [], "blocks": blocks}
            segments.append(segment)
        return segments, self.events[-self.ring:]


def snapshot(devices, settings, **more):
    dumps = [d.dump() for d in devices]
    return {"segments": [s for segments, _ in dumps for s in segments],
            "device_traces": [events for _, events in dumps],
            "allocator_settings": settings, **more}


def write(name, data, protocol=4):
    (HERE / name).write_bytes(pickle.dumps(data, protocol=protocol))


def main():
    old = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
           "expandable_segments": False, "roundup_power2_divisions": {"1": 0, "2": 0}}
    new = dict(old, expandable_segments=True, graph_capture_record_stream_reuse=False)

    plain = Device(0, 10_000, False, True, 1)
    plain.run(400)
    write("snapshot_2_1.pickle", snapshot([plain], old))

    # The ring kept the latest 300 events only, so that frees come without their allocations.
    wrapped = Device(0, 300, False, True, 2)
    wrapped.run(900)
    write("snapshot_wrapped.pickle", snapshot([wrapped], old))

    # Expandable segments, two streams by handle, a free that waits, and running out of memory.
    wide = Device(0, 10_000, True, True, 3)
    live = wide.run(300, streams=(0, 0x55D5C0DE0010))
    wide.free(live[0], complete=False)
    wide.log("oom", 0, 64 * MIB, device_free=24 * MIB)
    wide.log("snapshot", 0, 0, addr=0)
    for entry in wide.events:
        entry["compile_context"] = "N/A"
        entry["user_metadata"] = ""
    write("snapshot_2_11.pickle", snapshot([wide], new, external_annotations=[
        {"stage": "ProfilerStep#1", "name": "step", "device": 0, "time_us": 1_700_000_000_000_100}]))

    # Half of a segment is free, in holes, when more than a hole is asked for.
    holes = Device(0, 10_000, False, True, 7)
    holes.free(holes.alloc(2560 * MIB))
    pieces = [holes.alloc(128 * MIB) for _ in range(20)]
    for piece in pieces[::2]:
        holes.free(piece)
    holes.log("oom", 0, 512 * MIB, device_free=128 * MIB)
    for piece in pieces[1::4]:
        holes.free(piece)
    write("snapshot_oom.pickle", snapshot([holes], old))

    # Two devices with work and one without; the C++ writer's protocol.
    devices = [Device(0, 10_000, False, True, 4), Device(1, 10_000, False, True, 5), Device(2, 10_000, False, True, 6)]
    devices[0].run(100)
    devices[2].run(150)
    write("snapshot_devices.pickle", snapshot(devices, old), protocol=2)


main()
