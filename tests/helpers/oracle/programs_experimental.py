"""U-Nets of volumes and of slices, in blocks: outputs, losses, gradients, moving averages."""

from absl import flags

from helpers.oracle.oracle_runner import array, dims, mtf, table, tf
from mesh_tensorflow.experimental import unet

EXPERIMENTAL, program = table(
    "image_nx_block:x,image_ny_block:y", "batch:x,image_nx_block:y", "image_ny_block:x",
    gradients=False, tolerance=1e-4)

SETTINGS = {
    "ct_resolution": 8, "batch_size_train": 2, "batch_size_eval": 4, "image_nx_block": 2,
    "image_ny_block": 2, "n_base_filters": 4, "network_depth": 2, "n_conv_per_block": 2,
    "dropout_keep_p": 1.0, "mtf_dtype": "float32", "with_batch_norm": True, "label_c": 3,
    "sampled_2d_slices": False, "pred_downsample": 2, "image_c": 1, "dice_epsilon": 0.1,
    "dice_loss_weight": 0.2, "xen_liver_weight": 8.0, "xen_lesion_weight": 16.0,
}


def settings(**changed):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["program"])
    for name, value in {**SETTINGS, **changed}.items():
        setattr(flags.FLAGS, name, value)


def slices(p, name, shape, classes):
    """Returns the slices of seeded numbers, or of the one-hot classes of voxels."""
    sizes = shape.to_integer_list
    if classes:
        value = tf.one_hot(array(classes, sizes[:-1], p.name, name), classes)
    else:
        value = tf.constant(array("normal", sizes, p.name, name))
    return p.impl().make_slices(value, shape)


def fill(p):
    p.fill_variables()
    for name in p.feeds:
        if name.endswith("variance"):
            p.feeds[name] = abs(p.feeds[name]) + 0.5


def network(p, dataset, **changed):
    settings(**changed)
    shapes = unet.get_input_mtf_shapes(dataset)
    images, labels = (
        slices(p, name, shape, classes)
        for name, shape, classes in zip(("images", "labels"), shapes, (0, flags.FLAGS.label_c)))
    record, loss, scores, updates = unet.unet_with_spatial_partition(
        p.mesh, p.impl(), dataset, images, labels)
    names = ["liver", "lesion", "label", "found", "total"]
    outputs = {**dict(zip(names, record)), **scores, "loss": loss}
    if dataset == "train":
        outputs.update(p.loss_gradients(loss))
        p.update_ops = updates
    fill(p)
    return outputs


@program(steps=2)
def unet_volumes(p):
    return network(p, "train")


@program(steps=2)
def unet_slices(p):
    return network(
        p, "train", sampled_2d_slices=True, network_depth=3, ct_resolution=16, pred_downsample=4,
        n_conv_per_block=1, dice_loss_weight=0.7, dice_epsilon=2.0)


@program()
def unet_without_norm(p):
    return network(
        p, "train", with_batch_norm=False, image_c=2, label_c=4, xen_liver_weight=2.0,
        pred_downsample=1)


@program()
def unet_evaluated(p):
    return network(p, "eval")


def block_input(p, spatial):
    return p.input("x", f"batch:2,image_nx_block:2,image_ny_block:2,{spatial},c:3")


@program(gradients=True)
def unet_convolution(p):
    x = block_input(p, "sx:4,sy:4,sz:6")
    kinds = mtf.VariableDType(tf.float32, tf.float32, tf.float32)
    outputs = {}
    for is_training in (True, False):
        y, updates = unet.conv_with_spatial_partition(
            x, False, *x.shape.dims[1:3], 5, 1.0, True, is_training, "o", kinds,
            f"training_{is_training}")
        assert len(updates) == 2 * is_training
        outputs[f"training_{is_training}"] = y
    fill(p)
    return outputs


@program(gradients=True)
def unet_deconvolution(p):
    kinds = mtf.VariableDType(tf.float32, tf.float32, tf.float32)
    x = block_input(p, "sx:2,sy:2,sz:3")
    volumes = unet.deconv_with_spatial_partition(
        x, False, *x.shape.dims[1:3], 4, 1.0, True, "o", kinds, "volumes")
    flat = mtf.reduce_sum(x, reduced_dim=dims("sz:3")[0])
    images = unet.deconv_with_spatial_partition(
        flat, True, *flat.shape.dims[1:3], 4, 1.0, True, "o", kinds, "images")
    fill(p)
    return {"volumes": volumes, "images": images}
