"""What a rank finds: torchrun's environment, and a python that cannot be told from ``python script.py``."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest
import torch

from support.commands import PACELINE, in_the_end, paceline_run, run_command, start, write_script

# Not ``python -m paceline``, for which python itself puts the current folder first on the path.
COMMAND = str(pathlib.Path(sys.executable).with_name("paceline"))

FACTS = """
    import gc, json, os, signal, sys, threading

    def own(value):
        return repr(value) if "<" not in repr(value) else type(value).__name__

    def inherits(fd):
        try:
            return os.get_inheritable(fd)
        except OSError:  # the one that listed the folder
            return False

    print(json.dumps({
        "globals": {name: own(value) for name, value in globals().items()},
        "is_main": sys.modules["__main__"].__dict__ is globals(),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[len(sys.orig_argv) - int(os.environ["PROGRAM_LENGTH"]):],
        "path": sys.path,
        "filename": own.__code__.co_filename,
        "flags": list(sys.flags),
        "warnoptions": sys.warnoptions,
        "hook": sys.excepthook is sys.__excepthook__,
        "streams": [[s.line_buffering, s.write_through, s.encoding, s.errors] for s in (sys.stdout, sys.stderr)],
        "signals": {s.name: str(signal.getsignal(s)) for s in signal.valid_signals() if isinstance(s, signal.Signals)},
        "mask": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": signal.set_wakeup_fd(-1),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "native_id": threading.main_thread().native_id == os.getpid(),
        "threads": [thread.name for thread in threading.enumerate()],
        "cwd": os.getcwd(),
        "descriptors": [fd for fd in map(int, os.listdir("/proc/self/fd")) if inherits(fd)],
    }))
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """One program in each form that python can run."""
    write_script(tmp_path, FACTS, "real/script.py")
    write_script(tmp_path, FACTS, "package/__init__.py")
    write_script(tmp_path, FACTS.replace("print(", "__name__ == '__main__' and print("), "package/part.py")
    (tmp_path / "package/__init__.py").write_text("")
    write_script(tmp_path, FACTS, "app/__main__.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(tmp_path / "app/__main__.py", "__main__.py")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/link.py").symlink_to("../real/script.py")
    write_script(tmp_path, "raise AssertionError('shadows a module that the launcher imports')", "socket.py")
    return tmp_path


@pytest.mark.slow
def test_a_rank_cannot_be_told_from_plain_python(folder):
    forms = [
        (["-u", "-O"], ["real/script.py", "-n", "3", "--help", "--", "a b", "\udcff"]),
        (["-W", "error::UserWarning"], ["./real/../links/link.py"]),
        ([], ["-m", "package.part", "-m", "x"]),
        (["-B"], ["app", "x"]),
        ([], ["app.zip"]),
    ]
    runs = []
    for flags, program in forms:
        options = {"cwd": folder, "env": {"PROGRAM_LENGTH": str(len(program))}}
        python = [sys.executable, *flags]
        runs.append((start([*python, *program], **options), start([*python, COMMAND, "run", *program], **options)))
    for plain, launched in runs:
        expected, expected_err = plain.communicate(timeout=60)
        out, err = launched.communicate(timeout=60)
        assert (launched.returncode, err) == (0, expected_err) == (0, "")
        assert json.loads(out) == json.loads(expected)


def test_a_rank_has_torchruns_environment(tmp_path):
    script = write_script(
        tmp_path,
        """
        import json, os, pathlib, socket

        pathlib.Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
        """,
    )
    stale = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "elsewhere", "OMP_NUM_THREADS": None, "SEEN": "yes"}
    assert paceline_run("-n", "2", script, cwd=tmp_path, env=stale).returncode == 0
    environments = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank, environment in enumerate(environments):
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
            "GLOO_SOCKET_IFNAME": "lo",
            "SEEN": "yes",
        }
        assert {name: environment[name] for name in expected} == expected
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert environments[0][name] == environments[1][name] != ""


def test_ranks_meet_through_torch_and_draw_different_numbers(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, random

        import numpy
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        mine = (random.random(), numpy.random.rand(), torch.initial_seed(), torch.get_num_threads())
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        if dist.get_rank() == 0:
            print(*(len(set(values)) for values in zip(*everyones)), torch.get_num_threads())
        dist.destroy_process_group()
        """,
    )
    ran = paceline_run("-n", "3", script, env={"OMP_NUM_THREADS": "2"})
    threads = min(2, len(os.sched_getaffinity(0)))  # torch takes no more than there are
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"3 3 1 1 {threads}\n", "")


@pytest.mark.slow
def test_workers_and_pickles_of_main_work_by_every_start_method(tmp_path):
    script = write_script(
        tmp_path,
        """
        import multiprocessing, pickle, sys

        from torch.utils.data import DataLoader

        class Squares:
            def __len__(self):
                return 4

            def __getitem__(self, i):
                return i * i

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            assert type(pickle.loads(pickle.dumps(Squares()))) is Squares
            for method in ("fork", "forkserver", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(double, [1, 2]))
            for method in sys.argv[1:]:
                batches = DataLoader(Squares(), 2, num_workers=1, multiprocessing_context=method)
                print(method, [batch.tolist() for batch in batches])
        """,
    )
    ran = paceline_run(script, "fork", "spawn")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == [
        "fork [2, 4]",
        "forkserver [2, 4]",
        "spawn [2, 4]",
        "fork [[0, 1], [4, 9]]",
        "spawn [[0, 1], [4, 9]]",
    ]


def test_a_rank_ends_as_python_does(tmp_path):
    source = """
        import atexit, ctypes, threading, time, weakref

        class Named:
            def __del__(self):
                print("deleted", flush=True)

        def late():
            time.sleep(0.2)
            print("thread done", flush=True)

        named = Named()
        other = threading.local()
        weakref.finalize(other, print, "finalized", flush=True)
        atexit.register(print, "at exit", flush=True)
        threading.Thread(target=late).start()
        ctypes.CDLL(None).printf(b"from C\\n")
        print("no newline at the end", end="")
        """
    script = write_script(tmp_path, source)
    plain = run_command([sys.executable, script])
    ran = paceline_run(script)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, plain.stdout, "")
    assert "deleted" in plain.stdout
    assert "from C" in plain.stdout


def test_standard_input_and_signals_ignored_by_nohup_are_passed_down(tmp_path):
    script = write_script(tmp_path, "import signal; print(input()[::-1], signal.getsignal(signal.SIGHUP).name)")
    with open(write_script(tmp_path, "abc\n", "input")) as given:
        assert run_command(["nohup", *PACELINE, "run", script], stdin=given).stdout == "cba SIG_IGN\n"


def test_the_server_starts_no_thread_and_no_process(tmp_path):
    code = (
        "import os, threading\n"
        "from paceline.launch.server.forkserver import preload\n"
        "preload(__file__)\n"
        "import torch\n"
        "print(threading.active_count(), len(os.listdir('/proc/self/task')), torch.cuda.is_initialized())\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read())\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = write_script(tmp_path, f"# optim\n{code}")
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "1 1 False\n\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [("torch.optim.SGD", "True\n"), ("torch.nn.parallel", "True\n"), ("nothing of the kind", "False\n")],
)
def test_what_optimizers_and_torchs_wrapper_import_is_there_for_scripts_that_make_one(tmp_path, source, found):
    script = write_script(tmp_path, f"import sys; print('torch._dynamo' in sys.modules)  # {source}")
    assert paceline_run(script).stdout == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_rank_that_cannot_be_bound_to_cores_near_its_gpu_says_so_and_no_more(tmp_path):
    ran = paceline_run("--numa-binding", "node", write_script(tmp_path, "print('ran')"))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert in_the_end(ran.stderr) == (
        "paceline: rank 0 failed first, exit code 1:\n"
        "paceline.errors.LaunchError: --numa-binding node binds each rank to the cores near its GPU, but torch finds "
        "no CUDA device here; leave it out\n"
    )
