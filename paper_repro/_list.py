"""The experiments, by name, in the order of the page."""

from . import (
    ablation,
    adama,
    capacity,
    exactness,
    gradnorm,
    memory,
    noise,
    oom,
    similarity,
    speed,
    table1,
    tokenmean,
    wasteful,
)
from ._experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        table1,
        ablation,
        gradnorm,
        capacity,
        memory,
        speed,
        similarity,
        exactness,
        tokenmean,
        oom,
        noise,
        wasteful,
        adama,
    )
}
