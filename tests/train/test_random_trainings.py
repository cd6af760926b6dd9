"""Models, data and options of `fit` that are drawn by chance train alike in all layouts and runs."""

import pytest
from helpers import random_trainings


@pytest.mark.slow
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("seed", range(8))
def test_some(seed):
    random_trainings.check(random_trainings.drawn(seed))
