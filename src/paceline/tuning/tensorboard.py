"""A search for TensorBoard's HParams page: ``tensorboard --logdir DIRECTORY``.

Each trial's run has its curves there already. What is added says which parameters it had; an event file, as
TensorBoard's own ``hparams`` plugin reads it (``tensorboard/plugins/hparams/api.proto``).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from paceline.run_directory import RunDirectory, write_atomically
from paceline.tuning.journal import Trials
from paceline.tuning.search import Search, SearchDirectory

_FILE = "events.out.tfevents.0000000000.hparams"
_ENDED_WELL = ("finished", "stopped", "goal")


def write_hparams(search: Search, directory: SearchDirectory, journal: Trials) -> None:
    """Write the search's description, and the parameters of each trial that has begun."""
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    names = [dimension.field for dimension in search.parsed_space.dimensions]
    tag = f"eval/val/{search.metric_name}"
    experiment = api_pb2.Experiment(
        description=f"paceline tune {search.options['task']}",
        hparam_infos=[api_pb2.HParamInfo(name=name) for name in names],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag))],
    )
    described = plugin_data_pb2.HParamsPluginData(experiment=experiment, version=0)
    _write(directory.tensorboard, [("_hparams_/experiment", described)])
    for trial in journal.trials.values():
        if not trial.results:
            continue
        start = plugin_data_pb2.SessionStartInfo(group_name=f"{trial.number:05d}")
        for name, value in search.parsed_space.parameters(trial.number).items():
            if isinstance(value, str):
                start.hparams[name].string_value = value
            else:
                start.hparams[name].number_value = float(value)
        status = api_pb2.STATUS_SUCCESS if trial.state in _ENDED_WELL else api_pb2.STATUS_UNKNOWN
        end = plugin_data_pb2.SessionEndInfo(status=status)
        _write(
            RunDirectory(directory.trial(trial.number)).tensorboard,
            [
                (
                    "_hparams_/session_start_info",
                    plugin_data_pb2.HParamsPluginData(session_start_info=start, version=0),
                ),
                (
                    "_hparams_/session_end_info",
                    plugin_data_pb2.HParamsPluginData(session_end_info=end, version=0),
                ),
            ],
        )


def _write(directory: Path, contents: list[tuple[str, Any]]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.summary.writer.record_writer import RecordWriter

    events = [Event(file_version="brain.Event:2")]
    for tag, content in contents:
        plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content.SerializeToString())
        metadata = SummaryMetadata(plugin_data=plugin)
        events.append(Event(summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata)])))
    framed = io.BytesIO()
    for event in events:
        RecordWriter(framed).write(event.SerializeToString())
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / _FILE, framed.getvalue())
