"""Tiles, pictures and reports: who holds what, numbers, and pages that need no other file."""

import html.parser
import itertools
import re
import sys
import xml.etree.ElementTree

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import _figure
from mesh_tensorflow import _units as units
from mesh_tensorflow.auto_mtf import models

TINY = {
    "batch": 8, "length": 8, "vocab": 16, "d_model": 16, "layers": 2, "heads": 4, "d_kv": 4,
    "d_ff": 32,
}  # fmt: skip
LAYOUT = "batch:rows,d_ff:cols,heads:cols,vocab:cols"
MESHES = [
    ("rows:2,cols:2", "a:rows,b:cols", "a:4,b:6"),
    ("rows:2,cols:2", "b:rows", "a:4,b:6"),
    ("rows:2,cols:2", "a:cols+rows", "a:4,b:6"),
    ("x:2,y:3,z:4", "a:z+x,b:y", "a:16,b:6"),
    ("x:2,y:3,z:4", "a:x,b:y,c:z", "a:4,b:6,c:8"),
    ("x:2,y:3,z:4", "c:y", "a:4,b:2,c:9"),
    ("all:8", "a:all", "a:16"),
    ("rows:2,one:1", "a:one", "a:4"),
    ("", "", "a:4,b:2"),
    ("all:2", "", ""),
]


def impl_of(shape, layout):
    size = mtf.convert_to_shape(shape).size
    return mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, ["cpu:0"] * size)


@pytest.mark.parametrize("mesh, layout, shape", MESHES)
def test_tiles_are_the_slices_of_a_mesh(mesh, layout, shape):
    impl, shape = impl_of(mesh, layout), mtf.convert_to_shape(shape)
    sharding = mtf.visualize.visualize_sharding(shape, impl)
    assert sorted(p for tile in sharding.tiles for p in tile.processors) == [*range(impl.size)]
    covered = np.zeros(shape.to_integer_list, int)
    for tile in sharding.tiles:
        assert len(tile.processors) == sharding.copies
        covered[tuple(slice(b, e) for b, e in zip(tile.begin, tile.end))] += 1
        for p in tile.processors:
            assert list(tile.begin) == impl.slice_begin(shape, p)
            assert sharding.tile_of(p) == tile
    assert (covered == 1).all()
    # Each tile has a cell in the text, and a cell and its processors in the picture.
    text = sharding.text()
    assert text.count("│") >= len(sharding.tiles) + 1 and "\x1b" not in text
    assert sharding.text(color=True).count("\x1b[48;2;") == len(sharding.tiles)


def test_text_of_tiles():
    impl = impl_of("rows:2,cols:4", "batch:rows,d_ff:cols")
    found = mtf.visualize.visualize_sharding("batch:8,d_ff:16,length:3", impl)
    assert (
        repr(found)
        == """\
[batch=8, d_ff=16, length=3] on the mesh rows=2, cols=4: 8 processors
batch over rows in 2 parts of 4, d_ff over cols in 4 parts of 4; each processor holds [4, 4, 3]; \
no copies

batch ↓, d_ff →
        0:4     4:8     8:12   12:16
     ┌───────┬───────┬───────┬───────┐
 0:4 │   0   │   1   │   2   │   3   │
     ├───────┼───────┼───────┼───────┤
 4:8 │   4   │   5   │   6   │   7   │
     └───────┴───────┴───────┴───────┘"""
    )
    turned = mtf.visualize.visualize_sharding("batch:8,d_ff:16,length:3", impl, dims=["length"])
    assert "batch 0:4, d_ff 4:8:" in repr(turned) and "0:3" in repr(turned)


def test_many_tiles_are_left_out():
    impl = mtf.MeshImpl("rows:32,cols:16", "a:rows,b:cols")
    found = mtf.visualize.visualize_sharding("a:64,b:64", impl)
    lines = found.text().splitlines()
    assert len(lines) < 40 and max(map(len, lines)) < 120 and "..." in found.text()
    three = mtf.visualize.visualize_sharding(
        "a:4,b:4,c:16", mtf.MeshImpl("x:2,y:2,z:16", "a:x,b:y,c:z")
    )
    assert "and 8 more tables like these" in three.text()


def test_variables_and_tensors_have_names_and_bytes(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    value = mtf.get_variable(mesh, "w", mtf.Shape([("a", 4), ("b", 6)]), tf.bfloat16)
    impl = impl_of("rows:2", "a:rows")
    for x in (value, value.operation):
        found = mtf.visualize.visualize_sharding(x, impl)
        assert found.name == "w" and found.bytes_per_processor == 2 * 6 * 2
    assert mtf.visualize.visualize_sharding(mtf.relu(value), impl).name == "relu:0"


SVG = "{http://www.w3.org/2000/svg}"


def titled(svg):
    """Returns pairs (text that is shown on hover, color) of a picture."""
    found = []
    for group in xml.etree.ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, path = group.find(f"{SVG}title"), group.find(f"{SVG}path")
        if title is not None and path is not None:
            found.append((title.text, re.search("fill: (#[0-9a-f]+)", path.get("style"))[1]))
    return found


@pytest.mark.parametrize("mesh, layout, shape", MESHES)
def test_picture_of_tiles(tmp_path, mesh, layout, shape):
    sharding = mtf.visualize.visualize_sharding(shape, impl_of(mesh, layout))
    path = tmp_path / "tiles.svg"
    sharding.save(path)
    holders = {}
    for text, color in titled(path.read_text(encoding="utf-8")):
        match = re.match(r"processor (\d+): ", text)
        if match:
            holders.setdefault(color, set()).add(int(match[1]))
    # Processors that hold copies of a tile are of one color, and no others are.
    assert sorted(map(sorted, holders.values())) == sorted(
        sorted(tile.processors) for tile in sharding.tiles
    )


def extents(picture):
    """Returns (text, left, right, bottom, top) of each text of a picture, in pixels."""
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    renderer = agg.FigureCanvasAgg(picture.figure).get_renderer()
    picture.figure.draw(renderer)
    found = []
    for text in picture.figure.findobj(lambda artist: hasattr(artist, "get_text")):
        if text.get_text() and text.get_visible():
            box = text.get_window_extent(renderer)
            found.append((text.get_text(), box.x0, box.x1, box.y0, box.y1))
    return found


LABELS = [
    ("rows:2,cols:4", "batch:rows,vocab:cols", "outer_batch:1,batch:8,length:512,vocab:32128"),
    ("rows:2,cols:4", "vocab:cols", "vocab:32128,d_model:1024"),
    ("rows:2,cols:4", "a_long_name_of_a_dimension:cols", "a_long_name_of_a_dimension:400,d:123456"),
    ("x:8,y:8", "vocab:x,d_model:y", "vocab:32768,d_model:65536"),
]


@pytest.mark.parametrize("mesh, layout, shape", [*MESHES, *LABELS])
def test_labels_do_not_overlap(mesh, layout, shape):
    sharding = mtf.visualize.visualize_sharding(shape, impl_of(mesh, layout))
    for a, b in itertools.combinations(extents(sharding.picture()), 2):
        apart = a[2] <= b[1] or b[2] <= a[1] or a[4] <= b[3] or b[4] <= a[3]
        assert apart, (a, b)


def test_names_in_charts_stay_different():
    names = [f"decoder/block_{i:03}/layer_001/SelfAttention/combined/wi/kernel" for i in range(12)]
    rows = {name: {"a": 1.0} for name in names}
    chart = _figure.bars("title", rows, ["a"], "of a step")
    shown = [text for text, *_ in extents(chart) if "…" in text]
    assert len(set(shown)) == len(names)


def test_other_kinds_of_files(tmp_path, monkeypatch):
    sharding = mtf.visualize.visualize_sharding("a:4", impl_of("all:2", "a:all"))
    with pytest.raises(ValueError, match=r"pictures are written to files that end in .svg, .png"):
        sharding.save(tmp_path / "x.jpg")
    monkeypatch.setattr(_figure.Picture, "svg", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sharding.save(tmp_path / "y.svg")
    assert not (tmp_path / "y.svg").exists()


@pytest.mark.parametrize("package", ["matplotlib.figure", "jinja2"])
def test_missing_packages(package, tmp_path, monkeypatch, tf_graph):
    monkeypatch.setitem(sys.modules, package, None)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mtf.get_variable(mesh, "w", mtf.Shape([("a", 4)]))
    with pytest.raises(ImportError, match="pip install matplotlib jinja2"):
        mtf.visualize.report(mesh.graph, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    sharding = mtf.visualize.visualize_sharding("a:4", impl_of("all:2", "a:all"))
    assert "0:2" in sharding.text()
    if package != "jinja2":
        with pytest.raises(ImportError, match="pip install matplotlib jinja2"):
            sharding.save(tmp_path / "x.svg")


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    mtf.visualize.visualize_sharding("a:4", impl_of("all:2", "a:all")).save(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_bars_are_as_long_as_their_numbers():
    rows = {"one": {"a": 3000.0, "b": 1000.0}, "two": {"b": 2000.0}}
    chart = _figure.bars("title", rows, ["a", "b"], "of a step")
    bars = chart.figure.axes[0].patches
    hover = {chart.titles[bar.get_gid()]: bar.get_width() for bar in bars}
    assert hover["one, a: 2.93 KiB"] == pytest.approx(3 * hover["one, b: 1,000 B"])
    assert hover["two, b: 1.95 KiB"] == pytest.approx(2 * hover["one, b: 1,000 B"])
    assert "KiB of a step" in [text for text, *_ in extents(chart)]


# -- reports


class Page(html.parser.HTMLParser):
    """What a page refers to, its text, and the cells of its tables."""

    def __init__(self, text):
        super().__init__()
        self.outside, self.words, self.open = [], [], []
        self.feed(text.replace("<wbr>", ""))
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "img", "br", "input"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "data", "xlink:href") and value[:1] != "#":
                self.outside.append((tag, name, value))
        assert tag not in ("script", "link", "img", "iframe")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.slow
def test_report(tf_graph, tmp_path):
    made = models.language_model(**TINY)
    impl = impl_of("rows:2,cols:2", LAYOUT)
    path = tmp_path / "report.html"
    mtf.visualize.report(made.graph, path, impl, made.outputs, title="A <small> model")
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open and not page.outside and "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    words = page.words
    assert "A <small> model" in words
    summary = mtf.summary(made.graph, impl)
    found = mtf.visualize.communication(made.graph, impl, made.outputs)
    memory = mtf.visualize.memory(made.graph, impl, made.outputs)
    assert units.bytes_text(summary.bytes_per_processor()) in words
    assert units.bytes_text(found.bytes_per_processor) in words
    assert units.bytes_text(memory.peak_bytes) in words
    assert all(row.name in words for row in summary.rows)
    assert all(layer in words for layer in found.by_layer())
    assert sum(memory.at_peak.values()) == memory.peak_bytes
    chosen = "batch:rows;d_ff:cols;heads:cols;vocab:cols"
    assert any(word.startswith(f"layout  {chosen}") for word in words)
    assert text.count("<svg") == 8  # tiles of six tensors, communication, memory
    # What is long is folded; the sums, and the largest variables, are not.
    folded = re.findall(r"<summary>(.*?)</summary>", text)
    weights = summary.of_kind("weights")
    assert f"all {len(weights)} trainable" in folded and "times of all layers" in folded
    large = sorted(weights, key=lambda row: -row.parameters)[0].name
    assert large in Page(text.split("<details>")[0] + "</section></body></html>").words
    # In words of the running program: what was lowered is described as what was built.
    lowering = mtf.Lowering(made.graph, {made.mesh: impl})
    mtf.visualize.report(lowering, path, outputs=made.outputs, tensors=[], explain=False)
    page = Page(path.read_text(encoding="utf-8"))
    assert "No tensors." in page.words and all(row.name in page.words for row in summary.rows)


@pytest.mark.slow("rows-*", "rows+cols-2")
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("axis", ["rows", "rows+cols"])
def test_report_where_variables_are_stored_in_parts(zero, axis, tf_graph, tmp_path):
    """Estimated as they are stored, before the Lowering that cuts them; after it, it is said."""
    made = models.language_model(**TINY, optimizer="adam")
    stored = {"zero": zero, "zero_axis": axis}
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        "rows:2,cols:2", "batch:rows", [""] * 4, **stored
    )
    memory = mtf.visualize.memory(made.graph, impl, made.outputs)
    kept = mtf.summary(made.graph, impl)
    assert memory.at_peak["slots"] == kept.bytes_per_processor("slots")
    path = tmp_path / "report.html"
    mtf.visualize.report(made.graph, path, impl, made.outputs)
    assert f"stored  zero={zero} over {axis}" in path.read_text(encoding="utf-8")
    lowering = mtf.Lowering(made.graph, {made.mesh: impl})
    mtf.visualize.report(lowering, path, outputs=made.outputs)
    words = " ".join(Page(path.read_text(encoding="utf-8")).words)
    assert "Not estimated: time and memory are estimated of a program whose variables" in words
    assert units.bytes_text(kept.bytes_per_processor()) in words
    with pytest.raises(ValueError, match=r"has not yet cut in parts .*Ask before the Lowering"):
        mtf.visualize.memory(lowering)
    with pytest.raises(ValueError, match="Choose and explain layouts before the Lowering"):
        mtf.auto_mtf.explain(made.graph, "rows:2,cols:2", made.outputs)


def test_report_of_eager_code_and_of_functions(tmp_path):
    """Eager programs, and those in a mtf.function, are described as others are."""
    d, e = mtf.Dimension("d", 4), mtf.Dimension("e", 8)
    store, found = mtf.VariableStore(), []

    def program():
        with store.scope():
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            x = mtf.ones(mesh, mtf.Shape([d]))
            y = mtf.layers.dense(x, [e], reduced_dims=[d], name="layer", use_bias=False)
            loss = mtf.reduce_sum(y)
            impl = impl_of("all:2", "e:all")
            found.append(str(mtf.summary(mesh.graph, impl)))
            lowering = mtf.Lowering(mesh.graph, {mesh: impl})
            value = lowering.export_to_tf_tensor(loss)
            found.append(str(mtf.summary(lowering)))
            mtf.visualize.report(lowering, tmp_path / "r.html", explain=False)
            assert mtf.visualize.communication(lowering).bytes == 8
            return value

    import tensorflow

    assert tensorflow.executing_eagerly()
    program()
    tensorflow.function(program, autograph=False)()
    assert len(set(found)) == 1 and "layer/kernel  [d=4, e=8]  [4, 4]  e:all" in found[0]
    assert "layer/kernel" in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda impl: mtf.visualize.visualize_sharding("a:4", "all:2"),
         r"visualize_sharding: mesh_impl is a mesh implementation such as .* not 'all:2'"),
        (lambda impl: mtf.visualize.visualize_sharding("a:4", impl, dims=["b"]),
         r"dims=\['b'\] should be one or two of the dimensions a"),
        (lambda impl: mtf.visualize.visualize_sharding("a:5", impl), "not divisible"),
        (lambda impl: mtf.visualize.report(impl, "x.html"),
         "mtf.visualize.report describes a mtf.Graph or a mtf.Lowering"),
    ],
)  # fmt: skip
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call(impl_of("all:2", "a:all"))
