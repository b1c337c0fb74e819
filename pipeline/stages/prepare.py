"""Stage prepare: read the source, split it, write data/prepared/."""

import sys
from dataclasses import replace

import numpy as np

from pipeline import files
from pipeline.config import Params
from pipeline.data import prepared, sources, splits
from pipeline.stages.guard import check_dependency, inputs_unchanged, run_stage

RESIZE_BATCH = 1024


def prepare(params: Params) -> None:
    data = params.data
    check_dependency(("prepare",), "data.source", data.source)
    files.check_writable(prepared.FOLDER.parent)
    with inputs_unchanged("prepare"):
        labelled = sources.read(data.source)
        if isinstance(data.image_size, int):
            labelled = replace(labelled, images=resized(labelled.images, data.image_size))
        parts = splits.split(
            labelled, validation=data.validation_fraction, test=data.test_fraction, seed=params.seed
        )
        description = prepared.write(labelled, parts, data.source)
    print(prepared.summary(description))


def resized(images: np.ndarray, size: int) -> np.ndarray:
    """uint8 (N, C, H, W) at `size` pixels, square, antialiased; unchanged where it has that size."""
    if images.shape[2:] == (size, size):
        return images
    import torch  # here, as most preparations need neither and importing them takes seconds
    from torchvision.transforms.v2.functional import resize

    batches = [images[start : start + RESIZE_BATCH] for start in range(0, len(images), RESIZE_BATCH)]
    scaled = [resize(torch.from_numpy(batch), [size, size], antialias=True).numpy() for batch in batches]
    return np.concatenate(scaled)


if __name__ == "__main__":
    sys.exit(run_stage("prepare", prepare))
