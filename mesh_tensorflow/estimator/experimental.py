"""Early stopping, and input receivers of models that are exported for evaluation."""

from mesh_tensorflow.estimator._running.early_stopping import (
    make_early_stopping_hook as make_early_stopping_hook,
)
from mesh_tensorflow.estimator._running.early_stopping import (
    stop_if_higher_hook as stop_if_higher_hook,
)
from mesh_tensorflow.estimator._running.early_stopping import (
    stop_if_lower_hook as stop_if_lower_hook,
)
from mesh_tensorflow.estimator._running.early_stopping import (
    stop_if_no_decrease_hook as stop_if_no_decrease_hook,
)
from mesh_tensorflow.estimator._running.early_stopping import (
    stop_if_no_increase_hook as stop_if_no_increase_hook,
)
from mesh_tensorflow.estimator._serving.export import (
    build_raw_supervised_input_receiver_fn as build_raw_supervised_input_receiver_fn,
)
