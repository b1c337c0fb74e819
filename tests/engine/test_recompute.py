"""Activation checkpointing by block: less memory, the same bits, and nothing moved twice."""

import copy
from collections import Counter

import pytest
import torch
from blocky import PRECISIONS, Answered, blocky, one_thread, saving_trainer, train  # noqa: F401
from nets import copies, equal, window
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointError

from pipeline.engine import recompute, repeated_blocks
from pipeline.memory.trace import count_step, without_memory

models = pytest.importorskip("torchvision.models")


# --- the same result


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("every", [1, 2])
def test_recomputing_changes_no_bit(precision: str, every: int) -> None:
    """Over uneven micro-batches, clipping, dropout, BatchNorm and a skipped window."""
    plain = train(saving_trainer(blocky(), (), precision))
    model = blocky()
    recompute(model, ["blocks.*"], every=every)
    assert equal(train(saving_trainer(model, (), precision)), plain)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_casts_that_are_not_cached_change_no_bit(precision: str) -> None:
    plain = train(saving_trainer(blocky(), (), precision))
    assert equal(train(saving_trainer(blocky(), ["recompute"], precision, cache_casts=False)), plain)


def test_running_statistics_of_each_micro_batch_move_once() -> None:
    plain = train(saving_trainer(blocky(), (), batchnorm_per_window=False))
    assert equal(train(saving_trainer(blocky(), ["recompute"], batchnorm_per_window=False)), plain)


class Normalised(nn.Module):
    """Buffers that torch's forward moves: running statistics of own kinds, and a spectral norm's vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1))
        self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.last = nn.Conv2d(8, 8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return inputs + self.last(self.norm(self.weight(inputs))) * self.calls


def test_buffers_of_any_kind_move_once_and_are_found_as_they_were() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        blocks = [Normalised() for _ in range(2)]
        return nn.Sequential(nn.Conv2d(2, 8, 3), *blocks, nn.Flatten(), nn.Linear(128, 5))

    assert repeated_blocks(model()) == ["1", "2"]
    assert equal(train(saving_trainer(model(), ["recompute"])), train(saving_trainer(model(), ())))


def test_frozen_parameters_and_a_block_in_evaluation_mode_change_no_bit() -> None:
    def model() -> nn.Module:
        made = blocky()
        made.stem.requires_grad_(False)
        made.blocks[0].requires_grad_(False)
        made.blocks[1].eval()
        return made

    for precision in PRECISIONS:
        plain = train(saving_trainer(model(), (), precision))
        assert equal(train(saving_trainer(model(), ["recompute"], precision)), plain)


def test_a_deep_copy_recomputes_its_own_blocks() -> None:
    model = blocky()
    recompute(model, ["blocks.?"])
    other = copy.deepcopy(model)
    train(saving_trainer(other, ()))
    assert equal(copies(model.state_dict().values()), copies(blocky().state_dict().values()))
    assert equal(train(saving_trainer(model, ())), train(saving_trainer(blocky(), ())))


def test_a_block_that_is_random_in_another_way_is_noticed() -> None:
    """Recomputed shapes are compared: a forward that draws from elsewhere does not pass in silence."""

    class Wandering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(72, 72), 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(inputs[: self.calls]).exp().mean(0, keepdim=True).expand(len(inputs), 72)

    model = nn.Sequential(nn.Flatten(), Wandering(), nn.Linear(72, 5))
    recompute(model, ["1"])
    with pytest.raises(CheckpointError, match="different metadata"):
        saving_trainer(model, ()).step(window(4))


# --- when it recomputes


def test_only_a_model_in_training_with_gradients_recomputes() -> None:
    model, calls = blocky(), Counter()
    for index, block in enumerate(model.blocks):
        block.body[0].register_forward_hook(lambda *_, index=index: calls.update([index]))
    undo = recompute(model, ["blocks.*"], every=2)
    images, _ = window(4)
    model(images).sum().backward()
    assert calls == {0: 2, 1: 1, 2: 2}
    with torch.no_grad():
        model(images)
    assert calls == {0: 3, 1: 2, 2: 3}
    model.eval()
    model(images).sum().backward()
    assert calls == {0: 4, 1: 3, 2: 4}
    undo()
    model.train()
    model(images).sum().backward()
    assert calls == {0: 5, 1: 4, 2: 5}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_recomputation_runs_in_the_dtypes_of_the_forward(precision: str) -> None:
    """The step's backward turns autocast off; what is recomputed in it must not see that."""
    model, dtypes = blocky(), []
    model.blocks[1].body[0].register_forward_hook(lambda _, __, outputs: dtypes.append(outputs.dtype))
    trainer = saving_trainer(model, ["recompute"], precision)
    trainer.step(window(4))
    assert dtypes == [trainer.precision.dtype or torch.float32] * 2


def test_names_and_forwards_are_as_before_when_it_is_undone() -> None:
    model = blocky()
    keys = list(model.state_dict())
    own = model.blocks[0].forward
    model.blocks[1].forward = own  # a forward that somebody has put there
    undo = recompute(model, ["blocks.?"])
    assert list(model.state_dict()) == keys
    undo()
    assert ["forward" in vars(block) for block in model.blocks] == [False, True, False]
    assert model.blocks[1].forward == own
    recompute(model, ["blocks.?"])


# --- memory


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_fewer_activations_are_alive(precision: str) -> None:
    def activations(every: int) -> int:
        model = blocky()
        trainer = saving_trainer(model, (), precision)
        if every:
            recompute(model, repeated_blocks(model), every)
        return count_step(trainer, window(8)).highest["activations"]

    plain, every, second = activations(0), activations(1), activations(2)
    assert every < 0.75 * plain
    assert every < second < plain


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_on_fake_tensors_recomputes(precision: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer = saving_trainer(blocky(), ["recompute"], precision, kind=Answered)
        images, labels = torch.randn(10, 2, 6, 6), torch.zeros(10, dtype=torch.int64)
        assert trainer.step((images, labels)).applied


# --- which blocks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", {"BasicBlock": 8}),
        ("resnet50", {"Bottleneck": 16}),
        ("vit_b_16", {"EncoderBlock": 12}),
        ("swin_t", {"SwinTransformerBlock": 12}),
        ("convnext_tiny", {"CNBlock": 18}),
        ("efficientnet_b0", {"MBConv": 16}),
        ("efficientnet_v2_s", {"FusedMBConv": 10, "MBConv": 30}),
        ("regnet_y_400mf", {"ResBottleneckBlock": 16}),
        ("densenet121", {"_DenseLayer": 58}),
        ("mobilenet_v3_small", {"InvertedResidual": 11}),
        ("shufflenet_v2_x0_5", {"InvertedResidual": 16}),
        ("squeezenet1_0", {"Fire": 8}),
        ("maxvit_t", {"MaxVitLayer": 11}),
        ("vgg16_bn", {}),
        ("alexnet", {}),
    ],
)
def test_the_blocks_of_the_known_families_are_found(name: str, expected: dict[str, int]) -> None:
    model = without_memory(lambda: models.get_model(name), device="meta")
    found = Counter(type(model.get_submodule(block)).__name__ for block in repeated_blocks(model))
    assert found == expected


def test_blocks_are_found_by_structure_and_not_by_name() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    class Stage(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.layers, self.norm = nn.ModuleList([Mine() for _ in range(depth)]), nn.LayerNorm(4)

    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), Mine(), nn.Linear(4, 4))) == []  # not repeated
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []  # layers
    assert repeated_blocks(nn.Sequential(Mine(), nn.ReLU(), Mine())) == ["0", "2"]
    assert repeated_blocks(nn.Sequential(Stage(1), Stage(2))) == ["0.layers.0", "1.layers.0", "1.layers.1"]
    assert repeated_blocks(blocky()) == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("blocks", "every", "message"),
    [
        (["block.?"], 1, r"'block\.\?' matches no module; near it are .*blocks\.0"),
        (["blocks.*.body.1"], 1, r"blocks\.0\.body\.1 is a BatchNorm layer"),
        (["blocks.0"], 0, "every=0 must be at least 1"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(blocks: list[str], every: int, message: str) -> None:
    model = blocky()
    with pytest.raises(ValueError, match=message):
        recompute(model, blocks, every)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_block_is_recomputed_once_however_often_it_is_named() -> None:
    model, calls = blocky(), Counter()
    model.blocks[0].body[0].register_forward_hook(lambda *_: calls.update("c"))
    recompute(model, ["blocks.0", "blocks.0*"])  # its inner modules too
    model(window(4)[0]).sum().backward()
    assert calls["c"] == 2
    with pytest.raises(ValueError, match=r"blocks\.0 is recomputed already"):
        recompute(model, ["blocks.0"])
