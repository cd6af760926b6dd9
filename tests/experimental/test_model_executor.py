"""Training and evaluation in turns: placed, as one program, and the graph for a TPU."""

import itertools
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.experimental.generated_scans import set_flags, write

from mesh_tensorflow.experimental import model_executor
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate


@pytest.fixture
def run(tmp_path):
    """A function that sets flags, trains and evaluates; returns (reports, last scores)."""
    write(tmp_path)

    def run(**values):
        usual = {
            "train_file_pattern": str(tmp_path / "ready-*"),
            "save_checkpoints_steps": 2,
            "eval_file_pattern": str(tmp_path / "raw-*"),
            "num_training_loops": 2,
            "checkpoint_dir": str(tmp_path / "checkpoints"),
            "num_train_iterations_per_loop": 3,
            "num_eval_iterations_per_loop": 2,
            "use_tpu": False,
        }
        set_flags(**{**usual, **values})
        reports = []
        with tf.Graph().as_default():
            tf.set_random_seed(2)
            scores = model_executor.train_and_eval(lambda *report: reports.append(report))
        return reports, scores

    return run


SCORES = {
    "loss",
    "lesion_pred_ratio",
    "lesion_label_ratio",
    "accuracy_of_all_classes",
    "lesion_dice_per_case",
    "lesion_dice_global",
    "loss_xen",
    "loss_dice",
    "loss_dice_per_case",
    "loss_dice_global",
}


def steps_in(folder):
    return sorted(int(name[11:-6]) for name in os.listdir(folder) if name.endswith(".index"))


def summaries(folder):
    """Returns {tag: {step: value}}."""
    found = {}
    for name in os.listdir(folder):
        if name.startswith("events"):
            for event in tf.train.summary_iterator(os.path.join(folder, name)):
                for value in event.summary.value:
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("use_tpu", [False, True])
def test_checkpoints_predictions_and_summaries(run, tmp_path, use_tpu):
    reports, scores = run(
        use_tpu=use_tpu, pred_output_dir=str(tmp_path / "pred"), summary_dir=str(tmp_path / "sum")
    )
    assert [step for step, *_ in reports] == [3, 6]
    assert all(set(trained) == set(tested) == SCORES for _, trained, tested in reports)
    assert reports[1][2] == scores and np.isfinite(list(scores.values())).all()
    assert steps_in(tmp_path / "checkpoints") == [3, 4, 6]
    files = {
        f"{name}_{step}_{i}.npy"
        for name in ("pred_liver", "pred_lesion", "label")
        for step in (3, 6)
        for i in range(4)
    }
    assert set(os.listdir(tmp_path / "pred")) == files
    lesions = np.load(tmp_path / "pred" / "pred_lesion_6_0.npy")
    assert lesions.shape == (4, 4, 4) and 0 <= lesions.min() and lesions.max() <= 1
    written = summaries(tmp_path / "sum")
    assert set(written) == {f"{kind}/{name}" for kind in ("train", "eval") for name in SCORES}
    np.testing.assert_allclose(written["eval/loss"][6], scores["loss"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [(False, True), (True, False)])
def test_training_goes_on_the_other_way(run, tmp_path, first, second):
    """The same checkpoint has the same scores, whichever way programs run."""
    _, before = run(use_tpu=first, num_training_loops=1, lr=0.01)
    reports, _ = run(use_tpu=second, lr=0.01)
    assert [step for step, *_ in reports] == [6]
    done, scores = run(use_tpu=second)
    assert (done, scores) == ([], {})
    evaluating = {}
    for use_tpu in (first, second):
        with tf.Graph().as_default():
            set_flags(use_tpu=use_tpu)
            model = model_executor.Model("eval")
            assert model.restore(str(tmp_path / "checkpoints")) == 6
            evaluating[use_tpu] = model.run()["scores"]
            model.close()
    for name, value in evaluating[first].items():
        np.testing.assert_allclose(evaluating[second][name], value, rtol=1e-4, err_msg=name)
    assert before["loss"] != evaluating[first]["loss"]


# What the classic trains, and what its optimizer keeps.
KERNELS = {
    "conv_down_0_0/kernel": [3, 3, 3, 1, 4],
    "conv_down_1_0/kernel": [3, 3, 3, 4, 8],
    "deconv_0_0/kernel": [2, 2, 2, 4, 8],
    "conv_up_0_0/kernel": [3, 3, 3, 8, 4],
    "final_conv_3/kernel": [1, 1, 1, 4, 3],
}


@pytest.mark.slow
def test_checkpoints_are_those_of_the_classic(run, tmp_path):
    run(with_batch_norm=False, num_training_loops=1)
    expected = {"global_step": []}
    for name, sizes in KERNELS.items():
        expected.update({name: sizes, f"{name}_slot_v": sizes})
    assert dict(tf.train.list_variables(str(tmp_path / "checkpoints"))) == expected


@pytest.mark.slow
def test_loss_and_dice_get_better(run):
    reports, scores = run(
        num_training_loops=4,
        num_train_iterations_per_loop=40,
        n_base_filters=8,
        lr=0.03,
        lr_drop_steps=60.0,
        save_checkpoints_steps=1000,
        pred_downsample=1,
    )
    losses = [trained["loss"] for _, trained, _ in reports]
    assert losses[-1] < 0.3 * losses[0] and scores["lesion_dice_global"] > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("use_tpu", [False, True])
def test_slices_of_scans(run, tmp_path, use_tpu):
    _, scores = run(
        sampled_2d_slices=True,
        use_tpu=use_tpu,
        num_training_loops=1,
        output_ground_truth=False,
        pred_output_dir=str(tmp_path / "pred"),
    )
    assert set(scores) == SCORES and len(os.listdir(tmp_path / "pred")) == 8
    assert np.load(tmp_path / "pred" / "pred_liver_3_0.npy").shape == (4, 4)


@pytest.mark.slow
def test_without_directories(run, tmp_path):
    _, scores = run(num_training_loops=1, checkpoint_dir="", write_summary=True)
    assert set(scores) == SCORES and not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    "flag",
    [
        "num_training_loops",
        "num_train_iterations_per_loop",
        "num_eval_iterations_per_loop",
        "save_checkpoints_steps",
    ],
)
def test_numbers_that_make_no_sense(flag):
    set_flags(**{flag: 0})
    with pytest.raises(ValueError, match=f"--{flag}=0 must be 1 at least"):
        model_executor.train_and_eval()


@pytest.mark.slow
def test_eager_programs(tmp_path):
    write(tmp_path, 2)
    script = f"""
from absl import flags
from helpers.experimental import generated_scans
from mesh_tensorflow.experimental import model_executor
flags.FLAGS(["test"])
generated_scans.set_flags(
    train_file_pattern="{tmp_path}/ready-*", eval_file_pattern="{tmp_path}/raw-*",
    num_training_loops=2, num_train_iterations_per_loop=2, use_tpu=False)
print(len(model_executor.train_and_eval()), "scores")
"""
    done = processes.run("-c", script)
    assert done.stdout == "10 scores\n", done.stderr


def test_learning_rate():
    set_flags(lr=0.01, lr_drop_steps=10.0, lr_drop_rate=0.5)
    with tf.Graph().as_default(), tf.Session() as session:
        found = session.run(
            [model_executor._learning_rate(tf.constant(step)) for step in (0, 9, 10, 35)]
        )
    np.testing.assert_allclose(found, [0.01, 0.01, 0.005, 0.00125], rtol=1e-6)


# -- MeshContext


def test_context_of_placed_devices(tf_graph):
    with tf.Session() as session:
        context = model_executor.MeshContext(session, False, "rows:2,columns:2", "batch:rows")
    assert context.mesh_impl is None and context.device_assignment is None
    assert (context.num_hosts, context.num_cores, context.num_cores_per_host) == (1, 4, 4)
    graph, mesh, mesh_impl = context.create_graph_mesh_and_mesh_impl()
    assert mesh.graph is graph and isinstance(mesh_impl, PlacementMeshImpl)
    assert context.mesh_impl is mesh_impl and len(mesh_impl.devices) == 4


def test_context_of_one_program(tf_graph):
    with tf.Session() as session:
        context = model_executor.MeshContext(session, True, "rows:2,columns:2", "batch:rows")
    assert context.device_assignment is None and context.num_cores_per_host == 4
    with pytest.raises(ValueError, match="SimdMeshImpl works within a program"):
        context.create_graph_mesh_and_mesh_impl()

    def program():
        assert isinstance(context.create_graph_mesh_and_mesh_impl()[2], SimdMeshImpl)
        return tf.constant(1)

    replicate(program, devices=[f"/cpu:{i}" for i in range(4)])


class TpuSession:
    """A session of a TPU of 2 x 2 chips of two cores, on one host."""

    def list_devices(self):
        class Device:
            device_type = "TPU_SYSTEM"

        return [Device]

    def run(self, topology):
        cores = np.array(list(itertools.product(range(2), range(2), range(1), range(2))))
        return tf.tpu.experimental.Topology(
            mesh_shape=[2, 2, 1, 2], device_coordinates=cores[None]
        ).serialized()


def test_context_of_a_tpu(tf_graph):
    context = model_executor.MeshContext(TpuSession(), True, "rows:4,columns:2", "batch:rows")
    assert context.device_assignment.num_replicas == 8
    assert (context.num_hosts, context.num_cores, context.num_cores_per_host) == (1, 8, 8)
    *_, mesh_impl = context.create_graph_mesh_and_mesh_impl()
    assert isinstance(mesh_impl, SimdMeshImpl)
    assert mesh_impl.device_assignment is context.device_assignment
    assert sorted(mesh_impl.l2p(pnum) for pnum in range(8)) == list(range(8))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_program_of_a_tpu(tmp_path, tf_graph, mode):
    """Built as tpu.replicate builds it; its operations looked at, as there is no TPU to run it."""
    write(tmp_path, 2)
    set_flags(
        use_tpu=True,
        mesh_shape="rows:2,columns:2,cores:2",
        on_gcp=False,
        layout="batch:cores,image_nx_block:rows,image_ny_block:columns",
        train_file_pattern=str(tmp_path / "ready-*"),
        eval_file_pattern=str(tmp_path / "raw-*"),
    )
    model = model_executor.Model.__new__(model_executor.Model)
    model._mode = mode
    model._context = model_executor.MeshContext(
        TpuSession(), True, model_executor.FLAGS.mesh_shape, model_executor.FLAGS.layout
    )
    with tf.variable_scope("", use_resource=True):
        results = model._built(tf.constant(0.1))
    assert set(results["scores"]) == SCORES and ("record" in results) == (mode == "eval")
    inside, outside = {}, {}
    for op in tf_graph.get_operations():
        types = inside if "_tpu_replicate" in op.node_def.attr else outside
        types.setdefault(op.type, []).append(op)
    assert len(inside["InfeedDequeueTuple"]) == 1 and len(outside["InfeedEnqueueTuple"]) == 8
    # Margins go from core to core; all cores have one mesh.
    pairs = tf.make_ndarray(inside["CollectivePermute"][0].inputs[1].op.get_attr("value"))
    assert pairs.shape[1] == 2 and "CrossReplicaSum" in inside
    taken = inside["InfeedDequeueTuple"][0].outputs[0]
    assert taken.shape.as_list() == [1, 1, 4, 1, 4, 8, 1]
    assert ("AssignVariableOp" in inside) == (mode == "train")
    assert model._lowering.copy_masters_to_slices() is not None


def command(module, **flags):
    options = [f"--{name}={value}" for name, value in flags.items()]
    return processes.python("-m", f"mesh_tensorflow.experimental.{module}", *options).stderr


@pytest.mark.slow
def test_commands(tmp_path):
    """With what no flag is given for as it is by default."""
    write(tmp_path, 2)
    log = command(
        "offline_data_aug",
        input_file_pattern=tmp_path / "raw-*",
        output_folder=tmp_path,
        process_no=0,
        num_data_aug=3,
        ct_resolution=8,
    )
    assert log.count("augment: 3/3 scans") == 1
    log = command(
        "model_executor",
        train_file_pattern=tmp_path / "augmented-*",
        eval_file_pattern=tmp_path / "raw-*",
        ct_resolution=8,
        batch_size_train=1,
        batch_size_eval=1,
        image_nx_block=2,
        image_ny_block=1,
        network_depth=2,
        n_base_filters=2,
        mesh_shape="rows:2",
        layout="image_nx_block:rows",
        num_train_iterations_per_loop=2,
        num_training_loops=1,
    )
    assert log.count("Step 2: training {'loss'") == 1


def test_modules_share_flags():
    """Both commands have --ct_resolution; whichever is imported first defines it."""
    by_module = tf.flags.FLAGS.flags_by_module_dict()
    names = [flag.name for defined in by_module.values() for flag in defined]
    assert names.count("ct_resolution") == 1
    assert {"layout", "mesh_shape", "process_no", "lr"} <= set(names)
