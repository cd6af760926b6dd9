"""Random programs for auto_mtf, the same in every Python; they need neither package."""

import random

SIZES = {"a": 4, "b": 8, "c": 6, "d": 16, "e": 12, "f": 2}
MESHES = ["m:4", "m:2,n:2", "m:4,n:2", "m:3", "m:1,n:4", "m:2,n:2,o:2"]
COUNT = 200


class Picker:
    """Draws by `random.random` alone, whose numbers Python promises not to change."""

    def __init__(self, seed):
        self._random = random.Random(seed).random

    def number(self, least, most):
        return least + int(self._random() * (most - least + 1))

    def one(self, values):
        return values[self.number(0, len(values) - 1)]

    def some(self, values, count):
        rest = list(values)
        return [rest.pop(self.number(0, len(rest) - 1)) for _ in range(count)]

    def happens(self, part):
        return self._random() < part


def random_program(seed):
    """Returns (operations, output names, two meshes).

    Operations are [name, input names, [[shape, dtype]], names of dimensions not to be split].
    """
    pick = Picker(seed)
    names = list(SIZES)[: pick.number(2, 6)]
    operations, tensors = [], []
    for i in range(pick.number(2, 16)):
        inputs = [pick.one(tensors) for _ in range(pick.one([0, 1, 1, 2, 2, 3]) if tensors else 0)]
        outputs = []
        for port in range(pick.one([1, 1, 1, 1, 2, 0, 3])):
            dims = pick.some(names, pick.number(0, min(3, len(names))))
            shape = ",".join(f"{d}:{SIZES[d] * pick.one([1, 1, 1, 1, 3])}" for d in dims)
            outputs.append([shape, "float32"])
            tensors.append(f"op{i}:{port}")
        present = {d.split(":")[0] for shape, _ in outputs for d in shape.split(",") if d}
        unsplittable = [n for n in sorted(present) if pick.happens(0.02)]
        operations.append([f"op{i}", inputs, outputs, unsplittable])
    part = pick.one([0, 0.1, 0.4])
    final = [t for t in tensors if pick.happens(part)]
    return operations, final, pick.some(MESHES, 2)
