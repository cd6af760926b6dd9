"""Faults in optimizers, estimators and the search for layouts."""

from fault import Fault

FAULTS = [
    Fault(
        "optimize/_base.py",
        "return [mtf.assign(v, updated), mtf.assign_sub(var, velocity)]",
        "return [mtf.assign(v, updated), mtf.assign_sub(var, updated)]",
        "momentum moves by its new value instead of by its last one",
        "optimize/test_optimizers.py -k velocity",
    ),
    Fault(
        "optimize/_adam.py",
        "(mtf.sqrt(next_v) + self.epsilon)",
        "mtf.sqrt(next_v + self.epsilon)",
        "Adam's epsilon is below the root",
        "oracle/test_oracle.py -k adam_",
    ),
    Fault(
        "optimize/_adafactor.py",
        "return largest[0], largest[1]",
        "return largest[1], largest[0]",
        "the row and column means of Adafactor have each other's names in checkpoints",
        "optimize/test_optimizers.py -k slots",
    ),
    Fault(
        "optimize/_adafactor.py",
        "largest[1].size < self._min_dim_size_to_factor",
        "largest[1].size <= self._min_dim_size_to_factor",
        "dimensions of exactly the least size are not factored",
        "optimize/test_optimizers.py -k slots",
    ),
    Fault(
        "optimize/_base.py",
        "factor(step - offset, total_train_steps - offset)",
        "factor(step - offset, total_train_steps)",
        "the offset of a schedule counts for the step and not for the last step",
        "optimize/test_rates.py",
    ),
    Fault(
        "estimator/experimental.py",
        "values[-1][0] - best_step >= most_steps",
        "values[-1][0] - best_step > most_steps",
        "a training without progress stops an evaluation late",
        "estimator/test_early_stopping.py -k no_progress",
    ),
    Fault(
        "estimator/_hooks.py",
        "key=lambda hook: isinstance(hook, tf.train.CheckpointSaverHook)",
        "key=lambda hook: not isinstance(hook, tf.train.CheckpointSaverHook)",
        "hooks that save checkpoints run before those that fill variables",
        "estimator/test_train.py -k savers_come_after",
    ),
    Fault(
        "estimator/_model.py",
        "self._done = int(session.run(tf.train.get_global_step()))",
        "self._done = 0",
        "a training that goes on draws the random values of its first steps again",
        "estimator/test_resume.py -k go_on",
    ),
    Fault(
        "auto_mtf/valid_layouts.py",
        "math.gcd(self._divisor.get(d.name, 0), d.size)",
        "max(self._divisor.get(d.name, 0), d.size)",
        "a dimension is split if its largest size can be",
        "auto_mtf/test_graph_interface.py -k validator",
    ),
    Fault(
        "auto_mtf/_space.py",
        "sets = [frozenset().union(*tensors)]",
        "sets = tensors",
        "two dimensions of an einsum that meet in no tensor are split alike",
        "auto_mtf/test_layout_optimizer.py -k 'brute_force or evaluate'",
    ),
    Fault(
        "auto_mtf/_program.py",
        "self.model += x == self._x[first, m]",
        "pass",
        "of the lengths of a ring, the layout of least memory splits one",
        "auto_mtf/test_ring_layouts.py -k brute_force_of_memory",
    ),
    Fault(
        "auto_mtf/_space.py",
        "if axis not in shared and alike <= {axis}:",
        "if axis not in shared:",
        "of the lengths of a ring, the fastest layout splits one",
        "auto_mtf/test_ring_layouts.py -k brute_force",
    ),
    Fault(
        "auto_mtf/objective.py",
        "rows.append(now.copy())\n        for name in dead:\n            now[column[name]] -= size[name]",
        "for name in dead:\n            now[column[name]] -= size[name]\n        rows.append(now.copy())",
        "memory is free before the last operation that reads it",
        "auto_mtf/test_step_time.py -k loops_take_memory",
    ),
    Fault(
        "auto_mtf/hardware.py",
        "ring = 2 * (count - 1) * (",
        "ring = (count - 1) * (",
        "an allreduce over a ring takes the time of one round of two",
        "auto_mtf/test_step_time.py -k collectives_by_hand",
    ),
]
