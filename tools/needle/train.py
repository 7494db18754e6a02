#!/usr/bin/env python3
"""Trains the needle model in stages, each of which can start from the weights of the one before.

    train.py --data DATA --out OUT [--start CKPT] --stages P:25,B:215,D:140,E:60 [--eval]

A stage is NAME:SECONDS. A checkpoint is written after each stage and every 45 seconds.

  P  dense attention, rows of 256 tokens          the look-up forms
  B  dense attention, rows of 2048                text; the indexers learn from attention
  D  top-128 selection, rows of 4096              the model learns to live with the selection
  E  top-128 selection, rows of 16384             many keys
  F, G, H  top-128 selection, rows of 2048, 4096, 16384: many questions about many look-alike names

During P and B layers 0-2 see only 64 tokens back, so that the look-up forms in layers 3-5, whose
selection is made from an input that knows the name asked for.

The indexers' loss is the cross entropy of softmax(scores) against the attention of their group's
layers, averaged over heads and layers, on sampled rows; keys of other rows of the batch compete. On
rows that answer, half of the target is the known place of the answer. No gradient of it reaches
anything but the indexer.
"""
import argparse
import math
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import batch
import checkpoint
import model as m
from optim import Optimiser

# name: (row length, selection?, facts, questions, plain rows, answer weight, warm-up steps)
STAGES = {
    "P": (256, False, 3, 2, 0.15, 6.0, 50),
    "B": (2048, False, 24, 6, 0.40, 8.0, 30),
    "D": (4096, True, 64, 8, 0.40, 10.0, 30),
    "E": (16384, True, 96, 16, 0.40, 16.0, 10),
    "F": (2048, True, 40, 20, 0.15, 8.0, 30),
    "G": (4096, True, 80, 32, 0.25, 8.0, 20),
    "H": (16384, True, 192, 64, 0.25, 12.0, 10),
}
WINDOW = 64
INDEX_ROWS = 1024
NEGATIVES = 8192
INF = float("inf")


class Pieces:
    """The compiled functions; on the CPU they run as they are."""

    def __init__(self, compiled):
        def c(f):
            return torch.compile(f, dynamic=False) if compiled else f
        self.pre, self.query = c(m.pre), c(m.query)
        self.post_dense, self.post_moe = c(m.post_dense), c(m.post_moe)
        self.index, self.mtp, self.loss = c(m.index_vectors), c(m.mtp_input), c(m.token_loss)
        self.rms, self.scores = c(m.rms), c(index_scores)
        self.probs, self.entropy = c(row_attention), c(index_entropy)
        self.compiled = compiled
        self.masked, self.selected = c(flex_masked), c(flex_selected)


def flex_masked(q, k, v, block_mask):
    return flex_attention(q, k, v, block_mask=block_mask, scale=m.SCALE)


def flex_selected(q, k, v, chosen, block_mask):
    def score(s, b, h, i, j):
        return torch.where(chosen[b, i, j], s, -INF)
    return flex_attention(q, k, v, score_mod=score, block_mask=block_mask, scale=m.SCALE)


def index_scores(dots, w):
    """dots [B, 4, T, T], w [B, T, 4] -> causal scores [B, T, T] float32."""
    s = (F.relu(dots.float()) * w.permute(0, 2, 1)[..., None]).sum(1)
    t = torch.arange(dots.shape[-1], device=dots.device)
    return s.masked_fill(t[None, :] > t[:, None], -INF)


def row_attention(q, k, visible):
    """q [G, R, 8, d], k [G, T, 8, d], visible [G, R, T] -> attention averaged over heads [G, R, T]."""
    s = torch.matmul(q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1)).float() * m.SCALE
    return torch.softmax(s.masked_fill(~visible[:, None], -INF), -1).mean(1)


def index_entropy(q, k, w, other, same, target, visible):
    """Mean over rows of the cross entropy of the softmax over own visible keys and other rows' keys.

    q [G, R, 4, d], k [G, T, d], w [G, R, 4], other [M, d], same [G, M]: key m is of row g itself.
    """
    wt = w.permute(0, 2, 1)[..., None]
    qh = q.permute(0, 2, 1, 3)
    own = (F.relu(torch.matmul(qh, k.mT[:, None]).float()) * wt).sum(1)
    far = (F.relu(torch.matmul(qh, other.t()).float()) * wt).sum(1)
    top = torch.cat((own.masked_fill(~visible, -INF), far.masked_fill(same[:, None], -INF)), -1)
    return (torch.logsumexp(top, -1) - (own * target).sum(-1)).mean()


@torch.no_grad()
def select(pieces, q, k, w, rows, length):
    """The top-128 set of every token as a mask [rows, length, length]; ties at the edge all enter."""
    q = q.detach().view(rows, length, m.INDEX_HEADS, m.INDEX_DIM).permute(0, 2, 1, 3)
    k = k.detach().view(rows, length, m.INDEX_DIM)
    w = w.detach().view(rows, length, m.INDEX_HEADS)
    step = max(1, (1 << 28) // (length * length))
    out = []
    for at in range(0, rows, step):
        dots = torch.matmul(q[at:at + step], k[at:at + step].mT[:, None])
        s = pieces.scores(dots, w[at:at + step])
        cut = torch.topk(s, min(m.TOPK, length), dim=-1, sorted=False).values.amin(-1, keepdim=True)
        out.append((s >= cut) & (s > -INF))
    return torch.cat(out)


class Step:
    """Forward and backward of one batch for one stage."""

    def __init__(self, weights, pieces, stage, tokens, device):
        self.w, self.p, self.device = weights, pieces, device
        self.length, self.sparse = STAGES[stage][:2]
        self.rows = tokens // self.length
        self.tokens = tokens
        # dense stages share one physical shape; rows shorter than it are kept apart by the mask
        self.span = self.length if self.sparse else min(4096, tokens)
        self.lists = {}
        if pieces.compiled:
            for window in ((self.span,) if self.sparse else (WINDOW, self.span)):
                self.lists[window] = self.block_mask(window)

    def mask(self, window):
        window = torch.tensor(window, device=self.device)
        row = torch.tensor(self.length, device=self.device)

        def rule(b, h, i, j):
            return (i >= j) & (i - j < window) & (i // row == j // row)
        return rule

    def block_mask(self, window):
        return create_block_mask(self.mask(window), None, None, self.span, self.span, device=self.device)

    def attend(self, q, k, v, window, chosen):
        if not self.p.compiled:
            shape = (self.rows, self.length)
            i = torch.arange(self.length)
            mask = ((i[:, None] >= i) & (i[:, None] - i < window))[None] if chosen is None else chosen
            return m.attend_plain(q.view(*shape, *q.shape[1:]), k.view(*shape, *k.shape[1:]),
                                  v.view(*shape, *v.shape[1:]), mask).reshape(self.tokens, -1)
        q, k, v = (t.view(-1, self.span, m.HEADS, t.shape[-1]).transpose(1, 2) for t in (q, k, v))
        if chosen is None:
            out = self.p.masked(q, k, v, self.lists[window])
        else:
            out = self.p.selected(q, k, v, chosen, self.lists[self.span])
        return out.transpose(1, 2).reshape(self.tokens, -1)

    def sample_rows(self, data, gen):
        """Rows for the index loss: G rows of the batch, R tokens of each, half of them answering."""
        dev, count = self.device, min(self.rows, 32)
        per = max(2, min(INDEX_ROWS, self.tokens // 4) // count)
        seq = torch.randperm(self.rows, generator=gen, device=dev)[:count]
        n = data["asked"][seq].sum(1, keepdim=True)
        which = (torch.rand(count, per, generator=gen, device=dev) * n.clamp_min(1)).long()
        j = torch.randint(6, (count, per), generator=gen, device=dev)
        at = data["answer_row"][seq].gather(1, which[..., None].expand(-1, -1, 6)).gather(2, j[..., None])[..., 0]
        keys = data["fact_digit"][seq].gather(1, which[..., None].expand(-1, -1, 6))
        answers = (torch.arange(per, device=dev) < per // 2) & (n > 0)
        free = torch.randint(self.length, (count, per), generator=gen, device=dev)
        wanted = keys.gather(2, j[..., None])
        return {"seq": seq, "pos": torch.where(answers, at, free), "answers": answers,
                "keys": keys, "wanted": wanted}

    def take(self, x, picked, pos):
        """[N, ...] -> [G, R, ...] at the sampled rows."""
        flat = picked["seq"][:, None] * self.length + pos
        return x[flat]

    def visible(self, pos, window, chosen, picked):
        t = torch.arange(self.length, device=self.device)
        seen = (t <= pos[..., None]) & (pos[..., None] - t < window)
        return seen if chosen is None else chosen[picked["seq"][:, None], pos]

    def attention_of(self, q, k, picked, pos, visible):
        keys = k.detach().view(self.rows, self.length, m.HEADS, m.HEAD_DIM)[picked["seq"]]
        return self.p.probs(self.take(q.detach(), picked, pos), keys, visible)

    def index_loss(self, vectors, target, picked, pos, causal, oracle, back):
        """oracle: share of the known place in the target of answering rows; back: the key stream of
        the MTP layer holds a token one place before the main one does."""
        q, k, w = vectors
        if oracle:
            known = torch.zeros_like(target)
            share = torch.full_like(picked["keys"], 1.0 / 12, dtype=torch.float32)
            known.scatter_add_(2, picked["keys"], share)
            known.scatter_add_(2, (picked["keys"] - back).clamp_min(0), share)
            half = torch.full_like(picked["wanted"], 0.5, dtype=torch.float32)
            sharp = torch.zeros_like(target).scatter_add_(2, picked["wanted"], half)
            sharp.scatter_add_(2, (picked["wanted"] - back).clamp_min(0), half)
            known = (0.4 * known + 0.6 * sharp) * causal
            known = known / known.sum(-1, keepdim=True).clamp_min(1e-9)
            mix = oracle * picked["answers"][..., None].float()
            target = (1 - mix) * target + mix * known
        stride = max(1, self.tokens // NEGATIVES)
        owner = torch.arange(0, self.tokens, stride, device=self.device) // self.length
        same = owner[None] == picked["seq"][:, None]
        keys = k.view(self.rows, self.length, m.INDEX_DIM)[picked["seq"]]
        return self.p.entropy(self.take(q, picked, pos), keys, self.take(w, picked, pos), k[::stride],
                              same, target, causal)

    def run(self, data, gen, chain):
        """Adds the gradients of one batch; returns sums for the log, on the device."""
        u, p = self.w.use, self.p
        token, pos = data["token"].flatten(), data["pos"].flatten()
        cos, sin = m.rope_table(pos)
        picked = self.sample_rows(data, gen)
        counts, index_losses = [], []
        full = self.length

        def shifted(x, by, fill):
            x = x.view(self.rows, self.length)
            return torch.cat((x[:, by:], torch.full_like(x[:, :by], fill)), 1).flatten()

        def layer_inputs(i):
            return (u["ln_in"][i], u["q_a"][i], u["q_ln"][i], u["q_b"][i])

        def finish(i, x, att):
            if i < m.DENSE:
                return p.post_dense(x, att, u["o"][i], u["ln_post"][i], u["gate"][i], u["up"][i], u["down"][i])
            j = i - m.DENSE
            x, count = p.post_moe(x, att, u["o"][i], u["ln_post"][i], u["router"][j], u["bias"][j],
                                  u["e_gate"][j], u["e_up"][j], u["e_down"][j])
            counts.append((j, count.detach()))
            return x

        def index_of(i, h, lat):
            j = m.FULL.index(i)
            vec = p.index(h.detach(), lat.detach(), u["wq_b"][j], u["wk"][j], u["kn_w"][j], u["kn_b"][j],
                          u["wp"][j], cos, sin)
            return vec, select(p, *vec, self.rows, self.length) if self.sparse else None

        def close_group(i, vectors, target, at, rows):
            causal = self.visible(at, full, None, picked)
            index_losses.append(self.index_loss(vectors, target / rows, picked, at, causal,
                                                0.5 if i else 0.0, int(i == m.LAYERS)))

        x = F.embedding(token, u["embed"][0]).float()
        vectors = chosen = target = None
        for i in range(m.LAYERS):
            window = WINDOW if i < 3 and not self.sparse else self.span
            h, lat, q, k, v = p.pre(x, *layer_inputs(i), u["kv_a"][i], u["kv_ln"][i], u["kv_b"][i], cos, sin)
            if i in m.FULL:
                vectors, chosen = index_of(i, h, lat)
                target = 0.0
            # far keys of layers 0-2 were never attended to: their target stays inside the selection
            seen = self.visible(picked["pos"], window, chosen if i < 3 else None, picked)
            with torch.no_grad():
                target = target + self.attention_of(q, k, picked, picked["pos"], seen)
            x = finish(i, x, self.attend(q, k, v, window, chosen))
            if i + 1 in m.FULL:
                close_group(i - 2, vectors, target, picked["pos"], 3)
        hidden = p.rms(x, u["norm"][0])
        weight = data["weight"]
        loss, logs = 0.0, {}

        def add_loss(name, h, by, factor):
            """h predicts the token `by` places on."""
            goal, wt = shifted(token, by, 0), shifted(weight, by, 0.0)
            total, nats, right = p.loss(h, u["head"][0], goal, wt)
            text = wt == 1.0
            digit = shifted(data["digit_mask"], by, False)
            logs[name] = torch.stack(((nats * text).sum(), text.sum(), (right & text).sum(),
                                      (right & digit).sum(), digit.sum())).float()
            return factor * total / wt.sum()

        loss = loss + add_loss("main", hidden, 1, 1.0)
        i = m.LAYERS
        nxt = shifted(token, 1, 0)
        x = p.mtp(F.embedding(nxt, u["embed"][0]), hidden, u["enorm"][0], u["hnorm"][0], u["eh"][0])
        h, lat, q, k, v = p.pre(x, *layer_inputs(i), u["kv_a"][i], u["kv_ln"][i], u["kv_b"][i], cos, sin)
        vectors, chosen = index_of(i, h, lat)
        at = (picked["pos"] - picked["answers"].long()).clamp_min(0)
        causal = self.visible(at, full, None, picked)
        with torch.no_grad():
            target = self.attention_of(q, k, picked, at, causal)
        close_group(i, vectors, target, at, 1)
        g = p.rms(finish(i, x, self.attend(q, k, v, self.span, chosen)), u["sh_norm"][0])
        loss = loss + add_loss("mtp1", g, 2, 0.3)
        # later drafts: the layer's own output as hidden, the first draft's keys and selection
        for step in range(2, 2 + chain):
            nxt = shifted(token, step, 0)
            at_pos = shifted(data["pos"], step - 1, 0)
            cos_d, sin_d = m.rope_table(at_pos)
            x = p.mtp(F.embedding(nxt, u["embed"][0]), g, u["enorm"][0], u["hnorm"][0], u["eh"][0])
            _, _, q = p.query(x, *layer_inputs(i), cos_d, sin_d)
            g = p.rms(finish(i, x, self.attend(q, k, v, self.span, chosen)), u["sh_norm"][0])
            loss = loss + add_loss(f"mtp{step}", g, step + 1, 0.3 / 2 ** (step - 1))
        loss = loss + sum(index_losses)
        loss.backward()
        logs["index"] = torch.stack([v.detach() for v in index_losses])
        with torch.no_grad():
            for j in range(m.LAYERS + 1 - m.DENSE):
                load = sum(c for layer, c in counts if layer == j)
                self.w.master["bias"][j] += 0.002 * torch.sign(load.mean() - load)
        return logs


def report(stage, n, seconds, sums, steps):
    parts = []
    for key in sorted(sums):
        v = sums[key]
        if key == "index":
            parts.append("index " + "/".join(f"{t / steps:.3f}" for t in v))
            continue
        nats, text, right, good, digits = v
        parts.append(f"{key} {nats / max(text, 1):.3f} nats, text {right / max(text, 1):.3f}, "
                     f"digits {good / max(digits, 1):.4f}")
    print(f"{stage} step {n} {seconds:.0f}s: " + "; ".join(parts), flush=True)


def run_stage(name, seconds, weights, pieces, src, args, gen, opt, left_after, began):
    """left_after(used): share of all planned seconds still ahead after `used` of this stage."""
    length, sparse, facts, questions, plain, answer_weight, warm = STAGES[name]
    step = Step(weights, pieces, name, args.tokens, args.device)
    start = last_log = last_save = time.time()
    chain = args.chain if sparse else 0
    n, since, sums = 0, 0, {}
    clock = start
    while True:
        now = time.time()
        if n == 3:                                  # compiling is over: the stage's time starts here
            if args.device == "cuda":
                torch.cuda.synchronize()
            clock = time.time()
        used = now - clock if n > 3 else 0.0
        if n >= args.max_steps or used >= seconds or now - began > args.limit:
            break
        scale = min(1.0, (n + 1) / warm) * min(1.0, left_after(used) / args.cool)
        data = batch.make(src, args.tokens // length, length, facts, questions, plain, answer_weight, gen)
        weights.zero_grad()
        logs = step.run(data, gen, chain)
        opt.step(scale)
        for key, value in logs.items():
            sums[key] = sums.get(key, 0) + value
        n, since = n + 1, since + 1
        if n in (1, 20) or n % 50 == 0:
            if args.device == "cuda":
                torch.cuda.synchronize()
            if time.time() - last_log > args.log_every or n <= 20:
                report(name, n, time.time() - start, {k: v.tolist() for k, v in sums.items()}, since)
                sums, since, last_log = {}, 0, time.time()
        if time.time() - last_save > 45:
            checkpoint.save(weights.state(), args.out, "weights")
            last_save = time.time()
    if args.device == "cuda":
        torch.cuda.synchronize()
    if since:
        report(name, n, time.time() - start, {k: v.tolist() for k, v in sums.items()}, since)
    spent = time.time() - clock
    print(f"stage {name}: {n} steps of {args.tokens} tokens, rows of {length}, {spent:.0f} s after "
          f"{clock - start:.0f} s of compiling, {n * args.tokens / max(spent, 1e-9) / 1e6:.2f} M tokens/s", flush=True)
    checkpoint.save(weights.state(), args.out, "weights")


def main():
    parser = argparse.ArgumentParser(description="Training of the needle model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--start", default="")
    parser.add_argument("--stages", default="P:25,B:215,D:140,E:60")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--max-steps", type=int, default=1 << 30)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which training stops")
    parser.add_argument("--cool", type=float, default=0.5, help="last share of all seconds, in which lr falls to 0")
    parser.add_argument("--peak", type=float, default=1.0, help="factor on all learning rates")
    parser.add_argument("--chain", type=int, default=2, help="further drafts trained in sparse stages")
    parser.add_argument("--log-every", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    began = time.time()
    os.makedirs(args.out, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    tokenizer = Tokenizer.from_file(os.path.join(args.data, "tokenizer.json"))
    arrays = dict(np.load(os.path.join(args.data, "tokens.npz")))
    src = batch.Source(arrays, tokenizer, args.device)
    gen = torch.Generator(device=args.device).manual_seed(args.seed)
    weights = m.Weights(args.device)
    if args.start:
        weights.load(checkpoint.load(args.start))
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"one {name}; torch {torch.__version__}; {weights.count()} parameters; "
          f"{len(src.stream)} tokens of text; ready after {time.time() - began:.0f} s", flush=True)
    pieces = Pieces(args.device == "cuda")
    opt = Optimiser(weights, 0.02 * args.peak, 3e-3 * args.peak)
    stages = [s.split(":") for s in args.stages.split(",")]
    planned, done = sum(float(s) for _, s in stages), 0.0
    for stage, seconds in stages:
        run_stage(stage, float(seconds), weights, pieces, src, args, gen, opt,
                  lambda used, done=done: max(0.0, 1 - (done + used) / planned), began)
        done += float(seconds)
    print(f"trained after {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
