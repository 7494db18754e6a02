"""Weights of a training stage as raw files of at most PART bytes, so that each part travels alone.

FOLDER/NAME.json lists the tensors in order (kind, shape, type), FOLDER/NAME.0, .1, ... hold the bytes:
bf16 masters, float32 router biases. Written to temporary names first, so a run cut short leaves the
checkpoint before.
"""
import glob
import json
import os

import numpy as np
import torch

PART = 14 << 20


def save(state, folder, name):
    data, table = bytearray(), []
    for kind, value in state.items():
        value = value.contiguous()
        raw = value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
        table.append([kind, list(value.shape), str(value.dtype).removeprefix("torch.")])
        data += raw.tobytes()
    parts = [data[i:i + PART] for i in range(0, len(data), PART)]
    for i, part in enumerate(parts):
        path = os.path.join(folder, f"{name}.{i}")
        with open(path + ".tmp", "wb") as f:
            f.write(part)
        os.replace(path + ".tmp", path)
    with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as f:
        json.dump(table, f)


def load(base):
    """base: FOLDER/NAME."""
    with open(base + ".json", encoding="utf-8") as f:
        table = json.load(f)
    paths = sorted(glob.glob(glob.escape(base) + ".[0-9]*"), key=lambda p: int(p.rsplit(".", 1)[1]))
    data = b"".join(open(p, "rb").read() for p in paths)
    state, at = {}, 0
    for kind, shape, form in table:
        count = int(np.prod(shape))
        size = count * (2 if form == "bfloat16" else 4)
        raw = np.frombuffer(data[at:at + size], np.int16 if form == "bfloat16" else np.float32).copy()
        at += size
        value = torch.from_numpy(raw)
        state[kind] = (value.view(torch.bfloat16) if form == "bfloat16" else value).reshape(shape)
    if at != len(data):
        raise ValueError(f"{base}: {len(data)} bytes, the table says {at}")
    return state
