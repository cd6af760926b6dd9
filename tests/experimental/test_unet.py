"""The U-Net: shapes, data, the same answer however it is split, files of predictions, mistakes."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from absl import flags
from absl.testing import flagsaver
from helpers.experimental.generated_scans import RESO, scan, set_flags, write
from helpers.mesh import xla_cpu_replicas

import mesh_tensorflow as mtf
from mesh_tensorflow.experimental import unet
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate


def elements(dataset_str, count):
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(5)
        ds = unet.get_dataset_creator(dataset_str)()
        example = tf.data.make_one_shot_iterator(ds).get_next()
        return [session.run(example) for _ in range(count)]


def joined(x):
    """Returns [x, y, ...] of an example in blocks."""
    return x.reshape(RESO, RESO, *x.shape[4:])


# -- shapes and layouts


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dataset_str, size", [("train", 6), ("eval", 3)])
def test_shapes(dataset_str, size, flat):
    set_flags(
        batch_size_train=6, batch_size_eval=3, image_nx_block=4, label_c=5, sampled_2d_slices=flat
    )
    spatial = "image_nx_block:4,image_sx_block:2,image_ny_block:2,image_sy_block:4"
    spatial += "" if flat else ",image_sz_block:8"
    assert unet.get_input_mtf_shapes(dataset_str) == [
        mtf.convert_to_shape(f"batch:{size},{spatial},{channels}")
        for channels in ("image_c:1", "label_c:5")
    ]
    assert (
        unet.get_layout().tensor_dimension_to_mesh_axis(
            mtf.Dimension("image_ny_block", 2), mtf.convert_to_shape("rows:2,columns:2")
        )
        == 1
    )


# -- data


def test_evaluation_reads_scans_in_order(tmp_path):
    scans = write(tmp_path, 3)
    set_flags(eval_file_pattern=str(tmp_path / "raw-*"))
    for (image, label), (raw, classes) in zip(elements("eval", 5), [*scans, *scans]):
        assert image.shape == (2, 4, 2, 4, 8, 1) and label.shape == (2, 4, 2, 4, 8, 3)
        np.testing.assert_allclose(
            joined(image)[..., 0], np.clip((raw + 512) / 1024, 0, 1), atol=1e-6
        )
        np.testing.assert_array_equal(joined(label), np.eye(3)[classes.astype(int)])


def test_training_flips_scans(tmp_path):
    scans = write(tmp_path, 2)
    set_flags(train_file_pattern=str(tmp_path / "ready-*"))
    known = {}
    for i, (_, classes) in enumerate(scans):
        for flips in np.ndindex(2, 2, 2):
            flipped = np.flip(classes, [axis for axis in range(3) if flips[axis]])
            known.setdefault(flipped.tobytes(), []).append((i, flips))
    seen = {
        known[joined(label).argmax(-1).astype("float32").tobytes()][0]
        for _, label in elements("train", 60)
    }
    assert {i for i, _ in seen} == {0, 1} and len({flips for _, flips in seen}) == 8


AUGMENTATIONS = {
    "image_translate_ratio": 0.1,
    "image_transform_ratio": 0.02,
    "image_noise_probability": 1.0,
    "image_noise_ratio": 0.1,
    "image_corrupt_ratio_mean": 0.1,
    "per_class_intensity_scale": 0.1,
}


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
def test_training_augments(tmp_path, flat):
    write(tmp_path, 2)
    set_flags(
        train_file_pattern=str(tmp_path / "ready-*"),
        eval_file_pattern=str(tmp_path / "raw-*"),
        sampled_2d_slices=flat,
        **AUGMENTATIONS,
    )
    found = elements("train", 20)
    images = np.array([image for image, _ in found])
    assert len({image.tobytes() for image in images}) == 20
    assert all(set(np.unique(label)) <= {0, 1} and (label.sum(-1) == 1).all() for _, label in found)
    assert (images == 0).mean() > 0.01 and images.max() > 0.6 and np.isfinite(images).all()
    again = elements("eval", 4 if not flat else 32)
    np.testing.assert_array_equal(again[0][0], again[16 if flat else 2][0])


def test_slices(tmp_path):
    scans = write(tmp_path, 2)
    set_flags(
        sampled_2d_slices=True,
        train_file_pattern=str(tmp_path / "ready-*"),
        eval_file_pattern=str(tmp_path / "raw-*"),
    )
    found = [joined(label).argmax(-1) for _, label in elements("eval", 16)]
    expected = [classes[..., z] for _, classes in scans for z in range(RESO)]
    np.testing.assert_array_equal(found, expected)
    image, label = elements("train", 1)[0]
    assert image.shape == (2, 4, 2, 4, 1) and label.shape == (2, 4, 2, 4, 3)


def test_no_files():
    set_flags(train_file_pattern="/nowhere/*")
    with pytest.raises(ValueError, match=r"--train_file_pattern='/nowhere/\*' names no file"):
        unet.get_dataset_creator("train")()
    with pytest.raises(
        ValueError, match='must be "train" or "eval", not "test"'.replace('"test"', "'test'")
    ):
        unet.get_dataset_creator("test")
    set_flags(image_c=2)
    with pytest.raises(ValueError, match="--image_c=2: scans in files have 1 channel"):
        unet.get_dataset_creator("train")


# -- the network


SCANS = [scan(seed) for seed in range(2)]
IMAGES = np.stack([image / 512 for image, _ in SCANS])
LABELS = np.eye(3, dtype=np.float32)[np.stack([label for _, label in SCANS]).astype(int)]


def step(make_impl, dropout=0.8):
    """Builds a training step; returns the loss, scores and gradients by name."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    mesh_impl = make_impl()
    whole = [
        tf.reshape(tf.constant(x, tf.float32), shape.to_integer_list)
        for x, shape in zip((IMAGES, LABELS), unet.get_input_mtf_shapes("train"))
    ]
    _, loss, scores, updates = unet.unet_with_spatial_partition(mesh, mesh_impl, "train", *whole)
    variables = graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    assert all(g is not None for g in grads)
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    assert len(updates) == 2 * 3
    results = {"loss": loss, **scores, **{v.name: g for v, g in zip(variables, grads)}}
    return {name: lowering.export_to_tf_tensor(x) for name, x in results.items()}, lowering


def values(program):
    with tf.Graph().as_default():
        tf.set_random_seed(11)
        results = program()
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
            session.run(tf.global_variables_initializer())
            return session.run(results)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(found[name] / scale, value / scale, atol=1e-4, err_msg=name)


LAYOUTS = [
    "image_nx_block:rows,image_ny_block:columns",
    "batch:columns,image_ny_block:rows",
    "image_nx_block:columns",
]


@pytest.fixture(scope="module")
def whole_step():
    """What one processor computes, with dropout."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    with flagsaver.flagsaver():
        set_flags(dropout_keep_p=0.8)
        return values(lambda: step(lambda: PlacementMeshImpl("all:1", "", [""]))[0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_over_placed_devices(layout, whole_step):
    set_flags(dropout_keep_p=0.8)
    lowerings = []

    def program():
        results, lowering = step(
            lambda: PlacementMeshImpl("rows:2,columns:2", layout, [f"/cpu:{i}" for i in range(4)])
        )
        lowerings.append(lowering)
        return results

    assert_same(values(program), whole_step)
    # Blocks along a split dimension get margins from their neighbours.
    assert any(key.startswith("shift") for key, _ in lowerings[0].counters)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_split_over_processors_of_one_program(layout, whole_step):
    set_flags(dropout_keep_p=0.8)
    assert_same(
        values(
            lambda: replicate(
                lambda: step(lambda: SimdMeshImpl("rows:2,columns:2", layout))[0],
                devices=[f"/cpu:{i}" for i in range(4)],
            )
        ),
        whole_step,
    )


@pytest.mark.slow
def test_bfloat16(whole_step):
    set_flags(mtf_dtype="bfloat16", dropout_keep_p=0.8)
    found = values(lambda: step(lambda: PlacementMeshImpl("all:1", "", [""]))[0])
    assert found["loss"].dtype == tf.bfloat16.as_numpy_dtype
    np.testing.assert_allclose(float(found["loss"]), whole_step["loss"], rtol=0.1)


@pytest.mark.parametrize(
    "values, text",
    [
        ({"label_c": 2}, "--label_c=2: losses need the classes other, liver and lesion"),
        ({"network_depth": 0}, "--network_depth=0 and --n_conv_per_block=1 must be 1 at least"),
        (
            {"network_depth": 4},
            r"blocks of 4 pixels \(--ct_resolution=8 by --image_nx_block=2\) must be "
            "divisible by 8, for each level but the last",
        ),
        ({"pred_downsample": 3}, "must be divisible by 3, for --pred_downsample"),
        ({"image_ny_block": 3}, "--ct_resolution=8 cannot be cut into --image_ny_block=3 blocks"),
        ({"mtf_dtype": "int32"}, '--mtf_dtype=int32 is no floating dtype; choose "float32"'),
        ({"mtf_dtype": "half-float"}, "--mtf_dtype=half-float is no floating dtype"),
        ({"xen_lesion_weight": 2.0}, "reward wrong predictions: a voxel of a lesion weighs 1"),
    ],
)
def test_flags_that_do_not_fit(values, text, tf_graph):
    # Inputs of the right sizes are made by the flags that are right.
    whole = [tf.zeros(s.to_integer_list) for s in unet.get_input_mtf_shapes("train")]
    set_flags(**values)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    with pytest.raises(ValueError, match=text):
        unet.unet_with_spatial_partition(
            mesh, PlacementMeshImpl("all:1", "", [""]), "train", *whole
        )


# -- predictions


def test_post_processor(tmp_path):
    random = np.random.RandomState(0)
    volumes = [random.rand(2, 2, 2, 3, 4, 5) for _ in range(3)]
    processor = unet.PostProcessor()
    processor.record([*volumes, [20.0, 1.0], [146.0, 50.0], 0.5, 7], str(tmp_path))
    set_flags(output_ground_truth=False)
    processor.record([*volumes, [2.0, 0.0], [8.0, 0.0], 0.5, 7], str(tmp_path))
    names = {f"pred_{kind}_7_{i}.npy" for kind in ("liver", "lesion") for i in range(4)}
    assert set(os.listdir(tmp_path)) == names | {"label_7_0.npy", "label_7_1.npy"}
    found = np.load(tmp_path / "pred_lesion_7_3.npy")
    assert found.dtype == np.float32 and found.shape == (6, 8, 5)
    np.testing.assert_allclose(found[3:, :4], volumes[1][1, 1, 0], rtol=1e-6)
    scores = processor.finish()
    np.testing.assert_allclose(scores["lesion_dice_global"], 2 * 23 / 204, rtol=1e-6)
    np.testing.assert_allclose(
        scores["lesion_dice_per_case"], np.mean([40 / 146, 2 / 50, 4 / 8, 0]), rtol=1e-6
    )
    with pytest.raises(ValueError, match="no results were recorded"):
        processor.finish()


# -- the program of a TPU, on eight CPU replicas of XLA


class TpuStep:
    """A training step, as a function for xla_cpu_replicas.Program."""

    def __init__(self, layout, assignment):
        self.layout, self.assignment = layout, assignment
        self.names, self.lowering = [], None

    def __call__(self, *_):
        tf.set_random_seed(11)
        results, self.lowering = step(
            lambda: SimdMeshImpl(
                "rows:2,columns:2,cores:2", self.layout, device_assignment=self.assignment
            )
        )
        self.names = list(results)
        return list(results.values())

    def start(self):
        return [tf.global_variables_initializer(), self.lowering.copy_masters_to_slices()]


@pytest.mark.slow
def test_split_over_cores_of_a_tpu():
    pytest.importorskip("jax")
    cores = np.array(list(np.ndindex(2, 2, 1, 2)))
    topology = tf.tpu.experimental.Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=cores[None])
    assignment = tf.tpu.experimental.DeviceAssignment(topology, cores[:, None])
    tpu_step = TpuStep("batch:cores,image_nx_block:rows,image_ny_block:columns", assignment)
    program = xla_cpu_replicas.Program(
        tpu_step, [[np.float32(0)]] * 8, device_assignment=assignment, start=tpu_step.start
    )
    [results] = xla_cpu_replicas.run([program])
    expected = values(lambda: step(lambda: PlacementMeshImpl("all:1", "", [""]))[0])
    for own in results:
        assert_same(dict(zip(tpu_step.names, own)), expected)
