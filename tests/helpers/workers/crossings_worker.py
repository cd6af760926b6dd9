"""A script for mesh_tensorflow.launch: cells of the table of crossings in two processes.

    crossings_worker.py FOLDER FRONT_END FEATURE...

Each process writes what it found to FOLDER/found-INDEX, a pickle: an Outcome or the text of an error by
the name of a feature.
"""

import pickle
import sys
import traceback

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.crossings import front_ends, table
from helpers.crossings.feature import BATCH, STEPS, WIDTH, Outcome, built
from helpers.crossings.features import FEATURES
from mesh_tensorflow import launch
from mesh_tensorflow.simd_mesh_impl import replicate
from mesh_tensorflow.testing.harness import WHOLE

PER_PROCESS = 2


def session_on(server):
    """Returns the front end "session" in the session of a server."""
    mine = launch.processes()

    def trained(feature, placing, directory, steps):
        placing, lowerings = feature.placed(placing), []

        def program(data):
            results, lowering = built(feature, placing, data, counted)
            lowerings.append(lowering)
            return {**results, **dict(tf.get_collection_ref(front_ends.SUMMARIES))}

        container = f"{feature.name.replace(' ', '_')}_{steps}"
        with tf.Graph().as_default() as graph, graph.container(container):
            tf.set_random_seed(front_ends.SEED)
            counted = tf.train.get_or_create_global_step()
            data = tf.placeholder(tf.float32, [BATCH.size, WIDTH.size])
            results = replicate(
                program,
                [data],
                devices=mine.devices(per_process=PER_PROCESS),
                local=mine.local(PER_PROCESS),
            )
            with tf.control_dependencies([results["done"]]):
                results["step"] = counted.assign_add(1)
            saver, path = mtf.checkpoint.Saver(), tf.train.latest_checkpoint(directory)
            with tf.Session(server.target, config=mine.config(PER_PROCESS)) as session:
                mine.initialize(session, path)
                losses = []
                for x in front_ends._batches(0 if path is None else 1, steps):
                    recorded = mine.run(session, results, {data: x})
                    losses.append(float(recorded.pop("loss")))
                names = {v.op.name: v for v in tf.global_variables() if v is not counted}
                values = session.run(names)
                if mine.is_chief:
                    saver.save(session, f"{directory}/model", global_step=steps)
        summaries = {n: float(v) for n, v in recorded.items() if n not in ("done", "step")}
        return Outcome(losses, values, summaries=summaries)

    return trained


def found_for(name, trained, placing, folder):
    """Returns the Outcome of a feature, or the text of its error."""
    feature = FEATURES[name]
    directory = f"{folder}/{list(FEATURES).index(name)}"
    first = []
    with feature.around(), table._stderr() as written:
        try:
            if feature.begins:  # each process reads what each has written
                directory = f"{directory}-{launch.processes().index}"
                first = front_ends.session(feature, WHOLE, directory, 1).losses
            found = trained(feature, placing, directory, STEPS)
            if launch.processes().is_chief:
                table.check_saved(directory, found)
            found.losses, found.printed = first + found.losses, written()
            return found
        except Exception:
            return traceback.format_exc()


def main(folder, front_end, *names):
    mine = launch.processes()
    placing, trained = table.MESHES["SIMD"], front_ends.FRONT_ENDS[front_end]
    server = None
    if front_end == "session":
        server = mine.start_server(PER_PROCESS)
        trained = session_on(server)
    elif front_end == "pjrt.function":
        placing = table.MESHES["pjrt"]
    found = {name: found_for(name, trained, placing, folder) for name in names}
    with open(f"{folder}/found-{mine.index}", "wb") as file:
        pickle.dump(found, file)
    if server is not None:
        mine.finish(server)


if __name__ == "__main__":
    main(*sys.argv[1:])
