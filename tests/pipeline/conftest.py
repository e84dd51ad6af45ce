from pathlib import Path

import pytest

from data_module.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def exported_search(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `model.pt2` of `stops_at_first` that returns two answers, of two loops: writing each takes long."""
    from pipeline.export import exported_program
    from tests.pipeline.test_export import stops_at_first

    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exported_program, "STAGES", (2,))
        exported_program.write_exported_program(stops_at_first(tokenizer), 2, '{"name": "letters"}', path)
    return path
