"""The same step in PyTorch, for the networks that are written here a second time."""

import time
from typing import Any

import jax
import torch
from _rivals import Rival, Setting


def torch_loop(setting: Setting) -> Rival | None:
    """Gradients added up by `backward`; None for a network that is not here."""
    workload = setting.workload
    if workload.name not in _NETWORKS:
        return None
    torch.manual_seed(0)
    model = _NETWORKS[workload.name](workload.model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.0)
    cross_entropy = torch.nn.CrossEntropyLoss(reduction="sum")
    mine = sum(p.numel() for p in model.parameters())
    theirs = sum(a.size for a in jax.tree.leaves(workload.model) if hasattr(a, "size"))
    if mine != theirs:
        raise RuntimeError(f"{workload.name}: {mine} parameters, Equinox has {theirs}")

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        for x, y in setting.slices():
            logits = model(torch.from_numpy(x))
            labels = torch.from_numpy(y).long()
            (cross_entropy(logits, labels) / setting.rows).backward()
        optimizer.step()

    begin = time.perf_counter()
    run()
    return Rival(run, time.perf_counter() - begin, None)


def _mlp(model: Any) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for layer in model.layers:
        layers += [torch.nn.Linear(*reversed(layer.weight.shape)), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class _Block(torch.nn.Module):
    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1 = _conv(inside, outside, 3, stride)
        self.conv2 = _conv(outside, outside, 3, 1)
        self.norm1 = torch.nn.GroupNorm(8, outside)
        self.norm2 = torch.nn.GroupNorm(8, outside)
        changes = stride != 1 or inside != outside
        self.shortcut = _conv(inside, outside, 1, stride) if changes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return torch.relu(out + (x if self.shortcut is None else self.shortcut(x)))


def _conv(inside: int, outside: int, size: int, stride: int) -> torch.nn.Module:
    return torch.nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)


class _Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def _cnn(model: Any) -> torch.nn.Module:
    stem = model.stem.weight.shape[0]
    blocks = [
        _Block(b.conv1.in_channels, b.conv1.out_channels, b.conv1.stride[0])
        for b in model.blocks
    ]
    return torch.nn.Sequential(
        _conv(3, stem, 3, 1),
        torch.nn.GroupNorm(8, stem),
        torch.nn.ReLU(),
        *blocks,
        _Mean(),
        torch.nn.Linear(*reversed(model.head.weight.shape)),
    )


_NETWORKS = {"MLP": _mlp, "CNN": _cnn}
