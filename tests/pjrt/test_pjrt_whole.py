"""Steps, restores and errors of mtf.pjrt that leave the variables of a store whole."""

import functools
import glob
import pathlib
import signal
import threading

import jax
import numpy as np
import pytest
import tensorflow as tf
from helpers import pjrt, processes
from helpers.train import linear

import mesh_tensorflow as mtf
from mesh_tensorflow._stop_signals import deferred

ONE = np.ones([1], "float32")


def counting(names="abc", store=None, size=8, **options):
    """Returns a function that adds its argument to variables, and returns the sum of the first."""
    options = {"mesh_shape": "rows:4", "layout": "d:rows", **options}

    @mtf.pjrt.function(store=store, **options)
    def step(by):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        zeros = tf.zeros_initializer()
        made = [mtf.get_variable(mesh, n, f"d:{size}", initializer=zeros) for n in names]
        by = mtf.import_tf_tensor(mesh, by, "one:1")
        updates = [mtf.assign_add(v, mtf.ones_like(v) * mtf.reduce_sum(by)) for v in made]
        total = mtf.reduce_sum(made[0])
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        for update in updates:
            lowering.lowered_operation(update)
        return lowering.export_to_tf_tensor(total)

    return step


def values(store):
    """Returns the only value of each variable."""
    found = {name: np.unique(store.value(name)) for name in store.names}
    assert all(len(value) == 1 for value in found.values())
    return {name: float(value[0]) for name, value in found.items()}


# -- threads


def in_threads(count, fn):
    """Calls a function in threads at once; raises what one of them raised."""
    errors = []

    def run(number):
        try:
            fn(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize("functions", [1, 2])
def test_threads_call_functions_of_one_store(functions):
    """Also the first call, which builds the program and makes the variables."""
    steps = [counting()]
    steps += [counting("cd", store=steps[0].store) for _ in range(functions - 1)]
    store = steps[0].store

    def train(number):
        for _ in range(50):
            float(steps[number % functions](ONE))
            assert set(np.diff(store.value("c"))) == {0}

    in_threads(4, train)
    counts = {"a": 200, "b": 200, "c": 200} if functions == 1 else {"a": 100, "b": 100, "c": 200}
    assert {n: v for n, v in values(store).items() if n != "d"} == counts


def test_a_checkpoint_is_of_one_step_of_another_thread(tmp_path):
    step = counting()
    step(ONE)
    stop = threading.Event()

    def run(number):
        if number:
            while not stop.is_set():
                step(ONE)
            return
        try:
            for i in range(5):
                path = mtf.pjrt.save(step.store, str(tmp_path / f"model-{i}"))
                with step.store.lock:
                    other = tf.train.Checkpoint(store=step.store).write(str(tmp_path / f"tf-{i}"))
                for reader in map(tf.train.load_checkpoint, (path, other)):
                    assert len({reader.get_tensor(n).tobytes() for n in "abc"}) == 1
        finally:
            stop.set()

    in_threads(2, run)


class InSession:
    """Counts as `counting` does, in a session."""

    def __init__(self):
        self._graph = tf.Graph()
        with self._graph.as_default():
            self._update = mtf.pjrt.in_session(self._program)
            self._variables = tf.compat.v1.global_variables()
            self._session = tf.compat.v1.Session()
            self._session.run(tf.compat.v1.global_variables_initializer())

    def _program(self):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        zeros = tf.compat.v1.zeros_initializer()
        made = [mtf.get_variable(mesh, n, "d:8", initializer=zeros) for n in "abc"]
        updates = [mtf.assign_add(v, mtf.ones_like(v)) for v in made]
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl("rows:4", "d:rows")})
        return tf.group([lowering.lowered_operation(u) for u in updates])

    def step(self):
        self._session.run(self._update)

    def values(self):
        found = self._session.run({v.op.name: v for v in self._variables})
        return {name: float(value) for name, [value] in ((n, set(v)) for n, v in found.items())}


class OfFunction:
    """The same by a function of mtf.pjrt."""

    def __init__(self):
        self._step = counting()

    def step(self):
        self._step(ONE)

    def values(self):
        return values(self._step.store)


def test_threads_run_sessions_of_one_program():
    program = InSession()
    in_threads(2, lambda number: [program.step() for _ in range(50)])
    assert program.values() == dict.fromkeys("abc", 100)


@pytest.mark.slow
def test_threads_train_models_at_once():
    expected = linear.fit(4, mesh_shape="rows:2", layout="batch:rows", mesh_impl="pjrt").losses
    found = {}

    def train(number):
        found[number] = linear.fit(
            4, mesh_shape="rows:2", layout="batch:rows", mesh_impl="pjrt"
        ).losses

    in_threads(2, train)
    assert found == {0: expected, 1: expected}


def test_no_step_begins_before_the_last_one_is_done():
    """Else the devices of later ones, which wait for the others, may have all of XLA's threads."""
    step = counting(size=2**20)
    for _ in range(50):
        step(ONE)
        assert all(step.store.array(name).is_ready() for name in "abc")


# -- signals

INTERRUPTED = """
import gc, os, signal, sys, threading, time
import numpy as np
import jax
gc.callbacks.clear()  # in that of JAX, Python would ignore what a handler raises
sys.path.insert(0, sys.argv[2])
import test_pjrt_whole as tests
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

def stop(number, frame):
    raise KeyboardInterrupt

number = getattr(signal, sys.argv[1])
if number != signal.SIGINT:
    signal.signal(number, stop)
waits, ready = np.random.RandomState(0).uniform(0, 0.01, 150), threading.Event()

def send():
    for wait in waits:
        ready.wait()
        ready.clear()
        time.sleep(wait)
        os.kill(os.getpid(), number)

program = getattr(tests, sys.argv[3])()
program.step()
threading.Thread(target=send, daemon=True).start()
for _ in waits:
    try:
        ready.set()
        while True:
            program.step()
    except KeyboardInterrupt:
        pass
    found = program.values()
    assert len(set(found.values())) == 1, found
program.step()
assert program.values() == dict.fromkeys("abc", found["a"] + 1)
print(f"{len(waits)} signals")
"""


@pytest.mark.slow_but(1)
@pytest.mark.slow("SIGALRM-InSession*")
@pytest.mark.parametrize("program", ["OfFunction", "InSession"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGALRM"])
def test_a_step_that_a_signal_ends_is_done_or_not(name, program):
    done = processes.run("-c", INTERRUPTED, name, pathlib.Path(__file__).parent, program)
    assert (done.returncode, done.stdout) == (0, "150 signals\n"), done.stderr[-3000:]


def test_a_function_whose_building_is_stopped_is_built_anew():
    """Ctrl-C leaves no variables, and no program that lacks what was to come."""
    stops, training = [True], pjrt.training(mtf.pjrt.mesh_impl)

    def step(data):
        loss = training(data)
        if stops:
            raise KeyboardInterrupt(stops.pop())
        return loss

    on_jax = functools.partial(mtf.pjrt.function, mesh_shape=pjrt.MESH, layout=pjrt.LAYOUT)
    tf.random.set_seed(3)
    stopped = on_jax(step)
    with pytest.raises(KeyboardInterrupt):
        stopped(pjrt.DATA)
    assert not stopped.store.names
    found = [float(stopped(pjrt.DATA)) for _ in range(2)]
    tf.random.set_seed(3)
    whole = on_jax(training)
    assert found == [float(whole(pjrt.DATA)) for _ in range(2)]


def test_signals_wait_for_the_end_of_what_is_done_as_a_whole():
    before, seen = signal.getsignal(signal.SIGUSR1), []
    try:
        signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
        with deferred(), deferred():
            signal.raise_signal(signal.SIGUSR1)
            assert seen == []
        assert seen == [signal.SIGUSR1]
        with deferred():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)  # of something that hangs
            assert len(seen) == 2
        assert len(seen) == 3
        other = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
        try:
            with deferred():
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGUSR2)  # at once, and not again at the end
            assert seen[3:] == [signal.SIGUSR2, signal.SIGUSR1]
        finally:
            signal.signal(signal.SIGUSR2, other)
        with pytest.raises(ZeroDivisionError), deferred():
            signal.raise_signal(signal.SIGUSR1)
            1 / 0  # noqa: B018
        assert len(seen) == 6
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_variable_whose_memory_is_lost(tmp_path):
    """As after a step that failed; it can be restored."""
    step = counting()
    step(ONE)
    path = mtf.pjrt.save(step.store, str(tmp_path / "model"))
    step.store.array("b").delete()
    for use in (
        lambda: step(ONE),
        lambda: step.store.value("b"),
        lambda: step.store.masters["b"].numpy(),
    ):
        with pytest.raises(RuntimeError, match=r"variable 'b' is lost: .*Restore a checkpoint"):
            use()
    mtf.pjrt.restore(step.store, path)
    step(ONE)
    assert values(step.store) == {"a": 2, "b": 2, "c": 2}


def test_a_variable_as_an_argument():
    """The step is given the memory of the variable, and reads the argument."""
    step = counting("a", size=1, mesh_shape="rows:1")
    step(ONE)
    for argument in (lambda a: a, jax.device_put, lambda a: a.addressable_shards[0].data):
        before = values(step.store)["a"]
        step(argument(step.store.array("a")))
        assert values(step.store) == {"a": 2 * before}


# -- checkpoints


def damage(path):
    """Changes a byte of the last variable."""
    [file] = glob.glob(f"{path}.data-*")
    with open(file, "r+b") as f:
        f.seek(-9, 2)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 1]))


def saved(directory, names="abc", steps=5):
    step = counting(names)
    for _ in range(steps):
        step(ONE)
    return mtf.pjrt.save(step.store, str(directory / "model"), step=steps)


def test_a_restore_into_an_empty_store(tmp_path):
    path = saved(tmp_path)
    for make in (lambda step: step(ONE), lambda step: step.make_variables(ONE)):
        step = counting()
        mtf.pjrt.restore(step.store, path)
        assert step.store.names == []
        make(step)
        assert len(set(values(step.store).values())) == 1
        assert values(step.store)["a"] in (5, 6)
        step(ONE)
        assert values(step.store)["a"] in (6, 7)


def test_a_restore_before_some_of_the_variables_are_made(tmp_path):
    """Those that the file has get its values, later ones of other functions their initial ones."""
    path = saved(tmp_path)
    first = counting("a")
    first(ONE)
    mtf.pjrt.restore(first.store, path)
    counting("bx", store=first.store)(ONE)
    assert values(first.store) == {"a": 5, "b": 6, "x": 1}
    (tmp_path / "model-5.index").unlink()
    counting("xy", store=first.store)(ONE)  # of which the file has none
    with pytest.raises(mtf.checkpoint.CheckpointError, match=r"there is no checkpoint .*model-5"):
        counting("c", store=first.store)(ONE)
    assert values(first.store) == {"a": 5, "b": 6, "x": 2, "y": 1}


@pytest.mark.parametrize("made", [False, True])
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, made):
    def attempt(step, path, text):
        if made:
            step(ONE)
        before = values(step.store)
        with pytest.raises(mtf.checkpoint.CheckpointError, match=text):
            mtf.pjrt.restore(step.store, path)
            step(ONE)
        assert values(step.store) == before

    path = saved(tmp_path)
    attempt(counting("abx"), path, r"Missing in the file \(1\):\n    x \[8\]")
    attempt(counting(size=16), path, r"a: float32 \[8\] in the file, float32 \[16\] in the program")
    attempt(counting(), str(tmp_path / "none"), "there is no checkpoint .*/none. .*: model-5")
    damage(path)
    attempt(counting(), path, r"damaged or cut short(.|\n)*cannot be read \(1\):\n    c\n")


def test_a_damaged_checkpoint_of_a_session_changes_nothing(tmp_path):
    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        made = [mtf.get_variable(mesh, n, "d:8") for n in "abc"]
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl("rows:4", "d:rows")})
        return [lowering.export_to_tf_tensor(v) for v in made]

    path = saved(tmp_path)
    damage(path)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        read = mtf.pjrt.in_session(program)
        session.run(tf.compat.v1.global_variables_initializer())
        before = session.run(read)
        with pytest.raises(mtf.checkpoint.CheckpointError, match="damaged or cut short"):
            mtf.checkpoint.Saver().restore(session, path)
        np.testing.assert_array_equal(session.run(read), before)


def test_an_empty_store_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="the store has no variables yet: call the function, or"):
        mtf.pjrt.save(counting().store, str(tmp_path / "model"))
    assert list(tmp_path.iterdir()) == []


# -- where functions cannot be called


@pytest.mark.slow
def test_calls_that_others_trace():
    step, more = counting(), counting()
    array = jax.numpy.ones([1])
    calls = {
        "jax.jit": lambda: jax.jit(step)(array),
        "jax.grad": lambda: jax.grad(step)(array),
        "jax.vmap": lambda: jax.vmap(step)(array[None]),
        "within jax.jit": lambda: jax.jit(lambda: step(ONE))(),
        "a tf.function": lambda: tf.function(step)(ONE),
        "a tf.function, ": lambda: tf.function(lambda: step(ONE))(),
        "mtf.pjrt.function": lambda: mtf.pjrt.function(
            lambda: step(ONE), mesh_shape="rows:4", layout=""
        )(),
    }
    for by, call in calls.items():
        with pytest.raises(
            ValueError, match=f"is called within .*{by[7:] if 'within' in by else by}"
        ):
            call()
    more(ONE)
    step(ONE)
    assert values(step.store) == values(more.store)
    with tf.Graph().as_default(), pytest.raises(TypeError, match="tensor of a tf graph, which has"):
        step(tf.compat.v1.placeholder(tf.float32, [1]))


def test_devices_and_stores_of_other_kinds():
    device = jax.devices()[0]
    with pytest.raises(ValueError, match=r"rows=4 needs a device for each .*have .* 4 times. Pass"):
        counting(devices=[device] * 4)
    with pytest.raises(TypeError, match=r"a list of jax.devices\(\), but has 'cpu:0' \(str\)"):
        counting(devices=["cpu:0"] * 4)
    with pytest.raises(TypeError, match=r"an mtf.pjrt.ArrayStore.* but is <VariableStore: 0 var"):
        counting(store=mtf.VariableStore())
