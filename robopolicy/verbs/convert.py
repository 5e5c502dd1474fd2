"""Converts datasets of other projects into a LeRobotDataset v3, which every verb reads.

Reads robomimic's and LIBERO's HDF5, ALOHA's and ACT's HDF5 (a folder of episode_0.hdf5, ...), diffusion_policy's zarr
(a folder or a .zarr.zip), Minari's HDF5, LeRobotDatasets v2.0 and v2.1, arrays in an .npz file, and custom formats.
Without TARGET it prints the mapping of columns and writes nothing. To change the mapping, set "convert.map={obs/joints:
observation.state, obs/object: null}". The files of a folder, and those of convert.merge=[B,C], are merged into one
dataset if their columns, shapes and rates match. convert.episodes and convert.exclude_episodes select episodes;
convert.trim_start and convert.trim_end cut steps off every episode.
"""

import shlex

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError
from robopolicy.data.conversion import Conversion, require_target
from robopolicy.runs import output, print_table, publish
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Convert robomimic, ALOHA, zarr, Minari, npz or LeRobot v2 data to a LeRobotDataset v3",
    sections=("run", "convert"),
    example="robopolicy convert lift.hdf5 data/lift",
    targets=("convert.source", "convert.target"),
)


def run(config: Config) -> int:
    """Print the column mapping, and convert."""
    section = config.convert
    if section.source is None:
        raise ConfigError("No source dataset given. Usage: robopolicy convert SOURCE TARGET")
    sources = [section.source, *section.merge]
    if section.target is not None:
        require_target(section.target, sources, config.run.overwrite)
    with Conversion(sources, section, section.format) as conversion:
        rows = conversion.table
        print_table(f"{section.source} ({conversion.title})", ["key", "holds", "becomes"], rows)
        for note in conversion.notes:
            output.print(f"Note: {note}", markup=False)
        figures = {
            "format": conversion.title,
            "columns": {key: becomes for key, _, becomes in rows},
            "fps": conversion.fps,
            "episodes": len(conversion.chosen),
        }
        if section.target is None:
            rate = f"{conversion.fps:g} steps per second" if conversion.fps else "unknown frame rate (set convert.fps)"
            output.print(f"{len(conversion.chosen)} episodes, {rate}. Dry run: nothing is written without TARGET.")
            publish(config, figures)
            return 0
        episodes, steps = conversion.write(section.target)
    publish(config, figures | {"steps": steps, "dataset": str(section.target)})
    output.print(f"Converted {episodes} episodes, {steps} steps -> {section.target}", markup=False)
    output.print(
        f"Next, check the dataset: robopolicy doctor {shlex.quote(str(section.target))} world=demonstrations",
        markup=False,
    )
    return 0
