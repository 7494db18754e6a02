#!/usr/bin/env python3
"""Evaluates a checkpoint as an engine would run it: chunked prefill, selection, absorbed attention
over a cache whose latents and index vectors went through e4m3 with power-of-two scales.

    evaluate.py --data DATA --weights CKPT [--lengths 1024,8192,32768,131072] [--contexts 20,20,8,2]

Needle: held-out text of about the length asked, 11 facts at depths 0, 10, ... 100 % and distractors
for other held-out names between them; every fact is asked for, the distractors too. One prefill
serves all questions: each is appended to the same context on its own. An answer is right if all six digits are the argmax, each
given the digits before it; that is what greedy generation would write. The control replaces every
selection by the last 128 positions.
"""
import argparse
import json
import os
import random
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import checkpoint
import model as m
import names

CHUNK = 2048


class Cache:
    """Latents, rope keys and index keys of every layer, for one sequence of at most `room` tokens."""

    def __init__(self, room, device):
        n = m.LAYERS + 1
        self.c = torch.zeros(n, room, m.KV_LORA, dtype=torch.bfloat16, device=device)
        self.pe = torch.zeros(n, room, m.ROPE, dtype=torch.bfloat16, device=device)
        self.ki = torch.zeros(3, room, m.INDEX_DIM, dtype=torch.bfloat16, device=device)
        self.pos = torch.zeros(room, dtype=torch.long, device=device)
        self.owner = torch.full((room,), -1, dtype=torch.long, device=device)     # -1: seen by all rows


class Runner:
    def __init__(self, weights, recent=False):
        self.u = weights.use
        self.recent = recent
        self.uk, self.uv = [], []
        for w in self.u["kv_b"]:
            per_head = w.detach().unflatten(0, (m.HEADS, m.NOPE + m.V_DIM))
            self.uk.append(per_head[:, :m.NOPE].contiguous())
            self.uv.append(per_head[:, m.NOPE:].contiguous())

    def choose(self, i, h, lat, cache, at, cos, sin, pos):
        """Index list [n, 128] and which entries count; also stores the index keys of these rows."""
        u, j = self.u, m.FULL.index(i)
        q, k, w = m.index_vectors(h, lat, u["wq_b"][j], u["wk"][j], u["kn_w"][j], u["kn_b"][j], u["wp"][j], cos, sin)
        n = len(h)
        cache.ki[j, at:at + n] = k
        total = at + n
        if self.recent:
            s = cache.pos[:total].float().repeat(n, 1)
        else:
            keys = cache.ki[j, :total].float()
            s = torch.zeros(n, total, device=h.device)
            for head in range(m.INDEX_HEADS):
                s += F.relu(q[:, head].float() @ keys.t()) * w[:, head:head + 1]
        s.masked_fill_(cache.pos[None, :total] > pos[:, None], -float("inf"))
        owner = cache.owner[:total]
        s.masked_fill_((owner[None] >= 0) & (owner[None] != owner[at:, None]), -float("inf"))
        top = torch.topk(s, min(m.TOPK, total), dim=-1)
        return top.indices, top.values > -float("inf")

    def attend(self, i, q, cache, chosen, valid):
        absorbed = torch.einsum("nhd,hdr->nhr", q[..., :m.NOPE], self.uk[i])
        c, pe = cache.c[i][chosen], cache.pe[i][chosen]
        s = torch.einsum("nhr,nkr->nhk", absorbed, c).float() + torch.einsum("nhd,nkd->nhk", q[..., m.NOPE:], pe).float()
        p = torch.softmax((s * m.SCALE).masked_fill(~valid[:, None], -float("inf")), -1)
        out = torch.einsum("nhk,nkr->nhr", p.bfloat16(), c)
        return torch.einsum("nhr,hvr->nhv", out, self.uv[i]).flatten(1)

    def layer(self, i, x, cache, at, cos, sin, pos, lists, store=True):
        u = self.u
        h, lat, q = m.query(x, u["ln_in"][i], u["q_a"][i], u["q_ln"][i], u["q_b"][i], cos, sin)
        if store:
            c, pe = m.latent(h, u["kv_a"][i], u["kv_ln"][i], cos, sin)
            cache.c[i, at:at + len(x)], cache.pe[i, at:at + len(x)] = c, pe
            if i in m.FULL:
                lists = self.choose(i, h, lat, cache, at, cos, sin, pos)
        att = self.attend(i, q, cache, *lists)
        if i < m.DENSE:
            return m.post_dense(x, att, u["o"][i], u["ln_post"][i], u["gate"][i], u["up"][i], u["down"][i]), lists
        j = i - m.DENSE
        x, _ = m.post_moe(x, att, u["o"][i], u["ln_post"][i], u["router"][j], u["bias"][j], u["e_gate"][j],
                          u["e_up"][j], u["e_down"][j])
        return x, lists

    @torch.no_grad()
    def run(self, token, at, cache, after=None, chain=0, start=0, fork=None):
        """Rows `token` in slots at.. -> hidden rows, and per draft such rows (after: next tokens).

        fork: (position, owner) of every row. Rows of one owner see each other and what no one owns:
        many continuations of one text side by side. Without, positions are slots.
        """
        pos = torch.arange(at, at + len(token), device=token.device)
        if fork:
            pos, cache.owner[at:at + len(token)] = fork
        cache.pos[at:at + len(token)] = pos
        cos, sin = m.rope_table(pos + start)
        x = F.embedding(token, self.u["embed"][0]).float()
        lists, picked = None, {}
        for i in range(m.LAYERS):
            x, lists = self.layer(i, x, cache, at, cos, sin, pos, lists)
            picked[i] = lists
        hidden = m.rms(x, self.u["norm"][0])
        drafts, g = [], hidden
        if after is not None:
            ahead = torch.cat((token, after))
            for step in range(1, chain + 2):
                emb = F.embedding(ahead[step:step + len(token)], self.u["embed"][0])
                z = m.mtp_input(emb, g, self.u["enorm"][0], self.u["hnorm"][0], self.u["eh"][0])
                if step > 1:
                    cos, sin = m.rope_table(pos + start + step - 1)
                z, own = self.layer(m.LAYERS, z, cache, at, cos, sin, pos, picked.get("mtp"), step == 1)
                picked["mtp"] = own
                g = m.rms(z, self.u["sh_norm"][0])
                drafts.append(g)
        return hidden, drafts, picked

    def logits(self, h):
        return h.float() @ self.u["head"][0].float().t()


def held_out_names(rng, count, near=0.4):
    found = []
    while len(found) < count:
        triple = tuple(rng.randrange(names.COUNT) for _ in range(3))
        if rng.random() < near and found:          # one syllable away from an earlier name
            base = list(rng.choice(found))
            base[rng.randrange(3)] = rng.randrange(names.COUNT)
            triple = tuple(base)
        if names.held_out(*triple) and triple not in found:
            found.append(triple)
    return [names.name(*t) for t in found]


def make_context(tokenizer, sentences, length, distractors, rng, near=0.4):
    """-> (ids, [(depth, name, code, index of the code's first digit)]).

    About `length` tokens. The first 11 entries are facts at depths 0, 10, ... 100; distractors follow,
    whose depth is None.
    """
    wanted = 11
    people = held_out_names(rng, wanted + distractors, near)
    codes = [f"{rng.randrange(10**6):06d}" for _ in people]
    facts = [tokenizer.encode(" " + names.fact(p, c)).ids for p, c in zip(people, codes)]
    room = length - sum(map(len, facts)) - 40
    start = rng.randrange(len(sentences))
    text, size = [], 0
    while size < room:
        s = sentences[(start + len(text)) % len(sentences)]
        text.append(s)
        size += len(s)
    n = len(text)
    slot = [round(n * d / 10) for d in range(wanted)] + [rng.randrange(n + 1) for _ in range(distractors)]
    order = sorted(range(len(people)), key=lambda k: (slot[k], k if slot[k] < n else -k))
    ids, done, place = [], 0, {}
    for k in order:
        for s in text[done:slot[k]]:
            ids += s
        done = max(done, slot[k])
        place[k] = len(ids) + len(facts[k]) - 7
        ids += facts[k]
    for s in text[done:]:
        ids += s
    ids[-1] = tokenizer.token_to_id(".ĊĊ")           # the question is a paragraph of its own
    return ids, [(10 * k if k < wanted else None, people[k], codes[k], place[k]) for k in range(len(people))]


def split_sentences(tokens, tokenizer):
    ends = {tokenizer.token_to_id("."), tokenizer.token_to_id(".ĊĊ")}
    out, row = [], []
    for t in tokens.tolist():
        row.append(t)
        if t in ends:
            out.append(row)
            row = []
    return out


@torch.no_grad()
def needle(runner, tokenizer, sentences, length, distractors, rng, device, start=0, near=0.4):
    """Asks for every fact of one text, distractors too, all questions side by side.

    -> (tokens, [(depth or None, exact, smallest margin, digits of the fact in the selection, drafts,
    name, what it said)]).
    """
    ids, wanted = make_context(tokenizer, sentences, length, distractors, rng, near)
    base, rows, place, owner, firsts = len(ids), [], [], [], []
    for k, (_, who, code, _) in enumerate(wanted):
        ask = tokenizer.encode(names.question(who)).ids
        answer = tokenizer.encode(" " + code + ".\n\n").ids
        firsts.append(len(rows) + len(ask))              # row of the space before the digits
        place += range(base, base + len(ask) + len(answer))
        owner += [k] * (len(ask) + len(answer))
        rows += ask + answer
    cache = Cache(base + len(rows) + 8, device)
    context = torch.tensor(ids, device=device)
    row = torch.tensor(rows, device=device)
    for at in range(0, base, CHUNK):
        part = context[at:at + CHUNK]
        nxt = context[at + len(part):at + len(part) + 1]
        runner.run(part, at, cache, nxt if len(nxt) else row[:1], 0, start)
    fork = torch.tensor(place, device=device), torch.tensor(owner, device=device)
    tail = torch.zeros(3, dtype=torch.long, device=device)
    hidden, drafts, picked = runner.run(row, base, cache, tail, 2, start, fork)
    first = torch.tensor(firsts, device=device)
    at = first[:, None] + torch.arange(6, device=device)
    goal = row[at + 1]
    logits = runner.logits(hidden[at])
    best = logits.topk(2).values
    said = logits.argmax(-1)
    good = said == goal
    margin = torch.where(good, best[..., 0] - best[..., 1], torch.full_like(best[..., 0], -1.0)).amin(-1)
    space = runner.logits(hidden[first - 1]).argmax(-1) == row[first]
    exact = good.all(-1) & space
    chosen, valid = picked[3]
    digit = torch.tensor([w[3] for w in wanted], device=device)[:, None] + torch.arange(6, device=device)
    found = ((chosen[at] == digit[..., None]) & valid[at]).any(-1).float().mean(-1)
    accept = [(runner.logits(g[at - step]).argmax(-1) == goal).float().mean(-1).tolist()
              for step, g in enumerate(drafts, 1)]
    return base, [(w[0], e, mg, f, d, w[1], tokenizer.decode(t)) for w, e, mg, f, d, t in
                  zip(wanted, exact.tolist(), margin.tolist(), found.tolist(), zip(*accept), said.tolist())]


@torch.no_grad()
def text_loss(runner, tokens, length, count, device):
    """Nats per token, and how often each draft agrees with the main model's own choice."""
    nats = rows = 0.0
    agree, tried = [0.0] * 3, 0
    for k in range(count):
        part = torch.from_numpy(tokens[k * length:(k + 1) * length].astype("int64")).to(device)
        if len(part) < length:
            break
        cache = Cache(length + 8, device)
        for at in range(0, length - 4, CHUNK):
            row = part[at:min(at + CHUNK, length - 4)]
            hidden, drafts, _ = runner.run(row, at, cache, part[at + len(row):at + len(row) + 3], 2)
            logits = runner.logits(hidden)
            goal = part[at + 1:at + 1 + len(row)]
            nats += F.cross_entropy(logits, goal, reduction="sum").item()
            rows += len(row)
            choice = logits.argmax(-1)
            for step, g in enumerate(drafts, 1):
                mine = runner.logits(g).argmax(-1)[:len(row) - 3]
                agree[step - 1] += (mine == choice[step:step + len(row) - 3]).sum().item()
            tried += len(row) - 3
    return nats / max(rows, 1), [a / max(tried, 1) for a in agree]


@torch.no_grad()
def write_text(runner, tokenizer, prompt, count, device, seed=0, temperature=0.0):
    ids = tokenizer.encode(prompt).ids
    cache = Cache(len(ids) + count + 1, device)
    gen = torch.Generator(device=device).manual_seed(seed)
    row, at = torch.tensor(ids, device=device), 0
    for _ in range(count):
        hidden, _, _ = runner.run(row, at, cache)
        at += len(row)
        logits = runner.logits(hidden[-1:])
        if temperature:
            row = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=gen)[0]
        else:
            row = logits.argmax(-1)
        ids.append(row.item())
    return tokenizer.decode(ids, skip_special_tokens=False)


def evaluate(weights, data, device, lengths, contexts, distractors, text=True, out=None, control=True, starts=(0,),
             near=0.4):
    tokenizer = Tokenizer.from_file(os.path.join(data, "tokenizer.json"))
    arrays = np.load(os.path.join(data, "tokens.npz"))
    sentences = split_sentences(arrays["heldout"], tokenizer)
    runner = Runner(weights)

    def line(text_line):
        print(text_line, flush=True)
        if out:
            out.write(text_line + "\n")
            out.flush()

    def ask(runner, length, start=0):
        results, size = [], 0
        for k in range(contexts[length]):
            size, found = needle(runner, tokenizer, sentences, length, distractors if length > 2000 else 12,
                                 random.Random(1000 * length + k), device, start, near)
            results += found
        return size, results

    for start in starts:
        for length in lengths:
            began = time.time()
            size, results = ask(runner, length, start)
            at_depth = [r for r in results if r[0] is not None]
            margins = sorted(r[2] for r in results)
            drafts = [sum(r[4][s] for r in results) / len(results) for s in range(3)]
            line(f"needle {size} tokens from position {start}, {contexts[length]} texts: exact at depths 0..100 "
                 f"{sum(r[1] for r in at_depth)}/{len(at_depth)}, all facts {sum(r[1] for r in results)}/{len(results)}"
                 f"; margin min {margins[0]:.2f}, hundredth {margins[len(margins) // 100]:.2f}, tenth "
                 f"{margins[len(margins) // 10]:.2f}; digits selected {sum(r[3] for r in results) / len(results):.4f}"
                 "; drafts right " + "/".join(f"{d:.4f}" for d in drafts) + f"; {time.time() - began:.1f} s")
            for r in results:
                if not r[1]:
                    line(f"  wrong: depth {r[0]}, {r[5]}, said {r[6]!r}, digits selected {r[3]:.2f}")
    if control:
        last = Runner(weights, recent=True)
        for length in lengths[:2]:
            results = [r for r in ask(last, length)[1] if r[0] is not None]
            line(f"control, last {m.TOPK} positions, {length} tokens: exact {sum(r[1] for r in results)}/{len(results)}"
                 f" (right at depths {sorted({r[0] for r in results if r[1]})}; 100 lies inside the last {m.TOPK})")
    if text:
        for part in ("valid", "heldout"):
            nats, agree = text_loss(runner, arrays[part], 8192, 8, device)
            line(f"text {part}: {nats:.4f} nats a token; drafts agree with the greedy choice "
                 + "/".join(f"{a:.3f}" for a in agree))
        for prompt in ("The file system ", "To install the package", "This function returns"):
            line("sample, greedy: " + json.dumps(write_text(runner, tokenizer, prompt.rstrip(), 60, device)))
            line("sample, T 0.7: " + json.dumps(write_text(runner, tokenizer, prompt.rstrip(), 60, device, 1, 0.7)))


def main():
    parser = argparse.ArgumentParser(description="Evaluation of a checkpoint")
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--lengths", default="1024,8192,32768,131072")
    parser.add_argument("--contexts", default="20,20,8,2", help="texts of each length")
    parser.add_argument("--distractors", type=int, default=60)
    parser.add_argument("--near", type=float, default=0.4, help="share of names one syllable from another one")
    parser.add_argument("--starts", default="0")
    parser.add_argument("--log", default="")
    parser.add_argument("--no-text", action="store_true")
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True     # exact here: e4m3 and bf16 fit its mantissa
    weights = m.Weights(args.device)
    weights.load(checkpoint.load(args.weights))
    log = open(args.log, "w", encoding="utf-8") if args.log else None
    lengths = [int(v) for v in args.lengths.split(",")]
    contexts = dict(zip(lengths, (int(v) for v in args.contexts.split(","))))
    evaluate(weights, args.data, args.device, lengths, contexts,
             args.distractors, not args.no_text, log, not args.no_control, [int(v) for v in args.starts.split(",")],
             args.near)


if __name__ == "__main__":
    main()
