"""Shard a plain module over two processes, and train it as if nothing had happened.

    torchrun --nproc-per-node 2 examples/04_shard_any_module.py

Without torchrun it runs alone, with one shard. ``fully_shard`` takes the arguments of torch's.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from terashard import full_state_dict, fully_shard, initialise


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def main() -> None:
    if not dist.is_torchelastic_launched():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    with torch.device("meta"):  # no memory for parameters yet
        model = nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 8))
    for block in model[:-1]:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(0)  # the same on all ranks
    initialise(model)  # one unit full at a time
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        x = torch.randn(32, 64, generator=data)
        loss = F.cross_entropy(model(x), x[:, :8].argmax(dim=1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss:.3f}, gradient norm {norm:.3f}")
    state = full_state_dict(model)  # on rank 0
    if dist.get_rank() == 0:
        kept = sum(p.to_local().numel() for p in model.parameters())
        print(f"kept {kept:,} of {sum(t.numel() for t in state.values()):,} numbers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
