import pytest

from paceline.launch.ranks.local_rank import declared_spelling, local_rank_args
from support.commands import paceline_run, write_script


@pytest.mark.parametrize(
    ("source", "spelling"),
    [
        ("parser.add_argument('--local_rank', type=int)", "--local_rank"),
        ("parser.add_argument('-l', '--local-rank', '--local_rank')", "--local-rank"),
        ("@click.option('--local_rank')\ndef main(): pass", "--local_rank"),
        ("@option('--local_rank')\ndef main(): pass", "--local_rank"),
        ("print('--local_rank')  # add_argument('--local_rank')", None),
        ("parser.add_argument('--rank')", None),
        ("def f(:", None),
        ("\0", None),
    ],
)
def test_the_spelling_is_the_one_that_the_script_declares(tmp_path, source, spelling):
    assert declared_spelling(write_script(tmp_path, source)) == spelling


def test_an_option_that_the_user_gave_is_left_alone():
    assert local_rank_args("--local_rank", ("--lr", "1"), 3) == ["--local_rank=3", "--lr", "1"]
    assert local_rank_args("--local_rank", ("--local-rank", "0"), 3) == ["--local-rank", "0"]
    assert local_rank_args(None, ("--lr", "1"), 3) == ["--lr", "1"]


def test_an_older_script_gets_its_local_rank(tmp_path):
    script = write_script(
        tmp_path,
        """
        import argparse, pathlib
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int)
        parser.add_argument("--lr")
        options = parser.parse_args()
        pathlib.Path(__file__).with_name(f"{options.local_rank}-{options.lr}").touch()
        """,
    )
    assert paceline_run("-n", "2", script, "--lr", "1").returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "0-1", "1-1"}
