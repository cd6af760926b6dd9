import json, os, sys, traceback, time
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)
import oracle_runner as runner
from oracle_table import FAMILIES
F = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures")
wanted = [a for a in sys.argv[1:] if not a.startswith("-")]
names = "-n" in sys.argv
for family, programs in FAMILIES.items():
    if not os.path.exists(f"{F}/{family}.npz"): continue
    arrays = np.load(f"{F}/{family}.npz")
    facts = json.load(open(f"{F}/{family}.json"))
    for name, program in programs.items():
        if wanted and family not in wanted and name not in wanted: continue
        if name not in facts: continue
        f = facts[name]
        exp = {k.split(":",1)[1]: arrays[k] for k in arrays.files if k.split(":",1)[0]==name}
        for mesh, layout in [("", "")] + [(runner.MESH, l) for l in program.layouts]:
            tag = f"{family}.{name}[{mesh and layout or ('replicated' if mesh else '1')}]"
            theirs = f if not mesh else f["layouts"][layout]
            try:
                vals, mine = runner.run(name, program, mesh, layout)
            except Exception as e:
                if theirs.get("error") != type(e).__name__:
                    print(tag, "OURS RAISES", type(e).__name__, str(e)[:300], "| classic:", theirs.get("error"))
                    if "-v" in sys.argv: traceback.print_exc()
                continue
            if "error" in theirs:
                print(tag, "classic raises", theirs["error"], theirs["message"], "ours works")
            if set(vals) != set(exp): print(tag, "KEYS", sorted(set(vals) ^ set(exp)))
            for k in sorted(set(vals) & set(exp)):
                a, b = exp[k], vals[k]
                if a.shape != b.shape or a.dtype != b.dtype: print(tag, "SHAPE/DTYPE", k, a.shape, a.dtype, b.shape, b.dtype); continue
                if not a.size: continue
                d = np.abs(a.astype("f8") - b.astype("f8")).max() / max(np.abs(a.astype("f8")).max(), 1e-30)
                if not d <= program.tolerance: print(tag, "VALUE", k, d)
            if not mesh and "outputs" in f:
                for k in f["outputs"]:
                    if f["outputs"][k] != mine["outputs"].get(k): print(tag, "OUTPUT", k, "classic", f["outputs"][k], "ours", mine["outputs"].get(k))
                if names:
                    for k, v in f["names"].items():
                        if mine["names"].get(k) != v: print(tag, "NAME", k, v, mine["names"].get(k))
            if "variables" in theirs and theirs["variables"] != mine["variables"]: print(tag, "VARS", theirs["variables"], mine["variables"])
            if names and "counters" in theirs and theirs["counters"] != mine["counters"]:
                a, b = theirs["counters"], mine["counters"]
                print(tag, "COUNTERS", {k: (a.get(k), b.get(k)) for k in sorted(set(a)|set(b)) if a.get(k) != b.get(k)})
