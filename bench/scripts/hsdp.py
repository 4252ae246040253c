"""`hsdp_plain.py` on evenstep: the processes of a host shard the model, and are one worker."""

import sys

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from evenstep.adapters import fsdp

EPOCHS, BATCH, ACCUMULATE = 2, 24, 2


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 15), nn.Linear(15, 1))
    with fsdp.join(processes=2) as session:
        fully_shard(model[2])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        session.prepare(model, optimizer, scheduler)
        loader = session.loader(data, batch=BATCH)
        for _ in session.epochs(EPOCHS):
            for i, (inputs, targets) in session.enumerate(loader):
                loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATE
                loss.backward()
                if (i + 1) % ACCUMULATE == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if session.is_leader:
            torch.save({"model": state}, sys.argv[1])


if __name__ == "__main__":
    main()
