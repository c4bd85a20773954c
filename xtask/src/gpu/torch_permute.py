"""PyTorch's permute().contiguous() of the same blocks, beside its device copy: rows added to
bench.json.
"""
import json
import sys

import torch

FILE, DEVICE = sys.argv[1], int(sys.argv[2])
NL, NO, NH, NT, HD = 32, 2, 8, 16, 128


def seconds(run, times):
    run()
    rounds = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            run()
        end.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(end) / 1e3 / times)
    return sorted(rounds)[len(rounds) // 2]


def main():
    torch.cuda.set_device(DEVICE)
    with open(FILE) as file:
        results = json.load(file)
    for blocks in (1, 4, 16, 32, 128, 512):
        # As an engine has them: [layer, outer, block, token, head, element]; universal: [block,
        # head, layer, outer, token, element].
        stacks = torch.empty((NL, NO, blocks, NT, NH, HD), dtype=torch.bfloat16, device="cuda")
        size = stacks.numel() * stacks.element_size()
        times = max(4, min(24, (1 << 30) // size))
        copy = torch.empty_like(stacks)
        limit = 2 * size / seconds(lambda: copy.copy_(stacks), times) / 1e9
        took = seconds(lambda: stacks.permute(2, 4, 0, 1, 3, 5).contiguous(), times)
        rate = 2 * size / took / 1e9
        results["rows"].append({
            "name": "torch_permute_nhd_to_universal", "bytes": 2 * size, "size": size, "us": took * 1e6,
            "gb_per_s": rate, "of_limit": rate / limit, "of_device_copy": rate / limit, "torch": torch.__version__,
        })
        print(f"  torch_permute_nhd_to_universal {size >> 10} KiB {rate:.1f} GB/s {100 * rate / limit:.1f} %")
    with open(FILE, "w") as file:
        json.dump(results, file, indent=2)


main()
