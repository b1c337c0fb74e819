"""The engine in anybody's script: any nn.Module, any batch, torch alone installed."""

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from nets import distance
from torch import Tensor, nn

from pipeline.engine import MeanSquaredError, Precision, Trainer

ROOT_PACKAGES = (
    "mlflow",
    "omegaconf",
    "dvc",
    "torchvision",
    "safetensors",
    "torchmetrics",
    "rich",
    "matplotlib",
)


def test_the_example_runs_where_torch_alone_is_installed() -> None:
    script = (
        "import sys, runpy\n"
        f"for name in {ROOT_PACKAGES!r}: sys.modules[name] = None\n"
        "runpy.run_module('examples.own_loop', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert "epoch 20" in done.stdout
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert losses[-1] < losses[0] / 2
    assert "skipped" in done.stdout


class TinyLanguageModel(nn.Module):
    """Next-token logits (N, T, V) of tokens (N, T)."""

    def __init__(self, vocabulary: int = 11, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embed.weight  # tied, as language models have it

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens), src_key_padding_mask=~mask))


def language_window() -> dict[str, Any]:
    """Sequences of unlike lengths, one padded to almost nothing; the window is a dict with a nested tuple."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (9, 7), generator=generator)
    lengths = torch.tensor([7, 7, 7, 2, 1, 1, 1, 5, 6])
    mask = torch.arange(7) < lengths[:, None]
    return {"inputs": (tokens, mask), "labels": tokens.roll(-1, 1)}


def language_forward(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    tokens, mask = batch["inputs"]
    return model(tokens, mask), batch["labels"], mask


def token_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum(), mask.sum()


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_law_1_a_language_models_tokens_count_alike_in_every_micro_batch(micro: int) -> None:
    torch.manual_seed(0)
    model, oracle = TinyLanguageModel(), TinyLanguageModel()
    oracle.load_state_dict(model.state_dict())
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    batch = language_window()
    result = Trainer(
        model,
        optimizer,
        token_loss,
        precision=Precision("fp32"),
        micro_batch_size=micro,
        forward=language_forward,
    ).step(batch)
    total, count = token_loss(*language_forward(oracle, batch))
    (total / count).backward()
    expected = [parameter.grad for parameter in oracle.parameters()]
    # float32: the sums run in another order; 1e-5 is a hundred roundings of 2^-24
    assert distance(seen, expected) <= 1e-5
    assert result.loss == pytest.approx(float((total / count).detach()), rel=1e-5)
    assert result.samples == 9


@pytest.mark.parametrize("name", ["amp_bf16", "amp_fp16"])
def test_a_language_model_learns_in_half_precision(name: str) -> None:
    torch.manual_seed(0)
    model = TinyLanguageModel()
    stepper = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        token_loss,
        precision=Precision(name),
        micro_batch_size=4,
        max_grad_norm=1.0,
        forward=language_forward,
    )
    losses = [stepper.step(language_window()).loss for _ in range(30)]
    assert losses[-1] < losses[0] / 2


class Points(NamedTuple):
    inputs: Tensor
    targets: Tensor


def test_a_regression_on_a_named_tuple_equals_the_whole_window_in_float64() -> None:
    torch.manual_seed(0)
    points = Points(torch.randn(13, 3, dtype=torch.float64), torch.randn(13, 2, dtype=torch.float64))
    weights = []
    for micro in (4, 13):
        torch.manual_seed(1)
        model = nn.Linear(3, 2).double()
        stepper = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            MeanSquaredError(),
            precision=Precision("fp32"),
            micro_batch_size=micro,
        )
        for _ in range(5):
            stepper.step(points)
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert distance(*weights) <= 1e-12


def test_a_window_that_is_one_tensor_and_a_model_that_is_its_own_loss() -> None:
    model = nn.Linear(4, 4)
    stepper = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda error: (error, error.numel()),
        precision=Precision("fp32"),
        micro_batch_size=2,
        forward=lambda model, batch: ((model(batch) - batch).square().sum(),),
    )
    window = torch.randn(5, 4)
    losses = [stepper.step(window).loss for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("batchnorm", [False, True])
def test_a_compiled_model_is_not_compiled_again_for_ragged_micro_batches(batchnorm: bool) -> None:
    """Two traces: of the first size, and of a size that varies; none for those that follow."""
    norm = nn.BatchNorm1d(8) if batchnorm else nn.LayerNorm(8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 2))
    traces = 0

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal traces
        traces += 1
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    eager = nn.Sequential(nn.Linear(4, 8), type(norm)(8), nn.ReLU(), nn.Linear(8, 2))
    eager.load_state_dict(model.state_dict())
    for network, forward in (
        (model, lambda model, batch: (compiled(batch[0]), batch[1])),
        (eager, lambda model, batch: (model(batch[0]), batch[1])),
    ):
        stepper = Trainer(
            network,
            torch.optim.SGD(network.parameters(), lr=0.1),
            MeanSquaredError(),
            precision=Precision("fp32"),
            micro_batch_size=8,
            forward=forward,
        )
        generator = torch.Generator().manual_seed(0)
        for size in (32, 32, 29, 13, 32, 27, 7, 31):
            inputs = torch.randn(size, 4, generator=generator)
            assert stepper.step((inputs, inputs[:, :2])).applied
    assert traces <= 2
    for ours, theirs in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
