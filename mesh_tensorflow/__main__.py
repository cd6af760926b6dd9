"""`python -m mesh_tensorflow` lists the programs of the package; installed commands run them."""

from __future__ import annotations

import os
import runpy
import sys

__all__ = ["PROGRAMS", "main", "run_command"]

# By name after `python -m mesh_tensorflow.`: the installed command, and what it does.
PROGRAMS = {
    "auto_mtf": ("mtf-auto", "chooses the layout of a program, and says why"),
    "auto_mtf.measure": ("mtf-measure", "measures this machine for auto_mtf"),
    "bert.run_classifier": ("", "fine-tunes BERT to classify sentences or sentence pairs"),
    "bert.run_pretraining": ("", "pre-trains BERT"),
    "bert.run_squad": ("", "fine-tunes BERT to answer questions about texts"),
    "experimental.model_executor": ("", "trains and evaluates a U-Net of scans"),
    "experimental.offline_data_aug": ("", "augments scans once, before training"),
    "finetune": ("mtf-finetune", "fine-tunes a language model on texts, split over a mesh"),
    "generate": ("mtf-generate", "continues texts by a language model, split over a mesh"),
    "launch": ("mtf-launch", "starts several processes of a script on this machine"),
    "report": ("mtf-report", "writes a report of a transformer on a mesh, which is not trained"),
    "testing.conformance": ("", "checks a mesh implementation of one's own"),
    "transformer.convert": ("mtf-convert", "converts T5's weights to and from Hugging Face's"),
    "transformer.main": ("mtf-train", "trains, evaluates, decodes or exports a transformer"),
}


def run_command() -> None:
    """Runs the program whose installed command the process is, as `python -m` does."""
    command = os.path.basename(sys.argv[0]).removesuffix(".exe")
    # As `python -m` does, so that it finds what --model=module:function and the like name.
    if not getattr(sys.flags, "safe_path", False):  # of Python 3.11
        sys.path.insert(0, os.getcwd())
    [name] = [name for name, (installed, _) in PROGRAMS.items() if installed == command]
    runpy.run_module(f"mesh_tensorflow.{name}", run_name="__main__", alter_sys=True)


def main() -> None:
    """Lists the programs."""
    print("Programs: python -m mesh_tensorflow.NAME, or a command. Each has --help.\n")
    for name, (command, text) in PROGRAMS.items():
        print(f"  {name:31}{command:13}{text}")


if __name__ == "__main__":
    main()
