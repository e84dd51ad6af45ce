"""What is used of TensorBoard's and torch's undocumented modules: fails if one of them moves or changes."""

from pathlib import Path

from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.monitoring import log_files as events


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    records = [
        *events.file_header(first_step=1),
        events.summary_record(events.scalar_summary("train/loss", 2.5), 1),
        events.summary_record(events.image_summary("image", Image.new("RGB", (3, 2))), 2),
        events.summary_record(events.text_summary("text", "*words*"), 3),
        events.summary_record(events.layout_summary({"group": {"chart": ["Multiline", ["^train/"]]}}), 4),
        *(events.summary_record(one, 5) for one in events.hparams_summaries({"d_model": 8}, ["train/loss"])),
    ]
    path = tmp_path / f"{events.FILE_PREFIX}1.host"
    path.write_bytes(b"".join(records))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.file_version == 2.0
    [scalar], [image], [text] = read.Scalars("train/loss"), read.Images("image"), read.Tensors("text/text_summary")
    assert (scalar.step, scalar.value) == (1, 2.5)
    assert (image.step, image.width, image.height) == (2, 3, 2)
    assert (text.step, text.tensor_proto.string_val) == (3, [b"*words*"])
    assert "custom_scalars__config__" in read.Tags()["tensors"]
    assert set(read.SummaryMetadata("_hparams_/experiment").plugin_data.plugin_name) == set("hparams")
