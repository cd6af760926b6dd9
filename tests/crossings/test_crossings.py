"""Features in each front end on each mesh implementation: the numbers of one unsplit session."""

import functools

import pytest
from helpers.crossings.features import FEATURES
from helpers.crossings.front_ends import FRONT_ENDS
from helpers.crossings.meshes import MESHES, UNSPLIT

from mesh_tensorflow.testing import harness


@functools.cache
def expected(feature, front_end):
    return FRONT_ENDS[front_end](FEATURES[feature].unsplit(), UNSPLIT)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", FEATURES)
def test_cell(name, front_end, mesh):
    feature = FEATURES[name]
    found = FRONT_ENDS[front_end](feature, MESHES[mesh])
    wanted = expected(name, front_end if feature.random else "session")
    harness.assert_close(found.losses, wanted.losses, feature.tolerance, "losses")
    assert found.variables.keys() >= wanted.variables.keys()
    for key, value in wanted.variables.items():
        harness.assert_close(found.variables[key], value, feature.tolerance, key)
    feature.check(found)
