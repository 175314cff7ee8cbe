"""What a run shows: curves, sheet of samples, report.html, the comparison of runs, trackers."""

import base64
import io
import json
import os
import re
import sys
import threading
import types
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml
from PIL import Image

from flux_db.__main__ import main
from flux_db.check.files import check_files
from flux_db.errors import UserError
from flux_db.report import charts, comparison_page, run_page, sample_sheet, thumbnails
from flux_db.run import sample_files, trackers
from flux_db.run.metrics_log import Metrics, MetricsLog
from flux_db.run.record import read_run
from flux_db.run.status import RunStatus, write_status
from flux_db.settings.derived import shown_settings
from flux_db.settings.schema import from_flat_dict

NASTY = '<script>alert("1")</script> & "quotes"'


def config(output, **changes):
    values = {"pretrained_model_name_or_path": "owner/model", "instance_data_dir": "pictures", "instance_prompt": "dog"}
    return from_flat_dict(values | {"output_dir": str(output), "report_to": ["none"]} | changes)


def noise_picture(side, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8))


def write_round(output, step, prompts=("a dog",), numbers=2, side=32):
    folder = sample_files.round_folder(output, step)
    folder.mkdir(parents=True)
    pairs = [(prompt, number) for prompt in prompts for number in range(numbers)]
    for i, (prompt, number) in enumerate(pairs):
        picture = noise_picture(side, step + i)
        sample_files.write(folder / f"{i:02d}.png", picture, prompt=prompt, number=number, seed=42)


def replace(path, make):
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)


def text(content):
    return lambda path: path.write_text(content if isinstance(content, str) else json.dumps(content))


def write_run(output, *, steps=30, rounds=(0, 15, 30), prompt="a dog", **settings):
    output.mkdir(parents=True)
    settings = {"instance_prompt": prompt, "rank": 8, "resolution": 64, "max_train_steps": steps, **settings}
    (output / "config.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
    rows = [
        {"step": n, "epoch": n / 5, "loss": 1 / n, "lr": 1e-4, "grad_norm": 0.5, "seconds": 0.1, "skipped": 0}
        for n in range(1, steps + 1)
    ]
    rows += [{"step": n, "event": "validation", "validation_loss": 2 - n / 100, "best": True} for n in rounds]
    (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in rounds:
        write_round(output, step, prompts=(prompt,))
    write_status(output, "finished", step=steps, last_good_checkpoint=None)
    return output


class Balanced(HTMLParser):
    """Fails on a tag that is not closed in order; collects tags and addresses."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.addresses, self.alts = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.alts += [dict(attrs).get("alt") for _ in [0] if tag == "img"]
        if tag not in ("meta", "img", "input", "wbr", "line", "path", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


# --- curves ------------------------------------------------------------------------------------------------------


def test_thinning_keeps_ends_order_and_every_spike():
    points = [(float(n), 0.0) for n in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[8765] = (8765.0, -9.0)
    thin = charts.thinned(points)
    assert len(thin) <= charts.MOST_POINTS and thin == sorted(thin)
    assert {points[0], points[-1], points[4321], points[8765]} <= set(thin)
    assert charts.thinned(points[:50]) == points[:50]


def test_smoothing_keeps_a_level_and_calms_noise():
    assert [y for _, y in charts.smoothed([(float(n), 2.0) for n in range(40)])] == pytest.approx([2.0] * 40)
    rng = np.random.default_rng(0)
    values = [y for _, y in charts.smoothed([(float(n), float(rng.normal())) for n in range(2000)])]
    assert np.std(values[200:]) < 0.2


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (2.783, 2.816), (1, 24), (0, 1e-4), (1085.9, 1086.1), (-3, 70000), (5e-324, 1e-300)]
)
def test_ticks_are_few_round_and_inside(low, high):
    ticks = charts.ticks(low, high, 5)
    assert 1 <= len(ticks) <= 5
    assert all(low - 1e-9 * high <= tick <= high * (1 + 1e-9) for tick in ticks)
    assert len(set(charts.tick_labels(ticks))) == len(ticks)


def test_a_spike_does_not_flatten_the_chart_but_its_line_has_it():
    raw = [(float(n), 1.0 + n % 2) for n in range(1000)]
    raw[500] = (500.0, 1e6)
    low, high = charts.value_range([charts.Series(label="raw", points=raw, kind="faint")])
    assert (low, high) == pytest.approx((0.94, 2.06))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.12345, "0.123"), (1.5e-4, "1.5e-4"), (12000, "12000"), (3.0, "3")]
)
def test_numbers_are_short(value, text):
    assert charts.number(value) == text


# --- samples on disk and the sheet -------------------------------------------------------------------------------


def test_samples_tell_their_prompts(tmp_path):
    write_round(tmp_path, 250, prompts=("ein Hündchen", "b"))
    write_round(tmp_path, 0, prompts=("ein Hündchen",))
    (tmp_path / "samples" / "step-00250" / "04.png").write_bytes(b"not a picture")
    rounds = sample_files.read_rounds(tmp_path)
    assert [round_.step for round_ in rounds] == [0, 250]
    pairs = [("ein Hündchen", 0), ("ein Hündchen", 1), ("b", 0), ("b", 1)]
    assert [(p.prompt, p.number) for p in rounds[1].pictures] == pairs
    assert sample_files.columns(rounds) == pairs
    sample_files.forget_after(tmp_path, 100)
    assert [round_.step for round_ in sample_files.read_rounds(tmp_path)] == [0]


def test_the_sheet_has_steps_down_and_prompts_across(tmp_path):
    for step in (0, 5):
        write_round(tmp_path, step, prompts=("a dog", "a very long prompt " * 20), side=128)
    picture = sample_sheet.sample_sheet(sample_files.read_rounds(tmp_path))
    pixels = np.asarray(picture)
    last = np.asarray(noise_picture(128, 5 + 3))  # step 5, fourth column: in the lower right corner
    assert np.array_equal(
        pixels[-128 - sample_sheet.GAP : -sample_sheet.GAP, -128 - sample_sheet.GAP : -sample_sheet.GAP], last
    )
    assert (pixels[:, :30] < 128).any() and (pixels[:30] < 128).any(), "labels at the left and above"


def test_the_sheet_of_a_long_run_is_bounded(tmp_path, monkeypatch):
    for step in range(sample_sheet.MOST_ROUNDS + 9):
        write_round(tmp_path, step, numbers=1, side=16)
    sheet = sample_sheet.sample_sheet(sample_files.read_rounds(tmp_path))
    # small samples are enlarged
    assert sheet.height < (sample_sheet.MOST_ROUNDS + 3) * (sample_sheet.EASILY_SEEN + sample_sheet.GAP)
    assert sheet.width > sample_sheet.EASILY_SEEN
    monkeypatch.setattr(sample_sheet, "MOST_PIXELS", 200_000)
    for step in range(3):
        write_round(tmp_path / "large", step, numbers=4, side=256)
    width, height = sample_sheet.sample_sheet(sample_files.read_rounds(tmp_path / "large")).size
    assert 150_000 < width * height < 1.6 * 200_000, "with its labels"


def test_of_many_rounds_first_and_last_are_shown():
    rounds = [sample_files.Round(step, ()) for step in range(100)]
    shown = [round_.step for round_ in sample_files.spread(rounds, 7)]
    assert len(shown) == 7 and shown[0] == 0 and shown[-1] == 99 and shown == sorted(set(shown))


# --- report.html -------------------------------------------------------------------------------------------------


def test_the_report_is_one_sound_file_with_everything_escaped(tmp_path):
    output = write_run(tmp_path / "run <b>", prompt=NASTY, hub_token="hf_secret", lora_layers=NASTY)
    picture = tmp_path / "a&b.png"
    noise_picture(64).save(picture)
    store_pictures(output, [picture], caption=NASTY)
    write_status(output, "failed", step=30, last_good_checkpoint=None, message=NASTY)
    run_page.write_report(output)
    text = (output / "report.html").read_text(encoding="utf-8")
    page = Balanced(text)
    assert page.tags.count("script") == 1 and "<b>" not in text.replace("<b>&lt;script&gt;", "").replace("<b>Lora", "")
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses), "small: every pixel"
    assert page.tags.count("img") == 7 and all(page.alts), "six samples and a training picture, all described"
    assert "hf_secret" not in text
    for words in (
        "Validation loss",
        "Gradient norm",
        "Learning rate",
        "Step time",
        "Skipped steps",
        "load_lora_weights",
    ):
        assert words in text
    assert text.count('class="round"') == 3, "every round is there without the script"
    assert "prefers-color-scheme" in text and 'name="viewport"' in text


def store_pictures(output, paths, caption):
    from flux_db.data.dataset import Dataset, Example
    from flux_db.data.pictures import Picture

    samples = [
        Example(picture=Picture(path, caption, (64, 64), "0"), prompt=caption, crop=(0.5, 0.5), size=(32, 32))
        for path in paths
    ]
    thumbnails.store_training_pictures(config(output, resolution=32), Dataset(examples=tuple(samples * 2)))


def test_training_pictures_are_the_crops_and_counted_once(tmp_path):
    picture = tmp_path / "wide.png"
    image = Image.new("RGB", (96, 32), "red")
    image.paste("blue", (32, 0, 64, 32))
    image.save(picture)
    store_pictures(tmp_path / "out", [picture], "a dog")
    found = thumbnails.read_training_pictures(tmp_path / "out")
    assert (found.total, [p.caption for p in found.pictures]) == (1, ["a dog"])
    shown = np.asarray(Image.open(found.folder / found.pictures[0].file).convert("RGB"))
    assert shown.shape == (32, 32, 3) and shown[..., 2].min() > 200 and shown[..., 0].max() < 60


def test_a_large_report_stays_below_3_mb(tmp_path):
    """Noise is the worst there is to compress."""
    output = write_run(tmp_path / "run", steps=3000, rounds=())
    for step in range(0, 40):
        write_round(output, step, numbers=13, side=96)
    run_page.write_report(output)
    text = (output / "report.html").read_text(encoding="utf-8")
    assert 500_000 < len(text.encode()) < 3_000_000
    assert "16 of 40 rounds are shown; 12 of 13 pictures of a round are shown" in text


def test_pictures_shrink_to_the_budget(tmp_path):
    paths = []
    for n in range(6):
        paths.append(tmp_path / f"{n}.png")
        noise_picture(256, n).save(paths[-1])
    for budget in (400_000, 100_000, 30_000):
        uris = thumbnails.data_uris(paths, budget)
        assert budget / 6 < sum(map(len, uris)) <= budget
    paths[0].write_bytes(paths[0].read_bytes()[:500])
    assert thumbnails.data_uris(paths, 100_000)[0] == ""


def test_a_report_of_little(tmp_path):
    """Unfinished, cut short, without samples: told as it is."""
    output = tmp_path / "run"
    output.mkdir()
    (output / "metrics.jsonl").write_text('{"step": 1, "loss": null, "lr": 0.1}\n{"step": 2, "lo')
    Balanced(run_page.render(read_run(output)))
    (output / "metrics.jsonl").unlink()
    (output / "config.yaml").write_text("rank: 4\n")
    text = run_page.render(read_run(output))
    Balanced(text)
    assert "no metrics yet" in text and "No steps yet" in text


def test_the_command_tells_what_is_wrong(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for argv, message in (
        ([str(tmp_path / "nowhere")], "no such folder; give the --output_dir of a run"),
        ([str(tmp_path / "empty")], "no run in it: neither config.yaml, metrics.jsonl nor samples"),
    ):
        assert main(["report", *argv]) == 2
        assert message in capsys.readouterr().err
    run = str(write_run(tmp_path / "run"))
    assert main(["report", run, run]) == 2
    assert "the same run is given twice" in capsys.readouterr().err
    assert main(["report", run, "-o", str(tmp_path / "no" / "x.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_comparison_of_runs(tmp_path, capsys):
    one = write_run(tmp_path / "a" / "run", learning_rate=1e-4)
    two = write_run(tmp_path / "b" / "run", learning_rate=1e-3, prompt=NASTY, rounds=())
    file = tmp_path / "both.html"
    assert main(["report", str(one), str(two), "-o", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    text = file.read_text(encoding="utf-8")
    page = Balanced(text)
    assert page.tags.count("img") == 2 and page.tags.count("script") == 1
    assert "a/run" in text and "b/run" in text and "no samples" in text
    table = text[text.index("Settings that differ") :]
    assert all(words in table for words in ("learning_<wbr>rate", "1e-4", "0.001")) and "resolution" not in table


def test_the_comparison_has_a_row_for_each_sample_and_a_column_for_each_run(tmp_path):
    prompts = {"a": ["a dog", "a cat"], "b": ["a cat", "a bird", "a dog"], "c": []}
    for name, texts in prompts.items():
        output = write_run(tmp_path / name, rounds=())
        if texts:
            write_round(output, 30, prompts=texts)
    text = comparison_page.render_comparison([read_run(tmp_path / name) for name in prompts])
    Balanced(text)
    section = text[text.index("<h2>Last samples") : text.index("<h2>Settings that differ")]
    parts = re.findall(r'<p class="prompt">(.*?)</p>|alt="(.*?)"|(<span></span>)', section)
    assert [prompt or picture or None for prompt, picture, _ in parts] == [
        *("a dog", "a: a dog", "b: a dog", None, "a: a dog", "b: a dog", None),
        *("a cat", "a: a cat", "b: a cat", None, "a: a cat", "b: a cat", None),
        *("a bird", None, "b: a bird", None, None, "b: a bird", None),
    ]


def test_of_too_many_samples_every_prompt_is_compared(tmp_path):
    for name in "ab":
        write_round(write_run(tmp_path / name, rounds=()), 30, prompts=[f"dog {n}" for n in range(12)], numbers=3)
    text = comparison_page.render_comparison([read_run(tmp_path / name) for name in "ab"])
    shown = re.findall(r'alt="a: (dog \d+)"', text)
    assert len(shown) == 16 and shown == sorted(shown, key=lambda title: int(title[4:])) and len(set(shown)) == 12


HOSTILE_ROWS = [
    {"step": "x", "loss": 1}, {"loss": 1}, {"step": 1e308, "loss": 1e308}, {"step": -1, "loss": -1e29},
    {"step": 2, "loss": 1e29}, {"step": 3, "loss": 5e-324}, {"step": 4, "loss": float("nan"), "skipped": "<u>"},
    {"step": True, "loss": []}, {"step": 5, "loss": {}, "seconds": -1, "memory_mb": -5, "device_memory_mb": 1e-29},
]  # fmt: skip
HOSTILE = {
    "rows": (
        "metrics.jsonl",
        text("\n".join([*map(json.dumps, HOSTILE_ROWS), "[" * 10**5, '{"step": 1' + "0" * 5000])),
    ),
    "metrics pipe": ("metrics.jsonl", os.mkfifo),
    "metrics device": ("metrics.jsonl", lambda path: path.symlink_to("/dev/zero")),
    "state": ("train_state.json", text({key: ["<u>"] for key in RunStatus.__annotations__})),
    "deep state": ("train_state.json", text("[" * 10**5)),
    "state pipe": ("train_state.json", os.mkfifo),
    "keys": ("config.yaml", text("1: 2\nnull: 3\ntrue: 4\nrank: {a: [1]}\nmax_train_steps: {}\n")),
    "values": (
        "config.yaml",
        text("trigger_word: 7\ninstance_prompt: '{trigger}'\nvalidation_prompt: <u>\n"),
    ),
    "characters": ("config.yaml", text(f'instance_prompt: "\\ud800\\x1b[2J"\noutput_dir: "{"a" * 5000}/\\0"')),
    "config pipe": ("config.yaml", os.mkfifo),
    "sample pipe": ("samples/step-00030/99.png", os.mkfifo),
    "sample device": ("samples/step-00030/99.png", lambda path: path.symlink_to("/dev/zero")),
    "sample step": ("samples/step-\u00b2/00.png", text("")),
    "index": ("report/training_pictures.json", text({"total": 1e308, "pictures": [{"file": "../x", "name": 7}]})),
    "deep index": ("report/training_pictures.json", text("[" * 10**5)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_report_of_hostile_files_is_a_report_without_them(tmp_path, name):
    output = write_run(tmp_path / "run\udcff", rounds=(30,))
    file, make = HOSTILE[name]
    replace(output / file, make)
    page = run_page.render(read_run(output))
    page.encode()
    Balanced(page)
    assert "<u>" not in page and "\x1b" not in page and r"run\udcff" in page


def test_small_pictures_keep_every_pixel(tmp_path):
    for side in (64, 400):
        noise_picture(side).save(tmp_path / f"{side}.png")
    small, large = thumbnails.data_uris([tmp_path / "64.png", tmp_path / "400.png"], 400_000)
    with Image.open(io.BytesIO(base64.b64decode(small.partition(",")[2]))) as shown:
        assert np.array_equal(np.asarray(shown), np.asarray(noise_picture(64)))
    # the page's style enlarges a PNG without smoothing
    assert small.startswith("data:image/png") and large.startswith("data:image/webp")
    assert 'img[src^="data:image/png"] { image-rendering: pixelated;' in run_page.page("", "")


def test_training_pictures_stand_beside_the_samples(tmp_path):
    output = write_run(tmp_path / "run")
    noise_picture(64).save(tmp_path / "dog.png")
    store_pictures(output, [tmp_path / "dog.png"], "a dog")
    text = run_page.render(read_run(output))
    samples = text[text.index("<h2>Samples") : text.index("<h2>Curves")]
    assert "Training picture dog.png" in samples and "with-training" in samples
    assert text.count("Training picture dog.png") == 2, "alt and title of one picture"


@pytest.mark.parametrize("status", ["running", "finished", "failed", "interrupted"])
def test_the_page_of_a_run_that_goes_on_loads_itself_again(tmp_path, status):
    output = write_run(tmp_path / "run")
    write_status(output, status, step=30, last_good_checkpoint=None)
    run_page.write_report(output)
    page = (output / "report.html").read_text(encoding="utf-8")
    Balanced(page)
    assert ('<meta http-equiv="refresh" content="20">' in page) == (status == "running")


def test_the_report_of_a_run_that_goes_on_takes_a_small_share_of_its_time(tmp_path, monkeypatch):
    now, written = [0.0], []
    monkeypatch.setattr(run_page.time, "monotonic", lambda: now[0])

    def write(output):
        written.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(run_page, "write_report", write)
    live = run_page.LiveReport(tmp_path)
    for now[0] in range(200):
        live.renew()
    assert written == [20, 71, 122, 173], "each takes a second, which is 2 % of 50"


def test_the_report_shows_the_plan_of_the_memory(tmp_path):
    known = {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev", "instance_data_dir": "pictures"}
    known |= {"mixed_precision": "bf16", "gradient_checkpointing": "blocks", "base_precision": "int8"}
    output = write_run(tmp_path / "known", **known)
    assert "Memory on Ascend" not in run_page.render(read_run(output)), "its steps have no device memory: a CPU"
    with open(output / "metrics.jsonl", "a") as file:
        file.write('{"step": 31, "loss": 1, "device_memory_mb": 20000}\n')
    page = run_page.render(read_run(output))
    Balanced(page)
    assert "<title>transformer: 11.97 GB</title>" in page and "Memory on Ascend" in page
    # of a model that is neither here nor known nobody can say
    other = known | {"pretrained_model_name_or_path": "owner/model"}
    assert "Memory on Ascend" not in run_page.render(read_run(write_run(tmp_path / "other", steps=0, **other)))
    for name, device, is_shown in (("not yet", "auto", True), ("on cpu", "CPU", False)):
        output = write_run(tmp_path / name, steps=0, rounds=(), **known, device=device)
        assert ("Memory on Ascend" in run_page.render(read_run(output))) == is_shown


# --- trackers ----------------------------------------------------------------------------------------------------


def fake_module(name, calls, fail_at=None):
    """A stand-in for wandb or swanlab that writes down what it is asked."""
    module = types.ModuleType(name)

    class Run:
        def log(self, values, step):
            if step == fail_at:
                raise ConnectionError("no network")
            calls.append(("log", values, step))

        def finish(self):
            calls.append(("finish",))

    def init(**settings):
        calls.append(("init", settings))
        return Run()

    module.init, module.Image = init, lambda picture: ("image", picture.size)
    return module


def metrics(step, **changes):
    values = {"step": step, "epoch": 1.0, "loss": 0.5, "lr": 1e-4, "grad_norm": 1.0, "seconds": 0.1, "skipped": 0}
    return Metrics(**values | changes)


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_tracker_gets_settings_scalars_and_pictures(tmp_path, monkeypatch, name):
    calls = []
    monkeypatch.setitem(sys.modules, name, fake_module(name, calls))
    metrics_log = MetricsLog(config(tmp_path, report_to=[name], rank=3), total_steps=2, first_step=0)
    metrics_log.step(metrics(1, memory_mb=900.0))
    metrics_log.validation_loss(1, 0.25, "pictures", best=True)
    metrics_log.picture("samples", Image.new("RGB", (8, 4)), 1)
    metrics_log.close()
    kind, settings = calls[0]
    assert kind == "init" and settings["config"]["rank"] == 3 and settings["project"] == "flux-db"
    assert calls[1][1]["train/loss"] == 0.5 and calls[1][1]["train/memory_mb"] == 900.0 and calls[1][2] == 1
    assert calls[2:] == [
        ("log", {"validation/loss": 0.25}, 1),
        ("log", {"samples": ("image", (8, 4))}, 1),
        ("finish",),
    ]


def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on(tmp_path, monkeypatch, capfd):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_module("wandb", calls, fail_at=2))
    metrics_log = MetricsLog(config(tmp_path, report_to=["wandb"]), total_steps=3, first_step=0)
    for step in (1, 2, 3):
        metrics_log.step(metrics(step))
    metrics_log.close()
    assert [call[0] for call in calls] == ["init", "log"]
    assert capfd.readouterr().err.count("wandb is given up: ConnectionError: no network") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("hangs_in", ["log", "finish"])
def test_a_tracker_that_hangs_is_left_behind(tmp_path, monkeypatch, capfd, hangs_in):
    calls, never, left = [], threading.Event(), []
    module = fake_module("wandb", calls)
    run = module.init()
    setattr(run, hangs_in, lambda *_, **__: never.wait())
    module.init = lambda **_: run
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(trackers, "leave_behind", left.append)
    patience = 0.2 if hangs_in == "log" else 60
    for name, value in (("MOST_WAITING", 5), ("PATIENCE_SECONDS", patience), ("CLOSING_SECONDS", 0.2)):
        monkeypatch.setattr(trackers, name, value)
    metrics_log = MetricsLog(config(tmp_path, report_to=["wandb"]), total_steps=50, first_step=0)
    for step in range(1, 51):
        metrics_log.step(metrics(step))
    metrics_log.close()
    never.set()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 50
    reason = {"log": "it has taken nothing for 0.2 s", "finish": "it has not finished within 0.2 s"}[hangs_in]
    assert capfd.readouterr().err.count(f"wandb is given up: {reason}") == 1
    assert left == ["wandb"]


def test_a_tracker_that_cannot_start_or_is_missing_is_an_error(tmp_path, monkeypatch):
    broken = types.ModuleType("wandb")
    broken.init = lambda **_: 1 / 0
    monkeypatch.setitem(sys.modules, "wandb", broken)
    with pytest.raises(UserError, match=r"--report_to wandb: it does not start: ZeroDivisionError.*WANDB_MODE=offline"):
        trackers.open_trackers(config(tmp_path, report_to=["wandb"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problems = check_files(config(tmp_path, report_to=["tensorboard,swanlab"]))
    assert "--report_to swanlab: not installed here; pip install swanlab, or leave it out" in problems


def test_tensorboard_has_scalars_pictures_and_settings(tmp_path):
    metrics_log = MetricsLog(config(tmp_path, report_to=["tensorboard"]), total_steps=1, first_step=0)
    metrics_log.step(metrics(1))
    metrics_log.validation_loss(1, 0.25, "pictures", best=False)
    metrics_log.picture("samples", Image.new("RGB", (8, 4)), 1)
    metrics_log.close()
    (file,) = (tmp_path / "logs").iterdir()
    data = file.read_bytes()
    for words in (b"train/loss", b"train/grad_norm", b"validation/loss", b"samples", b"instance_prompt: dog"):
        assert words in data


@pytest.mark.parametrize(("name", "variable"), [("wandb", "WANDB_MODE"), ("swanlab", "SWANLAB_MODE")])
def test_the_real_trackers_without_network(tmp_path, monkeypatch, capfd, name, variable):
    pytest.importorskip(name)
    monkeypatch.setenv(variable, "offline")
    opened = trackers.open_trackers(config(tmp_path, report_to=[name]))
    opened.scalars({"train/loss": 0.5}, 1)
    opened.picture("samples", Image.new("RGB", (8, 4)), 1)
    opened.close()
    assert "is given up" not in capfd.readouterr().err
    assert list(tmp_path.rglob("*.png")), "the picture is in the output folder"


def test_no_token_reaches_a_tracker(tmp_path):
    argv = ["train.py", "--hub_token", "hf_a", "--rank", "4", "--hub_token=hf_b", "--push_to_hub"]
    assert trackers.without_tokens(argv) == ["train.py", "--rank", "4", "--push_to_hub"]
    assert not [name for name in shown_settings(config(tmp_path)) if "token" in name]


def test_report_to_takes_commas_and_repeats(tmp_path):
    names = config(tmp_path, report_to=["wandb, tensorboard", "wandb"]).output.trackers
    assert names == ("wandb", "tensorboard")
    assert config(tmp_path).output.trackers == config(tmp_path, report_to="none").output.trackers == ()


def test_the_page_names_no_other_address():
    """Nothing leaves the machine when a report is opened."""
    from flux_db.report.page import page

    text = page("title", "")
    assert set(re.findall(r"https?://[^'\" ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text and "@import" not in text
