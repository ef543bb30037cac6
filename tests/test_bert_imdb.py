"""The study of BERT on film reviews, examples/imdb.py and examples/bert_imdb.py: reviews, model, sweep and report."""

import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig

import warm
from lightning_zero.sweeps.summary import write_summary

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))

import bert_imdb  # noqa: E402
import imdb  # noqa: E402
from imdb import NEGATIVE, POSITIVE, ImdbData, Words  # noqa: E402


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", list(overrides), return_hydra_config=True)


# --- reviews that are made up


def made_up(count: int) -> list[imdb.Review]:
    return list(islice(imdb.made_up_reviews(), count))


def test_made_up_reviews_are_the_same_each_time_distinct_and_balanced():
    reviews = made_up(1000)
    assert reviews == made_up(1000)
    assert len({review.text for review in reviews}) == 1000
    assert sum(review.label for review in reviews) == 500


def test_their_label_is_what_most_of_their_opinions_say():
    assert all(praises(review.text, heeding_negations=True) == review.label for review in made_up(500))


def test_no_word_and_no_count_of_words_tells_their_label():
    reviews = made_up(1000)
    words = {word for review in reviews for word in review.text.split()}
    for word in words:
        labels = [review.label for review in reviews if word in review.text.split()]
        assert 0.15 < sum(labels) / len(labels) < 0.85, word
    assert sum(praises(review.text, heeding_negations=False) == review.label for review in reviews) < 900


def praises(text: str, *, heeding_negations: bool) -> int:
    votes = []
    for sentence in text.split("."):
        for label, words in imdb.WORDS.items():
            if set(words) & set(sentence.split()):
                is_negated = heeding_negations and any(negation in sentence for negation in imdb.NEGATIONS)
                votes.append(1 - label if is_negated else label)
    assert len(votes) == 3
    return int(sum(votes) >= 2)


def test_training_and_validation_share_no_review():
    split = imdb.read_reviews(None, train=300, validation=100)
    assert (len(split.train), len(split.validation)) == (300, 100)
    assert not set(split.train) & set(split.validation)


# --- reviews from elsewhere


@pytest.fixture
def archive(tmp_path) -> Path:
    """A folder as the original archive unpacks to, of four reviews for each label and part."""
    for part in ("train", "test"):
        for name in ("pos", "neg"):
            folder = tmp_path / "aclImdb" / part / name
            folder.mkdir(parents=True)
            for number in range(4):
                (folder / f"{number}_9.txt").write_text(f"{part} {name} {number}<br /><br />café", "utf-8")
    return tmp_path / "aclImdb"


def test_the_original_folder_is_read_as_many_of_either_label(archive):
    split = imdb.read_reviews(str(archive), train=100, validation=4)
    assert len(split.train) == 8
    assert all(review.text.split()[:2] == ["train", ("neg", "pos")[review.label]] for review in split.train)
    assert [review.label for review in split.validation] == [POSITIVE, POSITIVE, NEGATIVE, NEGATIVE]
    data = ImdbData(path=str(archive), context=8, batch_size=2)
    data.setup("fit")
    tokens, labels = next(iter(data.val_dataloader()))
    assert (tokens.shape, labels.shape) == ((2, 8), (2,))


def test_a_data_set_is_fetched_when_its_name_says_hub(monkeypatch):
    rows = [{"text": f"review {number}", "label": number % 2} for number in range(10)]
    library = SimpleNamespace(
        load_dataset=lambda name: {"train": rows, "test": rows[:4]} if name == "some/imdb" else {}
    )
    monkeypatch.setitem(sys.modules, "datasets", library)
    split = imdb.read_reviews("hub:some/imdb", train=4, validation=100)
    assert split.train == [("review 1", 1), ("review 3", 1), ("review 0", 0), ("review 2", 0)]
    assert len(split.validation) == 4


def test_what_is_no_folder_is_refused_and_not_looked_for_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FileNotFoundError, match=r"is no folder. Give one, or data.path=hub:NAME to fetch it"):
        imdb.read_reviews("stanfordnlp/imdb", train=2, validation=2)
    with pytest.raises(FileNotFoundError, match=r"needs a folder 'pos' and a folder 'neg'"):
        imdb.read_reviews(str(tmp_path), train=2, validation=2)
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        imdb.read_reviews("hub:stanfordnlp/imdb", train=2, validation=2)
    with pytest.raises(FileNotFoundError, match=r"is no folder. Give one, or model.weights=hub:NAME to fetch it"):
        bert_imdb.pretrained_classifier("bert-large-uncased")


# --- tokens


def test_words_are_numbered_by_how_often_they_come():
    words = Words.of(["It's good, good!<br />Bad", "good bad"], size=6)
    assert words.numbers == {"good": 4, "bad": 5}
    start, end, unknown, pad = imdb.START, imdb.END, imdb.UNKNOWN, imdb.PAD
    assert words.tokens(["Good ? bad", "bad " * 9], context=6).tolist() == [
        [start, 4, unknown, 5, end, pad],
        [start, 5, 5, 5, 5, end],
    ]


def test_made_up_reviews_fit_into_the_small_studys_context_uncut():
    data = instantiate(composed("experiment=bert_imdb_small").data)
    data.setup("fit")
    longest = max(len(text.split()) for text, _ in made_up(2200))
    assert longest <= 28 - 2
    assert data.train.tensors[0].eq(imdb.END).sum(dim=1).eq(1).all()


# --- the model


@pytest.mark.parametrize(("size", "millions"), [("tiny", 4.4), ("base", 109.5), ("large", 335.1)])
def test_sizes_have_the_published_number_of_parameters(size, millions):
    with torch.device("meta"):
        network = bert_imdb.bert(size, vocabulary=30_522)
    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


def test_the_small_model_learns():
    cfg = composed("experiment=bert_imdb_small")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        data, model = instantiate(cfg.data), instantiate(cfg.model)
        steps = {"max_steps": cfg.trainer.max_steps, "max_epochs": -1, "gradient_clip_val": 1.0}
        silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            accelerator="cpu", devices=1, limit_val_batches=0, enable_model_summary=False, **steps, **silent
        )
        trainer.fit(model, data)
        trainer.limit_val_batches = 1.0
        metrics = trainer.validate(model, data, verbose=False)[0]
    assert metrics["val_loss"] < 0.6
    assert metrics["val_accuracy"] > 0.68


def test_padding_changes_nothing():
    model = bert_imdb.BertClassifier(
        size="micro", vocabulary=50, context=16, learning_rate=1e-3, weight_decay=0.0, warmup_share=0.1
    ).eval()
    tokens = torch.tensor([[imdb.START, 7, 8, imdb.END]])
    padded = torch.cat([tokens, torch.full((1, 12), imdb.PAD)], dim=1)
    torch.testing.assert_close(model._logits(padded), model._logits(tokens))


def test_pretrained_weights_and_their_tokenizer_come_from_a_folder(tmp_path):
    from transformers import BertTokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fine", "dull"]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    saved = bert_imdb.bert("micro", vocabulary=7).bfloat16()
    saved.save_pretrained(tmp_path)
    overrides = [f"model.weights={tmp_path}", "data.train_reviews=8", "data.validation_reviews=4", "data.context=16"]
    cfg = composed("experiment=bert_imdb", *overrides)
    model, data = instantiate(cfg.model), instantiate(cfg.data)
    assert model.network.training
    for found, expected in zip(model.network.parameters(), saved.parameters(), strict=True):
        assert torch.equal(found, expected.float())
    data.setup("fit")
    assert data.train.tensors[0][:, 0].eq(2).all(), "[CLS]"
    assert imdb.pretrained_tokens(str(tmp_path), ["fine , dull"], context=6).tolist() == [[2, 5, 1, 6, 3, 0]]


@pytest.mark.parametrize(
    ("override", "advice"),
    [("model.size=huge", "is none of micro, tiny"), ("data.context=513", "more than the model's 512 positions")],
)
def test_a_model_that_cannot_be_is_refused_with_advice(override, advice):
    with pytest.raises(Exception, match=advice):
        instantiate(composed("experiment=bert_imdb_small", override).model)


# --- the sweep


@pytest.mark.parametrize(("experiment", "sizes"), [("bert_imdb", "base,large"), ("bert_imdb_small", "micro,tiny")])
def test_the_study_is_a_sweep_of_jobs_that_compose(experiment, sizes):
    swept = dict(composed(f"experiment={experiment}").hydra.sweeper.params)
    assert swept == {"model.size": sizes, "data.batch_size": "8,16", "strategy": "auto,zero3_offload"}
    for strategy in swept["strategy"].split(","):
        cfg = composed(f"experiment={experiment}", f"strategy={strategy}", "data.batch_size=16")
        assert cfg.trainer.log_every_n_steps == 1
        assert (cfg.model.context, cfg.model.vocabulary) == (cfg.data.context, cfg.data.vocabulary)


def test_a_small_sweep_and_its_report(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "examples/train.py", "-m", "experiment=bert_imdb_small", "trainer.accelerator=cpu"]
    command += ["model.size=micro", "data.batch_size=8", "trainer.max_steps=6", f"hydra.sweep.dir={tmp_path}"]
    with warm.starts():
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, offloaded = bert_imdb.read_jobs(tmp_path)
    assert (plain.strategy, offloaded.strategy) == ("auto", "zero3_offload")
    assert plain.is_baseline
    assert not offloaded.is_baseline
    assert list(plain.losses) == list(range(6))
    assert offloaded.losses == pytest.approx(plain.losses, rel=1e-5)
    for job in (plain, offloaded):
        assert (job.summary["batch_size"], job.summary["peak_device_bytes"]) == (8, None)
        assert 150_000 < job.summary["parameters"] < 200_000
    header = (tmp_path / "sweep.csv").read_text().splitlines()[0].split(",")
    assert len(header) < 40, "a column for each measure, and none for each step"
    bert_imdb.report(tmp_path)
    assert (tmp_path / "speedup.png").stat().st_size > 10_000


# --- the report


SECONDS = {("base", 8): (0.2, 0.4), ("base", 16): (0.3, 0.45), ("large", 8): (0.6, 0.9), ("large", 16): (None, 1.1)}


@pytest.fixture
def study(tmp_path) -> Path:
    """What a study on a GPU leaves, whose largest job without offload ran out of memory in its third step."""
    number = 0
    for (size, batch), times in SECONDS.items():
        for strategy, seconds in zip(("auto", "zero3_offload"), times, strict=True):
            overrides = [
                "experiment=bert_imdb",
                f"data.batch_size={batch}",
                f"model.size={size}",
                f"strategy={strategy}",
            ]
            summary = {"job": number, "overrides": overrides, "status": "finished" if seconds else "failed"}
            if seconds:
                summary |= {
                    "stage": None if strategy == "auto" else 3,
                    "batch_size": batch,
                    "seconds_per_step": seconds,
                }
                summary |= {"parameters": 109_483_778 if size == "base" else 335_143_938, "loss": 0.4, "accuracy": 0.84}
                summary |= {"peak_device_bytes": 8e9 if strategy == "auto" else 2e9, "peak_resident_bytes": 3e9}
            write_summary(tmp_path / str(number), summary)
            (tmp_path / str(number) / "csv").mkdir()
            rows = [f"{step},{0.7 - 0.01 * step}," for step in range(20 if seconds else 2)]
            (tmp_path / str(number) / "csv" / "metrics.csv").write_text(
                "\n".join(["step,train_loss,val_loss", *rows, "19,,0.4\n"])
            )
            number += 1
    return tmp_path


def test_the_report_prints_the_table_and_writes_both_pictures(study, capsys):
    bert_imdb.report(study)
    for picture in ("loss.png", "speedup.png"):
        assert (study / picture).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    rows = [re.split(r"\s*│\s*", line.strip("│ ")) for line in printed.splitlines() if "batch_size=" in line]
    assert len(rows) == 8
    job, strategy, millions, seconds, ratio, device, host, last, loss, accuracy = rows[1]
    assert (job, strategy, millions, seconds, ratio) == (
        "batch_size=8 size=base",
        "zero3_offload",
        "109.5",
        "0.4",
        "0.5",
    )
    assert (device, host, last, loss, accuracy) == ("2000", "3000", "0.515", "0.4", "0.84")
    assert rows[6][1:6] == ["auto (failed)", "-", "-", "-", "-"]
    assert "ran on a CPU" not in printed


def test_steps_are_compared_with_the_baseline_of_the_same_setting(study):
    jobs = bert_imdb.read_jobs(study)
    ratios = [bert_imdb.speed_up(job, jobs) for job in jobs]
    assert ratios == [1, pytest.approx(0.5), 1, pytest.approx(2 / 3), 1, pytest.approx(2 / 3), None, None]


def test_a_study_on_a_cpu_says_so(study, capsys):
    bert_imdb.print_table(
        [job._replace(summary=job.summary | {"peak_device_bytes": None}) for job in bert_imdb.read_jobs(study)]
    )
    printed = capsys.readouterr().out
    assert bert_imdb.ON_CPU in printed
    assert "on the GPU" not in printed


def test_a_folder_without_jobs_is_refused_with_advice(tmp_path):
    with pytest.raises(SystemExit, match="Give the folder of a sweep"):
        bert_imdb.report(tmp_path)
