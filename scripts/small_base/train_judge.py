"""Train the judge: python scripts/small_base/train_judge.py

On drawings alone: the pictures of the world, the subjects, and dogs that have some marks of the dog but not all. They
are blurred, shifted and given noise, so that the judge does not depend on the last crisp pixel.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from common import HELD_OUT_SEED, SEED, Clock, arguments, learning_rate, load, pictures, rng_of, save, to_tensor
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from flux_db.demo.creatures import Coat
from flux_db.demo.judge import HEADS, NONE
from flux_db.demo.world import COLLARS, COLOURS, FURS, SUBJECTS, THE_DOG, Scene, draw, random_scene, subject_scene

COUNT, SUBJECT_COUNT, IMPOSTOR_COUNT = 12_000, 1_500, 2_500
BATCH = 64
PEAK = 3e-3
WIDTHS = (3, 24, 48, 64, 96)
HIDDEN = 128
RESULT = Path("flux_db/demo/small/judge.safetensors")


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pairs = list(pairwise(WIDTHS))
        kernels = [5, 3, 3, 3]
        self.convolution = nn.ModuleList(
            nn.Conv2d(a, b, k, stride=2, padding=k // 2) for (a, b), k in zip(pairs, kernels, strict=True)
        )
        self.norm = nn.ModuleList(nn.BatchNorm2d(b) for _, b in pairs)
        self.hidden = nn.Linear(16 * WIDTHS[-1], HIDDEN)
        self.heads = nn.ModuleDict({question: nn.Linear(HIDDEN, len(answers)) for question, answers in HEADS.items()})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for convolution, norm in zip(self.convolution, self.norm, strict=True):
            x = norm(convolution(x)).relu()
        x = functional.dropout(x.flatten(1), 0.1, self.training)
        hidden = self.hidden(x).relu()
        return {question: head(hidden) for question, head in self.heads.items()}


def impostor(index: int, seed: int) -> tuple[Scene, Coat]:
    """A dog with some of the dog's marks; at least two are another dog's."""
    rng = random.Random(f"impostor/{seed}/{index}")
    ear = rng.choice(["floppy", "pointed"])
    fur = COLOURS[rng.choice(FURS)]
    other = {
        "ears": {"ears": (ear, ear), "ear_colours": rng.choice([(fur, fur), (THE_DOG.patch, THE_DOG.patch)])},
        "patch": {"patch": None},
        "saddle": {"saddle": None},
        "collar": {"collar": rng.choice([None, COLOURS[rng.choice(COLLARS)]]), "tag": rng.random() < 0.5},
        "fur": {"fur": fur},
    }
    coat = THE_DOG
    for mark in rng.sample(list(other), rng.randint(2, 4)):
        coat = replace(coat, **other[mark])
    return subject_scene("dog", seed + 5000, index), coat


def labels(scene: Scene) -> list[int]:
    """One for each question; -1 is not asked."""
    ink = scene.subject == "ink"
    truth = {
        "kind": scene.kind,
        "colour": "" if ink else scene.colour,
        "place": scene.place,
        "collar": "" if scene.subject else scene.collar or NONE,
        "subject": scene.subject or NONE,
    }
    return [HEADS[question].index(answer) if answer else -1 for question, answer in truth.items()]


def drawings(
    work: Path, seed: int, count: int, subject_count: int, impostor_count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [N, H, W, 3] and labels [N, questions]."""
    more, rows = [], [labels(random_scene(seed, i)) for i in range(count)]
    path = work / f"judge_{seed}_{subject_count}_{impostor_count}.npy"
    for subject in SUBJECTS:
        more += [(subject_scene(subject, seed + 2000, i), None) for i in range(subject_count)]
    rows += [labels(scene) for scene, _ in more]
    impostors = [impostor(i, seed) for i in range(impostor_count)]
    none = HEADS["subject"].index(NONE)
    rows += [[labels(scene)[0], -1, labels(scene)[2], -1, none] for scene, _ in impostors]
    if not path.exists():
        np.save(path, np.stack([np.asarray(draw(scene, coat=coat)) for scene, coat in [*more, *impostors]]))
    return np.concatenate([pictures(work, count, seed), np.load(path)]), np.array(rows)


def disturbed(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Shifted by up to two pixels, blurred or not, with noise and another brightness."""
    dy, dx = (int(i) for i in rng.integers(-2, 3, 2))
    x = functional.pad(x, (2, 2, 2, 2), mode="replicate")[:, :, 2 + dy : 66 + dy, 2 + dx : 66 + dx]
    blurred = functional.avg_pool2d(functional.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
    share = torch.from_numpy(rng.uniform(0, 0.7, (len(x), 1, 1, 1)).astype(np.float32)) * float(rng.random() < 0.6)
    x = x + share * (blurred - x)
    gain = torch.from_numpy(rng.uniform(0.93, 1.07, (len(x), 3, 1, 1)).astype(np.float32))
    noise = torch.from_numpy(rng.standard_normal(tuple(x.shape), np.float32)) * float(rng.uniform(0, 0.08))
    return (x * gain + noise).clamp(-1, 1)


def loss_of(model: Judge, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    return sum(
        functional.cross_entropy(outputs[question], y[:, i], ignore_index=-1, label_smoothing=0.02)
        for i, question in enumerate(HEADS)
    )


@torch.no_grad()
def accuracy(model: Judge, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    model.eval()
    outputs = [model(to_tensor(x[i : i + 256])) for i in range(0, len(x), 256)]
    model.train()
    result = {}
    for i, question in enumerate(HEADS):
        answers = torch.cat([part[question] for part in outputs]).argmax(dim=1).numpy()
        asked = y[:, i] >= 0
        result[question] = float((answers == y[:, i])[asked].mean())
    return result


def folded(model: Judge) -> dict[str, Tensor]:
    """The weights without normalisation layers, in fp16."""
    tensors = {f"hidden.{name}": value for name, value in model.hidden.state_dict().items()}
    for question, head in model.heads.items():
        tensors |= {f"{question}.{name}": value for name, value in head.state_dict().items()}
    for i, (convolution, norm) in enumerate(zip(model.convolution, model.norm, strict=True)):
        gain = norm.weight / (norm.running_var + norm.eps).sqrt()
        tensors[f"convolution.{i}.weight"] = convolution.weight * gain[:, None, None, None]
        tensors[f"convolution.{i}.bias"] = (convolution.bias - norm.running_mean) * gain + norm.bias
    return {name: tensor.detach().half().contiguous() for name, tensor in tensors.items()}


def main() -> None:
    given = arguments("Train the judge.", minutes=4)
    x, y = drawings(given.work, SEED, COUNT, SUBJECT_COUNT, IMPOSTOR_COUNT)
    held_x, held_y = drawings(given.work, HELD_OUT_SEED, 2000, 300, 600)
    torch.manual_seed(0)
    model = Judge()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.02)
    path, step, clock = given.work / "judge.pt", 0, Clock(given.minutes)
    if state := load(path):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, clock = state["step"], Clock(given.minutes, state["spent"])
    last_saved = clock.spent
    while clock.progress < 1.0:
        optimizer.param_groups[0]["lr"] = learning_rate(PEAK, step, clock.progress)
        rng = rng_of(step, "judge")
        rows = rng.integers(0, len(x), BATCH)
        loss = loss_of(model, disturbed(to_tensor(x[rows]), rng), torch.from_numpy(y[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if clock.spent - last_saved > 60 or clock.progress >= 1.0:
            last_saved = clock.spent
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            save(path, state | {"spent": clock.spent})
            figures = "  ".join(f"{q} {a:.4f}" for q, a in accuracy(model, held_x, held_y).items())
            print(f"step {step} {clock.spent:.0f} s loss {loss:.3f} held out: {figures}", flush=True)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    save_file(folded(model), RESULT)
    RESULT.chmod(0o644)
    print(f"{RESULT}: {RESULT.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
