"""Training batches made on the device: windows of text with facts and questions put in.

Every row starts at a random place of the token stream. Items (facts, questions) go in at ends of
sentences, a question always after its fact; text continues behind an item where it stopped. Names
differ from row to row; many of a row look alike, and those are asked for most.
Everything is drawn with the generator passed in and no step waits for the device.
"""
import torch

import names

WIDTH = 40                                  # most tokens of an item
NAME = 16                                   # most tokens of a name (two pairs of MAX_NAME)
JUMPS = 24
MAX_POS = 1 << 20


class Source:
    def __init__(self, arrays, tokenizer, device):
        self.device = device
        self.stream = torch.from_numpy(arrays["train"].astype("int32")).to(device)
        pieces = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
        self.breaks = torch.tensor([p.startswith(".Ċ") for p in pieces], device=device)
        ends = torch.tensor([p in (".", ".ĊĊ", ".Ċ") for p in pieces], device=device)
        at = torch.where(ends[self.stream.long()], torch.arange(len(self.stream), device=device), 1 << 30)
        self.next_end = at.flip(0).cummin(0).values.flip(0).clamp_max(len(self.stream) - 1).int()
        words = [i for i, p in enumerate(pieces) if p.startswith("Ġ") and p[1:].isalpha() and p[1:].isascii()]
        tails = [i for i, p in enumerate(pieces) if p.isalpha() and p.isascii() and p.islower()]
        self.words = torch.tensor(words, device=device)
        self.tails = torch.tensor(tails, device=device)
        n = names.COUNT
        for key in ("triple", "pair"):
            ids = torch.from_numpy(arrays[key].astype("int64")).to(device)
            setattr(self, key, ids)
            setattr(self, key + "_len", torch.from_numpy(arrays[key + "_len"].astype("int64")).to(device))
        self.count = n

        def ids(text):
            return tokenizer.encode(text).ids

        def split(text, who):
            left, right = text.split(who)
            return ids(left.rstrip(" ")), ids(right)

        self.digit = torch.tensor([ids(" 0123456789")[1:]], device=device)[0]
        assert len(self.digit) == 10
        parts = []                          # [question][inline or own paragraph] -> prefix, suffix
        for text in (names.fact("@", "0"), names.question("@") + " 0."):
            own_left, tail = split(text, "@")
            inline_left = ids(" " + text.split("@")[0].rstrip(" "))
            tail = tail[:-2]                # without the digit and the full stop
            parts.append([(inline_left, tail, ids(".")), (own_left, tail, ids(".\n\n"))])
        assert all(len(end) == 1 for row in parts for _, _, end in row)
        longest = max(len(p[0]) for row in parts for p in row)
        self.prefix = torch.zeros(2, 2, longest, dtype=torch.long, device=device)
        self.prefix_len = torch.zeros(2, 2, dtype=torch.long, device=device)
        self.suffix = torch.zeros(2, 2, 12, dtype=torch.long, device=device)
        self.digit_at = torch.zeros(2, 2, dtype=torch.long, device=device)
        self.end = torch.zeros(2, 2, dtype=torch.long, device=device)
        for q in range(2):
            for own in range(2):
                left, tail, end = parts[q][own]
                self.prefix[q, own, :len(left)] = torch.tensor(left)
                self.prefix_len[q, own] = len(left)
                self.suffix[q, own, :len(tail)] = torch.tensor(tail)
                self.digit_at[q, own] = len(tail)
                self.end[q, own] = end[0]

    def ends_paragraph(self, token):
        return self.breaks[token]


def draw_names(src, rows, count, gen):
    """[rows, count, NAME] token ids, [rows, count] lengths, [rows, count] look-alikes. No held-out triple.

    A share of each row, 0 to 9 tenths, are look-alikes of another name of the row, of its kind: one
    syllable is another one, or a copy of a neighbour, or two change places. Names of a row differ.
    """
    dev, n = src.device, src.count

    def draw(high, *shape):
        return torch.randint(high, shape, generator=gen, device=dev)

    def chance(*shape):
        return torch.rand(*shape, generator=gen, device=dev)

    near = chance(rows, count) < 0.9 * chance(rows, 1)
    near[:, 0] = False
    order = torch.arange(count, device=dev)
    root = torch.where(near, draw(1 << 30, rows, count) % order.clamp_min(1), order)
    for _ in range(7):                                      # 2^7 > the longest chain there is
        root = root.gather(1, root)
    kind = chance(rows, count).gather(1, root)
    is_two, is_free = (kind > 0.7) & (kind <= 0.85), kind > 0.85

    # syllables: three or four of them, then one change to those of the root
    syl = draw(n, rows, count, 4).gather(1, root[..., None].expand(-1, -1, 4))
    size = 3 + is_two.long()
    place = torch.arange(4, device=dev)
    at = draw(12, rows, count) % size
    to = (at + 1 + draw(12, rows, count) % (size - 1)) % size
    here, there = syl.gather(2, at[..., None]), syl.gather(2, to[..., None])
    how = chance(rows, count)[..., None]
    value = torch.where(how < 0.25, there, (here + 1 + draw(n - 1, rows, count, 1)) % n)
    is_at, is_to = place == at[..., None], place == to[..., None]
    changed = torch.where(is_at, torch.where(how < 0.5, there, value), syl)
    changed = torch.where(is_to & (how >= 0.25) & (how < 0.5), here, changed)
    syl = torch.where(near[..., None], changed, syl)

    word = src.words[draw(len(src.words), rows, count, 1)]
    rest = src.tails[draw(len(src.tails), rows, count, NAME - 1)]
    free_len = (1 + draw(4, rows, count)).gather(1, root)
    fresh = torch.cat((word, rest), -1)
    swap = near[..., None] & (torch.arange(NAME, device=dev) == (draw(12, rows, count) % free_len)[..., None])
    free = torch.where(swap, fresh, fresh.gather(1, root[..., None].expand(-1, -1, NAME)))

    ids, length = spell(src, syl, is_two, is_free, free, free_len)
    # a name that the row has already becomes a new one, of three syllables
    factor = torch.randint(1 << 40, (NAME,), generator=gen, device=dev)
    key = (ids * factor * (torch.arange(NAME, device=dev) < length[..., None])).sum(-1)
    again = (key[:, :, None] == key[:, None, :]).tril(-1).any(-1)
    syl = torch.where(again[..., None], draw(n, rows, count, 4), syl)
    ids, length = spell(src, syl, is_two & ~again, is_free & ~again, free, free_len)
    return ids, length, near & ~again


def spell(src, syl, is_two, is_free, free, free_len):
    """Tokens and lengths: three syllables, or two pairs of them, or `free`."""
    n = src.count
    held = (7 * syl[..., 0] + 3 * syl[..., 1] + 5 * syl[..., 2]) % 8 == 0
    a, b, c, d = syl.unbind(-1)
    c = torch.where(held & ~is_two, (c + 1) % n, c)
    triple = (a * n + b) * n + c
    first, second = a * n + b, c * n + d
    pad = NAME - src.triple.shape[1]
    one = torch.nn.functional.pad(src.triple[triple], (0, pad))
    one_len = src.triple_len[triple]
    slot = torch.arange(NAME, device=syl.device)
    head, head_len = src.pair[first], src.pair_len[first][..., None]
    tail = src.pair[second]
    two = torch.where(slot < head_len, torch.nn.functional.pad(head, (0, pad)),
                      tail.gather(-1, (slot - head_len).clamp(0, tail.shape[-1] - 1)))
    two_len = head_len[..., 0] + src.pair_len[second]
    ids = torch.where(is_two[..., None], two, torch.where(is_free[..., None], free, one))
    return ids, torch.where(is_two, two_len, torch.where(is_free, free_len, one_len))


def positions(src, start, active, rows, length, gen):
    """[rows, length] increasing positions: runs with jumps between them, whole spans up to MAX_POS.

    Two fifths of the rows have no jump. Jumps fall on starts of items (or anywhere in rows without).
    """
    dev = src.device
    plain = torch.rand(rows, 1, generator=gen, device=dev) < 0.4
    low, high = torch.log2(torch.tensor(float(length))).item(), 20.0
    span = torch.exp2(low + (high - low) * torch.rand(rows, 1, generator=gen, device=dev))
    size = torch.rand(rows, JUMPS, generator=gen, device=dev).clamp_min(1e-6).log().neg() ** 3
    used = torch.rand(rows, JUMPS, generator=gen, device=dev) < torch.rand(rows, 1, generator=gen, device=dev)
    size = size * used
    size = size / size.sum(-1, keepdim=True).clamp_min(1e-6)
    extra = (span.clamp_max(MAX_POS - 1.0) - length).clamp_min(0.0) * 0.999
    gap = torch.where(plain, torch.zeros_like(size), (size * extra).floor()).long()
    where = torch.randint(1, length, (rows, JUMPS), generator=gen, device=dev)
    pick = torch.randint(start.shape[1], (rows, JUMPS), generator=gen, device=dev)
    item = start.gather(1, pick)
    where = torch.where(active.gather(1, pick), item, where).clamp(0, length - 1)
    jump = torch.zeros(rows, length, dtype=torch.long, device=dev).scatter_add_(1, where, gap)
    pos = torch.arange(length, device=dev) + jump.cumsum(1)
    room = MAX_POS - 1 - pos[:, -1:]
    shift = (torch.rand(rows, 1, generator=gen, device=dev) * room).long()
    return pos + shift * (torch.rand(rows, 1, generator=gen, device=dev) < 0.5)


def make(src, rows, length, facts, questions, plain, answer_weight, gen):
    """One batch.

    token, pos, weight [rows, length]: weight is that of token t as a target;
    answer_row [rows, questions, 6]: index of the token before each answer digit;
    fact_digit [rows, questions, 6]: index of the digit to copy; asked [rows, questions]: used or not;
    digit_mask [rows, length]: token t is a digit of an answer.
    """
    dev = src.device
    n_fact = torch.randint(1, facts + 1, (rows,), generator=gen, device=dev)
    n_ask = torch.randint(1, questions + 1, (rows,), generator=gen, device=dev)
    n_fact[torch.rand(rows, generator=gen, device=dev) < plain] = 0
    n_ask = torch.where(n_fact > 0, n_ask, 0)
    items = facts + questions
    is_q = torch.arange(items, device=dev) >= facts
    order = torch.arange(items, device=dev) - facts * is_q
    active = torch.where(is_q, order < n_ask[:, None], order < n_fact[:, None])
    name, name_len, near = draw_names(src, rows, facts, gen)
    digits = torch.randint(10, (rows, facts, names.DIGITS), generator=gen, device=dev)
    asks = (torch.rand(2, rows, questions, generator=gen, device=dev) * n_fact[:, None]).long()
    asks = asks.clamp_max(facts - 1)
    asks = torch.where(near.gather(1, asks[0]), asks[0], asks[1])
    of = torch.cat((torch.arange(facts, device=dev).expand(rows, -1), asks), 1)      # item -> fact
    u = torch.rand(rows, items, generator=gen, device=dev)
    fact_u = u[:, :facts]
    late = fact_u.gather(1, asks)
    u_q = late + (1 - late) * u[:, facts:]
    u_q[:, 0] = 1.0                                                     # one question closes the row
    u = torch.cat((fact_u, u_q), 1)
    # text of the row: as long as the largest items leave room for; the rest is cut at the end
    item_name = name_len.gather(1, of)
    kind_q = is_q.long().expand(rows, -1)
    longest = (src.prefix_len.amax(1)[kind_q] + item_name + src.digit_at.amax(1)[kind_q] + names.DIGITS + 1)
    text_len = (length - (longest * active).sum(1, keepdim=True)).clamp_min(8)
    begin = torch.randint(len(src.stream) - length - 600, (rows, 1), generator=gen, device=dev)
    target = begin + (u * (text_len - 1)).long()
    end = src.next_end[target.clamp_max(len(src.stream) - 1)].long()
    last = begin + text_len - 1
    end = torch.minimum(end, last)
    own = src.ends_paragraph(src.stream[end].long()).long()
    key = torch.where(active, end * 2 + is_q, 1 << 40)
    rank = torch.argsort(key, dim=1, stable=True)
    # lengths and starts in the order of the row
    prefix_len = src.prefix_len[kind_q, own]
    digit_at = src.digit_at[kind_q, own]
    size = (prefix_len + item_name + digit_at + names.DIGITS + 1) * active
    size_sorted = size.gather(1, rank)
    before = size_sorted.cumsum(1) - size_sorted
    start_sorted = (end.gather(1, rank) - begin + 1) + before
    start = torch.zeros_like(start_sorted).scatter(1, rank, start_sorted)
    slot = torch.arange(WIDTH, device=dev)
    p, w = prefix_len[..., None], item_name[..., None]
    inside = slot - p - w
    d_at = digit_at[..., None]
    digit = src.digit[digits.gather(1, of[..., None].expand(-1, -1, names.DIGITS))]
    item_tok = src.prefix[kind_q, own].gather(2, slot.clamp_max(src.prefix.shape[2] - 1).expand(rows, items, -1))
    name_tok = name.gather(1, of[..., None].expand(-1, -1, NAME)).gather(2, (slot - p).clamp(0, NAME - 1))
    suf_tok = src.suffix[kind_q, own].gather(2, inside.clamp(0, 11))
    dig_tok = digit.gather(2, (inside - d_at).clamp(0, names.DIGITS - 1))
    item_tok = torch.where(slot < p, item_tok, name_tok)
    item_tok = torch.where(inside >= 0, suf_tok, item_tok)
    item_tok = torch.where(inside >= d_at, dig_tok, item_tok)
    item_tok = torch.where(inside == d_at + names.DIGITS, src.end[kind_q, own][..., None], item_tok)
    is_digit = (inside >= d_at) & (inside < d_at + names.DIGITS)
    q3 = is_q[:, None]
    # the answer's space and full stop are learned in full, the sentence around a name lightly
    item_w = torch.full(item_tok.shape, 0.2, device=dev)
    item_w = torch.where((slot == 0) | ((slot >= p) & (inside < 0)), 0.0, item_w)
    # which fact is copied shows in the first digit; the others follow it
    digit_w = answer_weight * torch.where(inside == d_at, 3.0, 0.6) * q3.float()
    item_w = torch.where(is_digit, digit_w, item_w)
    item_w = torch.where(q3 & ((inside == d_at - 1) | (inside == d_at + names.DIGITS)), 1.0, item_w)
    place = start[..., None] + slot
    valid = (slot < size[..., None]) & (place < length)
    place = torch.where(valid, place, length).flatten(1)                # index `length`: thrown away
    token = torch.zeros(rows, length + 1, dtype=torch.long, device=dev)
    weight = torch.ones(rows, length + 1, device=dev)
    taken = torch.zeros(rows, length + 1, dtype=torch.long, device=dev)
    mark = torch.zeros(rows, length + 1, dtype=torch.bool, device=dev)
    token.scatter_(1, place, item_tok.flatten(1))
    weight.scatter_(1, place, item_w.flatten(1))
    taken.scatter_(1, place, 1)
    mark.scatter_(1, place, (is_digit & q3).flatten(1))
    token, weight, taken, mark = token[:, :-1], weight[:, :-1], taken[:, :-1], mark[:, :-1]
    text_at = begin + (1 - taken).cumsum(1) - 1
    text = src.stream[text_at.clamp(0, len(src.stream) - 1)].long()
    token = torch.where(taken > 0, token, text)
    step = torch.arange(names.DIGITS, device=dev)
    digit_place = (start + prefix_len + item_name + digit_at)[..., None] + step       # [rows, items, 6]
    answer = digit_place[:, facts:]
    fact = digit_place[:, :facts].gather(1, asks[..., None].expand(-1, -1, names.DIGITS))
    asked = active[:, facts:] & (answer[..., -1] < length)
    return {"token": token, "pos": positions(src, start, active, rows, length, gen),
            "weight": weight, "answer_row": (answer - 1).clamp(0, length - 1),
            "fact_digit": fact.clamp(0, length - 1), "asked": asked, "digit_mask": mark}
