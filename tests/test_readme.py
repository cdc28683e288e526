"""The README's Python runs, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ktune.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("text", blocks("python"))
def test_python_blocks_run(text):
    exec(compile(text, "README.md", "exec"), {})


def test_there_is_python_to_run():
    assert blocks("python")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`ktune (\w+)", README))))
def test_commands_exist(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ktune", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in {0, None}
    assert "Usage" in capsys.readouterr().out
