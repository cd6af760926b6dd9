"""A TensorFlow server, one task of a cluster, that lives until its standard input closes.

Its one argument is a JSON object: "cluster" (task addresses), "task" (an index), "cpus" (logical
CPU devices) and "lifetime" (seconds after which it ends in any case).
"""

import json
import os
import sys
import threading

LEADER = "/job:worker/replica:0/task:0"


def main():
    options = json.loads(sys.argv[1])
    watchdog = threading.Timer(options["lifetime"], os._exit, [3])
    watchdog.daemon = True
    watchdog.start()

    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(device_count={"CPU": options["cpus"]})
    config.experimental.collective_group_leader = LEADER
    tf.distribute.Server(
        tf.train.ClusterSpec({"worker": options["cluster"]}),
        job_name="worker",
        task_index=options["task"],
        config=config,
    )
    print("ready", flush=True)
    sys.stdin.read()  # closes when whoever started this process ends
    os._exit(0)


if __name__ == "__main__":
    main()
