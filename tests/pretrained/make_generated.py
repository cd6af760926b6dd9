"""Writes what Hugging Face's transformers generates with the models of fixtures/ to generated.json.

    pip install torch transformers
    python tests/pretrained/make_generated.py

`test_generate.py` compares with it; it needs neither torch nor transformers.
"""

import itertools
import json
import pathlib

import torch
import transformers

FOLDER = pathlib.Path(__file__).parent
PROMPTS = [[5, 9, 0, 33], [7], [1, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89]]
NEW = 12
# What changes the distribution of the next id.
DISTRIBUTIONS = [
    {"top_p": 0.5}, {"top_p": 0.9, "temperature": 2.0}, {"top_p": 0.01}, {"min_p": 0.2},
    {"min_p": 0.05, "temperature": 3.0}, {"top_k": 7, "top_p": 0.8, "temperature": 1.5},
    {"top_k": 9, "min_p": 0.1, "temperature": 2.0}, {"top_p": 0.9, "min_p": 0.03, "temperature": 4.0},
    {"repetition_penalty": 1.8, "temperature": 2.0},
    {"repetition_penalty": 0.6, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 3.0},
]  # fmt: skip
PENALTIES = [1.3, 2.0, 0.8]
MODELS = ["llama", "llama_one", "mistral", "qwen3"]
BEAMS = [
    {"num_beams": n, "length_penalty": penalty, "early_stopping": early, "ends": ends}
    for n, penalty, early, ends in itertools.chain(
        itertools.product([2, 4], [1.0], [False], [0, 1, 3]),
        itertools.product([3], [0.0, 2.5, -1.0], [False], [2]),
        itertools.product([3], [1.0, -1.0], [True], [2, 5]),
    )
]
# Searches with penalties, and with so many ids and texts (of one id or two) that end rows.
OTHER_BEAMS = [
    {"num_beams": n, "repetition_penalty": penalty, "length_penalty": 1.0, "ends": ends, "texts": texts}
    for n, penalty, ends, texts in [
        (2, 1.3, 0, 0), (4, 2.0, 1, 0), (3, 0.8, 2, 0), (2, 1.0, 0, 1), (4, 1.0, 1, 2), (3, 1.5, 0, 3),
    ]
]  # fmt: skip


class Texts(transformers.StoppingCriteria):
    """Ends rows whose new ids end with those of a text."""

    def __init__(self, texts, begin):
        self._texts, self._begin = texts, begin

    def __call__(self, input_ids, scores, **kwargs):
        """Returns which rows end."""
        rows = input_ids[:, self._begin :].tolist()
        return torch.tensor([any(row[-len(t) :] == t for t in self._texts) for row in rows])


def up_to_a_text(row, texts):
    """Returns ids up to the first that completes a text; shorter rows are filled up behind it."""
    lengths = (n for n in range(1, len(row)) if any(row[:n][-len(t) :] == t for t in texts))
    return row[: next(lengths, len(row))]


def main():
    found = {}
    for name in MODELS:
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / "fixtures" / name).eval()

        def generate(prompt, model=model, **kwargs):
            kwargs = {"max_new_tokens": NEW, "pad_token_id": 0, "top_k": 0, **kwargs}
            with torch.no_grad():
                return model.generate(
                    torch.tensor([prompt]), attention_mask=torch.ones([1, len(prompt)], dtype=int),
                    return_dict_in_generate=True, output_scores=True, **kwargs,
                )  # fmt: skip

        def new(rows, prompt, ends):
            rows = [row[len(prompt) :] for row in rows.tolist()]
            cuts = [next((i for i, x in enumerate(r) if x in ends), len(r)) for r in rows]
            return [row[: cut + 1] for row, cut in zip(rows, cuts)]

        distributions = [
            [generate(p, do_sample=True, max_new_tokens=1, **d).scores[0][0].softmax(-1).tolist() for p in PROMPTS]
            for d in DISTRIBUTIONS
        ]  # fmt: skip
        penalized = [
            [new(generate(p, do_sample=False, repetition_penalty=x).sequences, p, [2])[0] for p in PROMPTS]
            for x in PENALTIES
        ]  # fmt: skip
        greedy = [new(generate(p, do_sample=False, eos_token_id=None).sequences, p, [])[0] for p in PROMPTS]  # fmt: skip
        # The ids that are the likeliest to come, in some row and at some place.
        likely = [greedy[0][2], greedy[1][4], greedy[2][1], greedy[0][7], greedy[2][6]]
        beams = []
        for case in BEAMS:
            case = dict(case)
            ends = likely[: case.pop("ends")]
            rows = []
            for p in PROMPTS:
                out = generate(
                    p, do_sample=False, num_return_sequences=case["num_beams"],
                    eos_token_id=ends or None, **case,
                )  # fmt: skip
                scores = out.sequences_scores.tolist()
                rows.append({"ids": new(out.sequences, p, ends), "scores": scores})
            beams.append({**case, "ends": ends, "found": rows})
            print(name, case, ends, [[len(x) for x in r["ids"]] for r in rows])
        # Those of two are what follows each other somewhere.
        pairs = [[greedy[0][2]], greedy[1][3:5], greedy[2][5:7]]
        others = []
        for case in OTHER_BEAMS:
            case = dict(case)
            ends, texts = likely[: case.pop("ends")], pairs[: case.pop("texts")]
            rows = []
            for p in PROMPTS:
                out = generate(
                    p, do_sample=False, num_return_sequences=case["num_beams"], eos_token_id=ends or None,
                    stopping_criteria=[Texts(texts, len(p))], **case,
                )  # fmt: skip
                new_ids = [up_to_a_text(row, texts) for row in new(out.sequences, p, ends)]
                rows.append({"ids": new_ids, "scores": out.sequences_scores.tolist()})
            others.append({**case, "ends": ends, "texts": texts, "found": rows})
            print(name, case, ends, texts, [[len(x) for x in r["ids"]] for r in rows])
        found[name] = {
            "distributions": distributions, "penalized": penalized, "beams": beams, "other_beams": others,
        }  # fmt: skip
    whole = {
        "prompts": PROMPTS, "new": NEW, "distributions": DISTRIBUTIONS, "penalties": PENALTIES,
        "models": found,
    }  # fmt: skip
    rounded = json.loads(json.dumps(whole), parse_float=lambda x: round(float(x), 7))
    (FOLDER / "generated.json").write_text(json.dumps(rounded, separators=(",", ":")))


if __name__ == "__main__":
    main()
