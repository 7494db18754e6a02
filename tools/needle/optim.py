"""Muon for matrices, Adam for the rest, on stacks of all layers' weights of one kind."""
import torch

from model import KINDS


def orthogonalise(g):
    """Newton-Schulz steps towards the nearest semi-orthogonal matrix; g [n, o, i] bf16."""
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.float().flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-7)).bfloat16()
    for _ in range(5):
        a = x @ x.mT
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x.mT if tall else x


class Optimiser:
    """lr of a step = rate * scale; scale runs 0..1 over a stage's warm-up and cool-down."""

    def __init__(self, weights, muon_lr=0.02, adam_lr=3e-3, decay=0.02):
        self.w = weights
        self.muon_lr, self.adam_lr, self.decay = muon_lr, adam_lr, decay
        self.first = {k: torch.zeros_like(v) for k, v in weights.master.items()}
        self.second = {k: torch.zeros_like(v) for k, v in weights.master.items() if KINDS[k][3] == "adam"}
        self.t = 0

    @torch.no_grad()
    def step(self, scale):
        self.t += 1
        for kind, (_, _, _, how, _) in KINDS.items():
            if how == "none":
                continue
            master, grad, first = self.w.master[kind], self.w.grad[kind].float(), self.first[kind]
            if how == "muon":
                first.lerp_(grad, 0.05)
                flat = grad.lerp(first, 0.95).flatten(0, -3).bfloat16()
                rows, cols = flat.shape[-2:]
                lr = self.muon_lr * scale * max(1.0, rows / cols) ** 0.5
                master.mul_(1 - self.decay * self.muon_lr * scale)
                master.add_(orthogonalise(flat).view_as(master), alpha=-lr)
                continue
            second = self.second[kind]
            first.lerp_(grad, 0.1)
            second.lerp_(grad.square(), 0.02)
            hat = (1 - 0.98**self.t) ** 0.5 / (1 - 0.9**self.t)
            lr = self.adam_lr * scale * (2.0 if kind == "embed" else 1.0)
            master.add_(first / (second.sqrt() + 1e-10), alpha=-lr * hat)
        self.w.refresh()
