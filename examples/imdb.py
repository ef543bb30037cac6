"""Film reviews and whether they praise: the IMDB set from a folder or the hub, or sentences made up here."""

import importlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

NEGATIVE, POSITIVE = 0, 1
HUB = "hub:"  # begins the names that may be fetched from the network; everything else is a folder
PAD, UNKNOWN, START, END = range(4)


class Review(NamedTuple):
    text: str
    label: int  # NEGATIVE or POSITIVE


class Split(NamedTuple):
    train: list[Review]
    validation: list[Review]


class ImdbData(L.LightningDataModule):
    """Reviews as rows of `context` tokens, padded at the end, half of them of each label.

    Args:
        path: the folder that the original archive unpacks to (`train/pos/*.txt` and so on), or `hub:NAME` for a data
            set of the `datasets` library, such as `hub:stanfordnlp/imdb`; None makes reviews up.
        weights: the folder or `hub:NAME` of pretrained weights, whose tokenizer is taken; None takes words.
        vocabulary: distinct words to know at most, when words are taken.
        context: tokens per review; longer ones are cut.
        batch_size: reviews per rank and step.
        train_reviews: reviews to train on at most.
        validation_reviews: reviews to validate on at most, the same each time.
        num_workers: processes per rank that load data.

    Raises:
        FileNotFoundError: at set-up, when `path` or `weights` is neither a folder nor `hub:NAME`, or holds no reviews.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        weights: str | None = None,
        vocabulary: int = 30_522,
        context: int = 512,
        batch_size: int = 8,
        train_reviews: int = 25_000,
        validation_reviews: int = 1_000,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.weights = weights
        self.vocabulary = vocabulary
        self.context = context
        self.batch_size = batch_size
        self.train_reviews = train_reviews
        self.validation_reviews = validation_reviews
        self.num_workers = num_workers
        self.train: TensorDataset | None = None
        self.validation: TensorDataset | None = None

    def setup(self, stage: str) -> None:
        if self.train is not None:  # once, not again for each of validate, fit, validate
            return
        split = read_reviews(self.path, self.train_reviews, self.validation_reviews)
        words = None if self.weights else Words.of((review.text for review in split.train), self.vocabulary)
        self.train, self.validation = (self._tokens(reviews, words) for reviews in split)

    def _tokens(self, reviews: Sequence[Review], words: "Words | None") -> TensorDataset:
        texts = [review.text for review in reviews]
        if words is None:
            assert self.weights is not None
            tokens = pretrained_tokens(self.weights, texts, self.context)
        else:
            tokens = words.tokens(texts, self.context)
        return TensorDataset(tokens, torch.tensor([review.label for review in reviews]))

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.validation, shuffle=False)

    def _loader(self, reviews: TensorDataset | None, *, shuffle: bool) -> DataLoader:
        assert reviews is not None, "setup() comes first"
        return DataLoader(
            reviews,
            self.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )


# --- where reviews come from


def read_reviews(path: str | None, train: int, validation: int) -> Split:
    """At most `train` and `validation` reviews from what `path` names, in the same order on every rank."""
    if path is None:
        reviews = made_up_reviews()
        return Split(list(islice(reviews, train)), list(islice(reviews, validation)))
    if path.startswith(HUB):
        return _hub_reviews(path.removeprefix(HUB), train, validation)
    root = folder("data.path", path, otherwise="or data.path=null for reviews that are made up")
    return Split(_folder_reviews(root / "train", train), _folder_reviews(root / "test", validation))


def folder(key: str, path: str, *, otherwise: str) -> Path:
    """The folder `path` that the config gives as `key`."""
    found = Path(path).expanduser()
    if not found.is_dir():
        raise FileNotFoundError(f"{key}={path!r} is no folder. Give one, or {key}={HUB}NAME to fetch it, {otherwise}.")
    return found


def _folder_reviews(root: Path, count: int) -> list[Review]:
    files = {label: sorted((root / name).glob("*.txt")) for label, name in ((POSITIVE, "pos"), (NEGATIVE, "neg"))}
    if not all(files.values()):
        raise FileNotFoundError(
            f"{str(root)!r} needs a folder 'pos' and a folder 'neg', each with a text file per review. "
            f"Give data.path=FOLDER, the aclImdb that the original archive unpacks to."
        )
    texts = {label: [path.read_text("utf-8") for path in paths[: count // 2]] for label, paths in files.items()}
    return [Review(text, label) for label in texts for text in texts[label]]


def _hub_reviews(name: str, train: int, validation: int) -> Split:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"data.path={HUB}{name} needs the library `datasets`: pip install datasets. "
            f"Or unpack the original archive and give its folder as data.path."
        ) from missing
    loaded = datasets.load_dataset(name)
    return Split(_halves(loaded["train"], train), _halves(loaded["test"], validation))


def _halves(rows: Iterable[dict], count: int) -> list[Review]:
    of_label = {label: [row["text"] for row in rows if row["label"] == label] for label in (POSITIVE, NEGATIVE)}
    return [Review(text, label) for label, texts in of_label.items() for text in texts[: count // 2]]


# --- reviews that are made up

ASPECTS = "plot story acting cast music dialogue ending direction camera pace script humour".split()
WORDS = {
    POSITIVE: "good great moving clever funny charming gripping superb".split(),
    NEGATIVE: "bad awful boring dull clumsy terrible tedious lame".split(),
}
NEGATIONS = ["not", "never", "hardly", "barely"]
ADVERBS = ["", "very", "really", "quite", "rather"]
OPINIONS = ["the {aspect} was {verdict} .", "i found the {aspect} {verdict} .", "its {aspect} : {verdict} ."]


def made_up_reviews(negated: float = 0.15) -> Iterator[Review]:
    """Endless distinct reviews, of either label in turn; the same ones each time.

    A review gives three opinions, at least two of them of its label, and a share `negated` of the opinions praises with
    a negated word of blame or the reverse. So no word tells the label: it takes a count, and what stands before a word.
    """
    dice = random.Random(0)
    seen: set[str] = set()
    label = POSITIVE
    while True:
        opinions = [label, label, dice.choice([NEGATIVE, POSITIVE])]
        sentences = [_opinion(dice, opinion, dice.random() < negated) for opinion in opinions]
        dice.shuffle(sentences)
        text = " ".join(sentences)
        if text not in seen:
            seen.add(text)
            yield Review(text, label)
            label = 1 - label


def _opinion(dice: random.Random, opinion: int, negated: bool) -> str:
    word = dice.choice(WORDS[1 - opinion if negated else opinion])
    before = [dice.choice(NEGATIONS) if negated else "", dice.choice(ADVERBS)]
    verdict = " ".join(part for part in (*before, word) if part)
    return dice.choice(OPINIONS).format(aspect=dice.choice(ASPECTS), verdict=verdict)


# --- tokens


class Words:
    """Words and punctuation marks as tokens: those of a text, the most frequent first."""

    def __init__(self, known: Sequence[str]) -> None:
        self.numbers = {word: number for number, word in enumerate(known, start=END + 1)}

    @classmethod
    def of(cls, texts: Iterable[str], size: int) -> "Words":
        """The words of `texts`, at most so many that `size` numbers are enough."""
        counts = Counter(word for text in texts for word in _split(text))
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ordered[: size - (END + 1)])

    def tokens(self, texts: Sequence[str], context: int) -> Tensor:  # (texts, context) int64
        rows = torch.full((len(texts), context), PAD)
        for row, text in zip(rows, texts, strict=True):
            inner = [self.numbers.get(word, UNKNOWN) for word in _split(text)][: context - 2]
            row[: len(inner) + 2] = torch.tensor([START, *inner, END])
        return rows


def _split(text: str) -> list[str]:
    # A line break in IMDB is "<br />".
    return re.findall(r"[\w']+|[^\w\s]", text.replace("<br />", " ").lower())


def pretrained_tokens(weights: str, texts: Sequence[str], context: int) -> Tensor:  # (texts, context) int64
    """`texts` by the tokenizer that belongs to pretrained `weights`."""
    from transformers import AutoTokenizer  # takes seconds

    source = source_of(weights)
    tokenizer = AutoTokenizer.from_pretrained(source.name, local_files_only=source.is_local)
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=context, return_tensors="pt")
    tokens: Tensor = encoded["input_ids"]
    return tokens


class Source(NamedTuple):
    """What `from_pretrained` reads, and whether it must do so without the network."""

    name: str
    is_local: bool


def source_of(weights: str) -> Source:
    """Where `weights` are: nothing but `hub:NAME` goes to the network."""
    if weights.startswith(HUB):
        return Source(weights.removeprefix(HUB), is_local=False)
    root = folder("model.weights", weights, otherwise="or model.weights=null for random weights of model.size")
    return Source(str(root), is_local=True)
