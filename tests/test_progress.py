from __future__ import annotations

import pytest

from offsphere.progress import Progress, Silent


def test_silence_accepts_all_that_work_has_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    progress: Progress = Silent()
    progress.say("two\nlines")
    done = progress.start("training", 3)
    for steps in (0, 1, 3, 7):
        done(steps)
    assert capsys.readouterr() == ("", "")
