"""One of three processes that initialize a variable; the last one is lost before it comes there."""

import json
import os
import signal
import time

import tensorflow.compat.v1 as tf

from mesh_tensorflow import launch


def run(addresses, index, log):
    """Writes the error that `initialize` raises to a file."""
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )
    tf.disable_v2_behavior()
    mine = launch.processes()
    server = mine.start_server()
    if index == len(addresses) - 1:
        time.sleep(2)  # until the others have seen that it is there
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(4)
    with tf.Graph().as_default():
        with tf.device(f"/job:worker/task:{index}"):
            tf.get_variable("v", [2])
        with tf.Session(server.target, config=mine.config()) as session:
            try:
                mine.initialize(session)
            except Exception as error:
                with open(log, "w") as f:
                    f.write(f"{type(error).__name__}: {error}")
