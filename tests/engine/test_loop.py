import torch
from nets import net, trainer, window

from pipeline.engine import fit


def test_fit_steps_through_every_window_and_tells_of_each() -> None:
    model = net()
    model.eval()
    stepper = trainer(model)
    steps, epochs = [], []

    def windows(epoch: int, seen: int):
        return [window(8, seed=10 * epoch + index) for index in range(3)] + [window(3, seed=99)]

    def after_epoch(epoch: int) -> None:
        epochs.append((epoch, stepper.state.step))
        model.eval()  # as a validation would

    def after_step(result) -> None:
        assert model.training
        steps.append((result.step, result.samples))

    fit(stepper, windows, epochs=2, after_step=after_step, after_epoch=after_epoch)
    assert steps == list(zip(range(1, 9), [8, 8, 8, 3] * 2, strict=True))
    assert epochs == [(1, 4), (2, 8)]
    assert stepper.state.samples_seen == 54


def test_fit_goes_on_from_where_the_state_stands() -> None:
    stepper = trainer(net())
    stepper.state.epoch = 2
    entered = []

    def windows(epoch: int, seen: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        entered.append(epoch)
        return [window(4)]

    fit(stepper, windows, epochs=4, after_step=lambda result: None, after_epoch=lambda epoch: None)
    assert entered == [2, 3]


def test_an_epoch_shorter_than_a_micro_batch_is_one_step() -> None:
    stepper = trainer(net(), micro=16)
    results = []
    fit(
        stepper,
        lambda epoch, seen: [window(2)],
        epochs=1,
        after_step=results.append,
        after_epoch=lambda epoch: None,
    )
    assert [(result.applied, result.samples) for result in results] == [(True, 2)]
