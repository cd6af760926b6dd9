"""Looking into programs: whose line an error comes from, values, NaNs and times."""

from mesh_tensorflow._core.errors import Site
from mesh_tensorflow._watching import CollectedValues, NonFiniteError
from mesh_tensorflow.debug._profile import OperationTime, Profile, profile, time_table
from mesh_tensorflow.debug._values import collect, explain, inspect, nan_checks, user_errors, values

__all__ = [
    "CollectedValues",
    "NonFiniteError",
    "OperationTime",
    "Profile",
    "Site",
    "collect",
    "explain",
    "inspect",
    "nan_checks",
    "profile",
    "time_table",
    "user_errors",
    "values",
]
