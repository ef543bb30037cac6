"""LightningModules that write to weights besides the optimizer: teachers, targets, clamps, masks, averages."""

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune

from jobs import CLASSES, FEATURES, loader, read_checkpoint, state_of, trainer
from wrappers import SAM, Lookahead, ScheduleFree

WIDTH = 19  # divides evenly by nothing
IN_THE_WAY = "modified by an inplace operation"  # torch's words, where backward needs what was there before


def body() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Tanh(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
        nn.Linear(WIDTH, CLASSES),
    )


class Trained(L.LightningModule):
    """What the edits are made on."""

    goes_by_epochs = False  # whether something happens at the beginning or the end of one

    def __init__(self) -> None:
        super().__init__()
        self.net = body()
        self.losses: list[float] = []
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def note(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self(batch[0]).float(), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.note(self.loss(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen[f"val_loss {self.current_epoch} {batch_idx}"] = self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def callbacks_of_the_run(self) -> list[L.Callback]:
        return []

    def writable(self, module: nn.Module | None = None) -> AbstractContextManager[None]:
        """For edits that cannot be noticed."""
        strategy = self.trainer.strategy
        return strategy.full_parameters(module, write=True) if hasattr(strategy, "engine") else nullcontext()


# -- a slow copy of the weights


class Teacher(Trained):
    """BYOL and DINO: the teacher follows the student after every batch; its outputs are the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net)
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.teacher(batch[0] + 0.1).float()
            self.centre.mul_(0.9).add_(target.mean(0), alpha=0.1)
        student = self(batch[0]).float()
        return self.note((student - (target - self.centre)).square().mean() + cross_entropy(student, batch[1]))

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.follow(list(self.teacher.parameters()), list(self.net.parameters()))

    def follow(self, teacher: list[nn.Parameter], student: list[nn.Parameter]) -> None:
        for slow, fast in zip(teacher, student, strict=True):
            slow.mul_(0.9).add_(fast.detach(), alpha=0.1)


class TeacherByLerp(Teacher):
    def follow(self, teacher: list[nn.Parameter], student: list[nn.Parameter]) -> None:
        for slow, fast in zip(teacher, student, strict=True):
            slow.lerp_(fast, 0.1)


class TeacherByForeach(Teacher):
    def follow(self, teacher: list[nn.Parameter], student: list[nn.Parameter]) -> None:
        torch._foreach_mul_(teacher, 0.9)
        torch._foreach_add_(teacher, student, alpha=0.1)


class TeacherInTrainingStep(Teacher):
    """As MoCo: between the student's forward and the teacher's, by assigning `.data`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self(batch[0]).float()
        with torch.no_grad():
            for fast, slow in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            target = self.teacher(batch[0] + 0.1).float()
        return self.note((prediction - target).square().mean())

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class TeacherAveraged(Teacher):
    """`AveragedModel` inside the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.optim.swa_utils.AveragedModel(
            self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.teacher.requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.update_parameters(self.net)


class Target(Trained):
    """DQN: a target network that takes the online one's weights every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.target = body()
        self.target.load_state_dict(self.net.state_dict())
        self.target.requires_grad_(False).eval()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            wanted = 0.9 * self.target(batch[0].roll(1, 0)).float().max(1).values + batch[0][:, 0]
        value = self(batch[0]).float().gather(1, batch[1][:, None]).squeeze(1)
        self.update(batch_idx)
        return self.note(nn.functional.smooth_l1_loss(value, wanted))

    def update(self, batch_idx: int) -> None:
        if batch_idx % 2 == 1:
            self.target.load_state_dict(self.net.state_dict())


class TargetSoftly(Target):
    def update(self, batch_idx: int) -> None:
        for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
            slow.data.copy_(0.1 * fast.data + (1 - 0.1) * slow.data)


# -- the weights that train


class Clamped(Trained):
    """WGAN: the critic's weights are clamped after each of its steps; two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        real, noise = batch[0][:, :CLASSES], batch[0].flip(1)
        faked, judged = self.critic(torch.cat([self(noise).detach(), real])).float().chunk(2)
        self.take(judging, faked.mean() - judged.mean())
        self.clamp()
        if batch_idx % 2:
            self.take(generating, -self.critic(self(noise)).float().mean())

    def take(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.note(loss))
        optimizer.step()

    def clamp(self) -> None:
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.05, 0.05)

    def configure_optimizers(self) -> Any:
        return [torch.optim.RMSprop(part.parameters(), lr=5e-3) for part in (self.net, self.critic)]


class ClampedWithoutGrad(Clamped):
    @torch.no_grad()
    def clamp(self) -> None:
        for parameter in self.critic.parameters():
            parameter.clamp_(-0.05, 0.05)


class Reinitialised(Trained):
    """At the start of the second epoch: `nn.init`, `reset_parameters`, `apply`; the optimizer forgets."""

    goes_by_epochs = True

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            nn.init.trunc_normal_(self.net[0].weight, std=0.3)
            self.net[3][0].reset_parameters()
            self.net[4].apply(self.initialise)
            self.optimizers().optimizer.state.clear()

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
            module.bias.data.fill_(0.01)


class Rewound(Trained):
    """Goes back to a snapshot that went through a file; at the end of an epoch, to where it began."""

    goes_by_epochs = True

    def on_train_start(self) -> None:
        self.beginning = {name: value.clone() for name, value in self.state_dict().items()}

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.load_state_dict(self.beginning)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == (0, 1):
            self.file = io.BytesIO()
            torch.save({"net": self.net.state_dict(), "head": self.net[4].weight}, self.file)
        if (self.current_epoch, batch_idx) == (1, 1):
            self.file.seek(0)
            snapshot = torch.load(self.file)
            self.net.load_state_dict(snapshot["net"])
            self.seen["head in the snapshot"] = snapshot["head"].detach()


class Perturbed(Trained):
    """SAM: a step uphill, a second backward there, back, and the step of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        climbed = []
        with torch.no_grad():
            for parameter in self.net.parameters():
                climbed.append(0.05 * parameter.grad.sign().to(parameter.dtype))
                parameter.add_(climbed[-1])
        optimizer.zero_grad()
        self.manual_backward(self.note(self.loss(batch)))
        with torch.no_grad():
            for parameter, step in zip(self.net.parameters(), climbed, strict=True):
                parameter.sub_(step)
        optimizer.step()


class Exchanged(Trained):
    """An average of the weights is validated in place of them: both change places by `p.data`, and without a copy."""

    def on_train_start(self) -> None:
        self.average = [parameter.detach().clone() for parameter in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        torch._foreach_lerp_(self.average, [parameter.data for parameter in self.parameters()], 0.3)

    def on_validation_start(self) -> None:
        self.kept = [parameter.data for parameter in self.parameters()]
        self.show(self.average)

    def on_validation_end(self) -> None:
        self.show(self.kept)

    def show(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.data = value


class ExchangedBetweenForwards(Trained):
    """As `Exchanged`, in the middle of a step: the loss is that of two sets of weights, each in its turn."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            kept, self.seen[f"before {batch_idx}"] = self.net[4].weight.data, self.loss(batch)
            self.net[4].weight.data = kept * 0.5
            self.seen[f"meanwhile {batch_idx}"] = self.loss(batch)
            self.net[4].weight.data = kept
        return super().training_step(batch, batch_idx)


class EditedBeforeOptimizerStep(Trained):
    """Before each step of the optimizer, beside the gradients, which are clamped."""

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.net.parameters():
            parameter.mul_(0.99)
            parameter.grad.clamp_(-0.0625, 0.0625)


class EditedBeforeBackward(Trained):
    """Between forward and backward, to weights that backward does not need."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.net[0].weight.copy_(self.net[0].weight.clamp(-0.25, 0.25))
            self.net[4].bias.mul_(0.9)
        return loss


class EditedInTheWayOfBackward(Trained):
    """As above, to one that backward needs: torch's error, unless autocast has made the copy that backward uses."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.net[4].weight.copy_(self.net[4].weight * 0.9)
        return loss


class EditedBetweenForwards(Trained):
    """As above; the values that the first forward has used are wanted by its backward, after a second forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = self.loss(batch)
        with torch.no_grad():
            self.net[3][0].weight.mul_(0.5)
        return self.note(first + self.loss(batch))


class Pruned(Trained):
    """A mask over a weight, and more of it after every epoch; for another weight, made permanent at once."""

    goes_by_epochs = True

    def on_train_epoch_end(self) -> None:
        prune.l1_unstructured(self.net[0], "weight", amount=0.3)
        prune.ln_structured(self.net[4], "weight", amount=0.3, n=2, dim=0)
        prune.l1_unstructured(self.net[3][0], "weight", amount=0.3)
        prune.remove(self.net[3][0], "weight")

    def on_train_end(self) -> None:
        self.seen["masked"] = self.net[0].weight.detach().clone()


class PrunedByCallback(Trained):
    goes_by_epochs = True

    def callbacks_of_the_run(self) -> list[L.Callback]:
        return [ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False)]


class LotteryTicket(Trained):
    goes_by_epochs = True

    def callbacks_of_the_run(self) -> list[L.Callback]:
        # Once: the callback assigns its own copy to `.data`, and without us that copy trains from then on.
        once = lambda epoch: epoch == 0  # noqa: E731
        return [
            ModelPruning(
                "l1_unstructured", amount=0.2, make_pruning_permanent=False, use_lottery_ticket_hypothesis=once
            )
        ]


# -- modules that write to their own weights in forward


class BoundedEmbedding(Trained):
    """`max_norm`, in a table and in a bag; every rank looks at all rows, or the ranks of DDP would drift apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, FEATURES, max_norm=0.5)
        self.bag = nn.EmbeddingBag(7, FEATURES, max_norm=1.0, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        rows, bags = self.table(torch.arange(7)), self.bag(torch.arange(14).view(7, 2) % 7)
        which = (x[:, 0].abs() * 5).long() % 7
        return self.net(x + rows[which] + bags[which])


class Spectral(Trained):
    """Spectral and weight norm, as parametrizations and as the hooks of old."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES))
        self.second = parametrizations.weight_norm(nn.Linear(FEATURES, FEATURES))
        self.third = nn.utils.spectral_norm(nn.Linear(FEATURES, FEATURES))
        self.fourth = nn.utils.weight_norm(nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third, self.fourth):
            x = torch.tanh(layer(x))
        return self.net(x)

    def on_train_end(self) -> None:
        self.seen |= {name: getattr(self, name).weight.detach().clone() for name in ("first", "second")}


class RenormedInForward(Trained):
    """Writes through `.data` in its own forward, which nobody can notice: inside `full_parameters(write=True)`."""

    class Renormed(nn.Linear):
        writable: Callable[[nn.Module], AbstractContextManager[None]]

        def forward(self, x: Tensor) -> Tensor:
            with self.writable(self):
                self.weight.data.copy_(torch.renorm(self.weight.data, 2, 0, 0.5))
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = self.Renormed(WIDTH, CLASSES)
        self.net[4].writable = self.writable


class EditedByAnother(Trained):
    """A module in the middle writes to the first one, which has run, and to the last, which has not."""

    class Editor(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    for other in self.others:
                        other.weight.clamp_(-0.2, 0.2)
                        other.bias.mul_(0.9)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = self.Editor()
        self.net[2].others = [self.net[0], self.net[4]]  # a list: not its submodules


class EditedInHooks(Trained):
    """Hooks on calls of a module write to its weight: before, in the way of the norm constraints of old; and after."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4].register_forward_pre_hook(self.constrain)
        self.net[0].register_forward_hook(self.constrain)

    @staticmethod
    @torch.no_grad()
    def constrain(module: nn.Linear, *_: Any) -> None:
        module.weight.copy_(torch.renorm(module.weight, 2, 0, 0.5))


class EditedByNumpy(Trained):
    """All weights of the model, and of one layer."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            with self.writable():
                for parameter in self.parameters():
                    parameter.detach().numpy()[...] *= 0.99
        else:
            with self.writable(self.net[0]):
                self.net[0].weight.data.numpy()[1:3] = 0.25


# -- optimizers that write besides their steps


class WithState(Trained):
    """Takes the optimizer's whole state at the end of training."""

    def on_train_end(self) -> None:
        optimizer, strategy = self.optimizers(), self.trainer.strategy
        state = strategy.full_optimizer_state(optimizer) if hasattr(strategy, "engine") else optimizer.state_dict()
        self.seen |= {f"state {name}": value.clone() for name, value in tensors_of(state)}


class LooksAhead(WithState):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.Adam(self.parameters(), lr=1e-2))


class Climbs(WithState):
    """Two closures in a step: Lightning's, with forward and backward in it."""

    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))


class NeedsNoSchedule(WithState):
    """Its weights are others in evaluation."""

    goes_by_epochs = True

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    on_validation_epoch_end = on_train_epoch_start

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()

    def on_train_end(self) -> None:
        self.trainer.optimizers[0].eval()
        super().on_train_end()

    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters())


class AveragedByHand(TeacherAveraged):
    """With torch's scheduler for it; BatchNorm of the average is estimated anew at the end."""

    goes_by_epochs = True

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)]

    def on_train_end(self) -> None:
        with self.writable():
            torch.optim.swa_utils.update_bn(loader(seed=3, samples=16), self.teacher)


# -- Lightning's own averages


class Averaged(Trained):
    goes_by_epochs = True

    def callbacks_of_the_run(self) -> list[L.Callback]:
        return [WeightAveraging()]


class AveragedExponentially(Trained):
    goes_by_epochs = True

    def callbacks_of_the_run(self) -> list[L.Callback]:
        return [EMAWeightAveraging(decay=0.8)]


class AveragedStochastically(Trained):
    goes_by_epochs = True

    def callbacks_of_the_run(self) -> list[L.Callback]:
        return [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)]


MODULES = {
    module.__name__: module
    for module in (
        *(Teacher, TeacherByLerp, TeacherByForeach, TeacherInTrainingStep, TeacherAveraged, Target, TargetSoftly),
        *(
            Clamped,
            ClampedWithoutGrad,
            Reinitialised,
            Rewound,
            Perturbed,
            Exchanged,
            ExchangedBetweenForwards,
            EditedBeforeOptimizerStep,
            EditedBeforeBackward,
        ),
        *(EditedInTheWayOfBackward, EditedBetweenForwards, Pruned, PrunedByCallback, LotteryTicket),
        *(BoundedEmbedding, Spectral, RenormedInForward, EditedByAnother, EditedInHooks, EditedByNumpy),
        *(LooksAhead, Climbs, NeedsNoSchedule, AveragedByHand),
        *(Averaged, AveragedExponentially, AveragedStochastically),
    )
}


def fit(strategy: Any, name: str, precision: str, path: Path) -> dict[str, Any]:
    """Three steps with validation after the second, or two epochs of two steps, and a checkpoint; or the error they end
    in. There are two steps with nothing in between, and one that follows a validation."""
    path = path.with_suffix(".folder" if isinstance(strategy, dict) else ".file")
    L.seed_everything(1, verbose=False)
    model = MODULES[name]()
    callbacks = model.callbacks_of_the_run()
    outcome = {"error": None, "losses": model.losses, "seen": model.seen, "weights": {}, "saved": {}}
    length: dict[str, Any] = {"max_epochs": 2} if model.goes_by_epochs else {"max_epochs": 1, "val_check_interval": 2}
    run = trainer(strategy, 2, precision=precision, callbacks=callbacks, num_sanity_val_steps=0, **length)
    try:
        run.fit(model, loader(samples=16 if model.goes_by_epochs else 24), loader(seed=1, samples=8))
    except RuntimeError as error:
        if IN_THE_WAY not in str(error):
            raise
        return {**outcome, "error": IN_THE_WAY}
    run.save_checkpoint(path)
    run.strategy.barrier()
    checkpoint = read_checkpoint(path)
    run.strategy.barrier()
    saved = {f"{part}.{name}": value for part in checkpoint for name, value in tensors_of(checkpoint[part])}
    return {**outcome, "weights": state_of(model), "saved": saved}


class SavesEdited(L.Callback):
    """Saves in the midst of training, right after edits: of a weight, through a view that is held, and of data."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, run: L.Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            with torch.no_grad():
                model.net[0].weight.mul_(2)
            self.held = model.net[3][0].weight.data[1:]
            self.held.add_(1)
            model.net[4].weight.data = torch.full((CLASSES, WIDTH), 3.0)
            run.save_checkpoint(self.path)


def saved_as_edited(strategy: Any, precision: str, path: Path) -> dict[str, Tensor]:
    L.seed_everything(1, verbose=False)
    run = trainer(strategy, 2, precision=precision, callbacks=[SavesEdited(path)], max_steps=2)
    run.fit(Trained(), loader(samples=16))
    run.strategy.barrier()
    return read_checkpoint(path)["state_dict"]


def tensors_of(nested: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Dotted path -> tensor, for every tensor in a nest of dictionaries and lists."""
    if isinstance(nested, Tensor):
        return [(name, nested)]
    if isinstance(nested, dict | list | tuple):
        items = nested.items() if isinstance(nested, dict) else enumerate(nested)
        return [found for key, value in items for found in tensors_of(value, f"{name}.{key}".lstrip("."))]
    return []
