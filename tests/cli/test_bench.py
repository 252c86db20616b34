"""`octavo bench`: finds its commands and the experiments of the checkout; passes flags on."""

from pathlib import Path

import pytest

from octavo.cli import bench
from octavo.cli.main import main


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["slow"], "no benchmark 'slow'; did you mean 'slo'?; there are serve, latency"),
        (["zzzz"], "no benchmark 'zzzz'; there are serve"),
        ([], "name a benchmark; there are serve, latency, throughput, and the experiments"),
    ],
)
def test_an_unknown_name_gets_the_nearest(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 1
    assert line in capsys.readouterr().err


def test_every_experiment_is_a_module_of_the_checkout() -> None:
    for module, _ in bench.EXPERIMENTS.values():
        assert (bench.ROOT / (module.replace(".", "/") + ".py")).is_file()


def test_a_plain_wheel_has_no_experiments_and_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert main(["bench", "slo", "--save"]) == 1
    assert "slo is an experiment; the experiments come with the source" in capsys.readouterr().err
    assert main(["bench"]) == 1
    said = capsys.readouterr().err
    assert "there are serve, latency, throughput" in said
    assert "come with the source tree" in said


def checkout(root: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "benchmarks").mkdir()
    for name in ("__init__", "run"):
        (root / "benchmarks" / f"{name}.py").write_text("")
    (root / "toybench.py").write_text(body)
    monkeypatch.setattr(bench, "ROOT", root)
    monkeypatch.setitem(bench.EXPERIMENTS, "slo", ("toybench", "a toy"))
    monkeypatch.setattr("sys.path", ["unused"])
    monkeypatch.setattr("sys.argv", ["unused"])


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("sys.exit('bad')", 1)]
)
def test_flags_are_passed_on_and_the_exit_code_comes_back(
    end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    checkout(tmp_path, f"import sys\nprint(__name__, sys.argv[1:])\n{end}\n", monkeypatch)
    assert main(["bench", "slo", "--save", "--reps", "2"]) == code
    captured = capsys.readouterr()
    assert captured.out == "__main__ ['--save', '--reps', '2']\n"
    assert captured.err == ("octavo: bad\n" if code == 1 else "")


def test_a_flag_before_the_name_is_checked_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--save", "slo"])
    assert stop.value.code == 2
    assert "unknown flag '--save'" in capsys.readouterr().err


@pytest.mark.parametrize("name", bench.COMMANDS)
def test_every_command_explains_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", name, "--help"])
    assert stop.value.code == 0
    assert f"usage: octavo bench {name} [" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["bench", name, "--save"])
    assert stop.value.code == 2
    assert f"octavo bench {name}: unknown flag '--save'" in capsys.readouterr().err


def test_names_do_not_collide() -> None:
    assert not bench.COMMANDS.keys() & bench.EXPERIMENTS.keys()
