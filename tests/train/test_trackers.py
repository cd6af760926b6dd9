"""Callbacks for services that show runs, and the norms that a run reports."""

import json
import struct
import sys

import numpy as np
import pytest
from helpers.train import linear

import mesh_tensorflow as mtf

SMALL = {name: array[:4] for name, array in linear.DATA.items()}


@pytest.mark.parametrize("name", ["WandB", "MLflow"])
@pytest.mark.parametrize("there", [False, True], ids=["nothing", "a folder"])
def test_without_its_package(name, there, tmp_path, monkeypatch):
    """A folder of the package's name, such as W&B writes, is not the package."""
    package = name.lower()
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    path = [str(tmp_path)] if there else []
    (tmp_path / package).mkdir()
    monkeypatch.setattr(sys, "path", path)
    with pytest.raises(
        ImportError,
        match=rf"mtf.train.{name} needs the package {package}, which is not installed: "
        f"pip install {package}",
    ):
        getattr(mtf.train, name)("project")
    sys.modules.pop(package, None)


class Failing(mtf.train.Callback):
    def on_log(self, run, values):
        if run.step == 3:
            raise RuntimeError("on purpose")


def train(steps, tracker, directory, *others, **arguments):
    return linear.fit(
        steps,
        callbacks=[tracker, *others],
        directory=str(directory),
        save_every=2,
        eval_data=SMALL,
        eval_every=2,
        mesh_shape="rows:2",
        layout="batch:rows",
        **arguments,
    )


def wandb_records(folder):
    """Returns what the files of an offline run hold: (kind, record).

    They are logs of LevelDB behind a header: pieces of records in blocks, each with its length.
    """
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(folder.rglob("run-*.wandb")):
        data, at, whole = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 2**15 - at % 2**15 < 7:  # no room for a header
                at += 2**15 - at % 2**15
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a whole record, or its last piece
                record = wandb_internal_pb2.Record.FromString(whole)
                found.append((record.WhichOneof("record_type"), record))
                whole = b""
    return found


@pytest.mark.slow
def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def tracker():
        return mtf.train.WandB(
            "lines", {"inputs": 6}, mode="offline", dir=str(tmp_path), name="first"
        )

    model = tmp_path / "model"
    with pytest.raises(RuntimeError, match="on purpose"):
        train(4, tracker(), model, Failing())
    first = json.loads((model / "wandb_run.json").read_text())["id"]
    result = train(5, tracker(), model)  # from the checkpoint of step 2
    records = wandb_records(tmp_path)
    assert {r.run.run_id for kind, r in records if kind == "run"} == {first}
    assert [r.exit.exit_code for kind, r in records if kind == "exit"] == [1, 0]
    [project] = {r.run.project for kind, r in records if kind == "run"}
    assert project == "lines"
    logged = []
    for kind, record in records:
        if kind == "history":
            items = {
                i.key or "/".join(i.nested_key): json.loads(i.value_json)
                for i in record.history.item
            }
            logged.append((items["step"], {n for n in items if not n.startswith("_")} - {"step"}))
            if items["step"] == 5 and "train/loss" in items:
                assert items["train/loss"] == pytest.approx(result.losses[-1])
    steps = [(step, "train/loss" in names, "eval/loss" in names) for step, names in logged]
    assert steps == [
        (1, True, False), (2, True, False), (2, False, True), (3, True, False),
        (3, True, False), (4, True, False), (4, False, True), (5, True, False), (5, False, True),
    ]  # fmt: skip
    config = {}
    for kind, record in records:
        source = record.config if kind == "config" else record.run.config
        for item in source.update:
            config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    assert {"steps": 5, "inputs": 6, "layout": "batch:rows"}.items() <= config.items()
    assert config["optimizer"] == "MomentumOptimizer"
    # A run that the program begins is used, and left open.
    with wandb.init(mode="offline", dir=str(tmp_path), project="own") as own:
        train(2, mtf.train.WandB(), tmp_path / "other")
        assert wandb.run is own and own.summary["step"] == 2
        assert json.loads((tmp_path / "other" / "wandb_run.json").read_text())["id"] == own.id


@pytest.mark.slow
def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    model, uri = tmp_path / "model", (tmp_path / "runs").as_uri()

    def tracker(**arguments):
        return mtf.train.MLflow("lines", {"inputs": 6}, uri, run_name="first", **arguments)

    def model_fn(mesh, features, training):
        found = linear.model_fn(mesh, features, training)
        return {**found, "error (mean)": found["error"]}

    with pytest.raises(RuntimeError, match="on purpose"):
        train(4, tracker(), model, Failing(), model_fn=model_fn)
    first = json.loads((model / "mlflow_run.json").read_text())["id"]
    client = mlflow.MlflowClient(uri)
    assert client.get_run(first).info.status == "FAILED" and mlflow.active_run() is None
    result = train(5, tracker(tags={"kind": "again"}), model, model_fn=model_fn)
    run = client.get_run(first)
    assert run.info.status == "FINISHED" and run.info.run_name == "first"
    [experiment] = {client.get_experiment(run.info.experiment_id).name}
    assert experiment == "lines" and len(client.search_runs([run.info.experiment_id])) == 1
    losses = [(m.step, m.value) for m in client.get_metric_history(first, "train/loss")]
    assert sorted(step for step, _ in losses) == [1, 2, 3, 3, 4, 5]
    assert dict(losses)[5] == pytest.approx(result.losses[-1])
    assert {m.step for m in client.get_metric_history(first, "eval/error _mean_")} == {2, 4, 5}
    params = {"steps": "4", "inputs": "6", "layout": "batch:rows", "optimizer": "MomentumOptimizer"}
    assert params.items() <= run.data.params.items()
    assert run.data.tags["steps from step 2"] == "5" and run.data.tags["kind"] == "again"
    # A run that the program begins is used, and left open.
    with mlflow.start_run() as own:
        train(2, mtf.train.MLflow(), tmp_path / "other", mtf.train.EarlyStopping(patience=1))
        assert mlflow.active_run().info.run_id == own.info.run_id
    assert "train/loss" in client.get_run(own.info.run_id).data.metrics
    elsewhere = mtf.train.MLflow("lines", tracking_uri=(tmp_path / "others").as_uri())
    with pytest.raises(ValueError, match=rf"in the run {first}, which cannot be resumed at file:"):
        train(6, elsewhere, model, model_fn=model_fn)


LAYOUTS = [
    {"mesh_shape": "rows:2", "layout": "batch:rows"},
    {"mesh_shape": "rows:2", "layout": "batch:rows", "zero": 3, "zero_axis": "rows"},
    {"mesh_shape": "rows:2", "layout": "in:rows", "simd": True},
]


@pytest.mark.parametrize(
    "placing", [LAYOUTS[0], *(pytest.param(p, marks=pytest.mark.slow) for p in LAYOUTS[1:])]
)
def test_norms(placing):
    """They are those of whole variables, of the weights before the step."""
    seen = {}

    class Weights(mtf.train.Callback):
        def on_step(self, run, values):
            seen[run.step] = (run.variables(), values)

    rate = 0.125
    arguments = {"optimizer": mtf.optimize.SgdOptimizer(rate), "norms": True, **placing}
    result = linear.fit(3, callbacks=[Weights()], **arguments)
    names = ["linear/kernel", "linear/bias"]

    def norm(arrays):
        return np.sqrt(sum(np.square(a.astype(np.float64)).sum() for a in arrays))

    for step in (2, 3):
        before, after = seen[step - 1][0], seen[step][0]
        values = seen[step][1]
        assert values["weight_norm"] == pytest.approx(norm(before[n] for n in names), rel=1e-5)
        gradients = [(before[n] - after[n]) / rate for n in names]
        assert values["gradient_norm"] == pytest.approx(norm(gradients), rel=1e-4)
    clipped = linear.fit(3, **{**arguments, "clip_norm": 1e-3})
    assert clipped.history[0]["gradient_norm"] == result.history[0]["gradient_norm"]
    assert clipped.history[0]["weight_norm"] == result.history[0]["weight_norm"]
    assert "weight_norm" not in linear.fit(1, **{**arguments, "norms": False}).history[0]
