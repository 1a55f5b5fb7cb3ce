"""Records a memory snapshot with PyTorch: a short training loop with sequences of varying length.

    python record_snapshot.py OUT.pickle [--steps 12] [--expandable] [--streams] [--oom] [--ring N]

Writes what torch.cuda.memory._dump_snapshot writes, and beside it OUT.json with what PyTorch itself
says of the run, to compare with. Needs PyTorch 2.1 or newer and a GPU; takes a few seconds.
"""

import argparse
import json
import os
import random
import sys


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ring", type=int, default=1_000_000, help="events that PyTorch keeps")
    parser.add_argument("--expandable", action="store_true")
    parser.add_argument("--streams", action="store_true", help="copy batches on a second stream")
    parser.add_argument("--oom", action="store_true", help="run out of memory at the end, and go on")
    args = parser.parse_args()
    if args.expandable:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            os.environ[name] = "expandable_segments:True"

    import torch
    from torch import nn

    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    torch.manual_seed(1)
    chance = random.Random(1)
    device = torch.device("cuda:0")
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=args.ring)

    layer = nn.TransformerEncoderLayer(args.width, 16, 4 * args.width, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    side = torch.cuda.Stream() if args.streams else torch.cuda.current_stream()
    for step in range(args.steps):
        batch, length = chance.randrange(2, 7), chance.randrange(64, 1537)
        with torch.cuda.stream(side):
            x = torch.randn(batch, length, args.width, device=device, dtype=torch.bfloat16)
        torch.cuda.current_stream().wait_stream(side)
        x.record_stream(torch.cuda.current_stream())
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: {batch} x {length}, loss {loss.item():.4f}", file=sys.stderr)
        del x, loss

    ooms = 0
    if args.oom:
        # One large segment, cut into pieces of which every other is freed: half of it is free, in holes.
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        piece = free // 24 // (1 << 21) * (1 << 21)
        whole = torch.empty(21 * piece, dtype=torch.uint8, device=device)
        del whole
        kept = [torch.empty(piece, dtype=torch.uint8, device=device) for _ in range(21)][::2]
        try:
            torch.empty(4 * piece, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError:
            ooms += 1
        del kept

    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(args.out)
    stats = torch.cuda.memory_stats()
    facts = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0),
        "args": vars(args),
        "reserved_peak": stats["reserved_bytes.all.peak"],
        "reserved_now": stats["reserved_bytes.all.current"],
        "requested_peak": stats.get("requested_bytes.all.peak"),
        "allocated_peak": stats["allocated_bytes.all.peak"],
        "oom": ooms,
        "file_bytes": os.path.getsize(args.out),
    }
    with open(os.path.splitext(args.out)[0] + ".json", "w") as file:
        json.dump(facts, file, indent=1)
    print(json.dumps(facts))


main()
