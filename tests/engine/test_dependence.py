import pytest
import torchvision
from nets import net
from torch import nn

from pipeline.engine import depends_on_split


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (lambda: net(), []),
        (lambda: net(batchnorm=True), ["batch statistics"]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout2d(0.0)), ["dropout"]),
        (lambda: nn.Dropout(0.0), []),
        (lambda: nn.TransformerEncoderLayer(8, 2, dropout=0.1), ["dropout"]),
        (lambda: torchvision.models.vit_b_16(), []),
        (lambda: torchvision.models.convnext_tiny(), ["stochastic depth"]),
        (lambda: torchvision.models.efficientnet_b0(), ["batch statistics", "dropout", "stochastic depth"]),
    ],
)
def test_what_depends_on_the_split_is_found(model, kinds: list[str]) -> None:
    assert depends_on_split(model()) == kinds
