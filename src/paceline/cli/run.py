"""``paceline run``: torchrun's command line, and more."""

from collections.abc import Callable
from typing import Any

import click

from paceline.cli.completion import files, folders, signal_names, words

_NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
_START_METHODS = ("spawn", "fork", "forkserver")


def _option(name: str, *others: str, **settings: Any) -> Callable[[Any], Any]:
    """An option of torchrun's: in both spellings, and from its PET_ variable where it is not given."""
    spellings = [name, *([name.replace("-", "_").replace("__", "--", 1)] if "-" in name[2:] else []), *others]
    variable = "PET_" + name[2:].replace("-", "_").upper()
    return click.option(*dict.fromkeys(spellings), name[2:].replace("-", "_"), envvar=variable, **settings)


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a script on N ranks, of this host or of several.",
)
@click.option(
    "-n",
    "--nproc-per-node",
    "--nproc_per_node",
    "num_ranks",
    metavar="N|auto|cpu|gpu",
    envvar="PET_NPROC_PER_NODE",
    shell_complete=words("auto", "cpu", "gpu"),
    help="Ranks on this host, or on each of --hosts: a number, one a usable core, one a GPU, or (auto) one a GPU where "
    "there are any. [default: 1; under srun, one a GPU of the step]",
)
@_option("--nnodes", metavar="N|LEAST:MOST", help="Hosts, each with a launcher of its own. [default: srun's, or 1]")
@_option("--node-rank", "-nr", type=int, metavar="R", help="This host's number, from 0, with a static rendezvous.")
@click.option(
    "-g",
    "--gpus",
    "num_gpus",
    type=int,
    metavar="G",
    help="Ranks on this host; then -n is the number of hosts, as in many tutorials: -n 4 -g 8 -nr 0.",
)
@_option("--master-addr", metavar="HOST", help="Address of host 0, for a static rendezvous.")
@_option("--master-port", type=int, metavar="PORT", help="Port on which the ranks meet. [default: any free one]")
@_option("--standalone", is_flag=True, help="One host, whatever else is said of the rendezvous.")
@_option(
    "--rdzv-backend",
    shell_complete=words("static", "c10d", "etcd-v2"),
    help="How hosts meet: static, c10d, ... [default: static]",
)
@_option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="Where hosts meet.")
@_option("--rdzv-id", default="", help="Tells this job from others at the same endpoint.")
@_option("--rdzv-conf", default="", metavar="KEY=VALUE,...", help="Further settings of the rendezvous.")
@_option("--local-addr", default="", metavar="ADDR", help="This host's address, as others reach it.")
@_option("--max-restarts", default=0, metavar="N", help="How often all ranks start again after one has failed.")
@click.option(
    "--grace",
    "--shutdown-timeout",
    "--shutdown_timeout",
    "grace_s",
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    envvar=["PACELINE_GRACE", "PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
    help="How long ranks that are asked to stop may take before they are killed.",
)
@click.option(
    "--hang-timeout",
    "hang_timeout_s",
    default=0.0,
    metavar="SECONDS",
    envvar="PACELINE_HANG_TIMEOUT",
    help="Say where all ranks are once one has waited for others for that long, as on SIGUSR2. It ends nothing: a "
    "collective's own timeout (that of init) does. [default: never]",
)
@_option(
    "--signals-to-handle",
    default="",
    metavar="SIG,...",
    shell_complete=signal_names,
    help="Further signals to pass on to the ranks.",
)
@_option(
    "--log-dir",
    metavar="DIR",
    shell_complete=folders,
    help="Folder for the ranks' output; alone, all of it is kept there as well.",
)
@_option("--redirects", "-r", default="0", metavar="0..3|R:0..3,...", help="Keep stdout (1), stderr (2), both (3).")
@_option("--tee", "-t", default="0", metavar="0..3|R:0..3,...", help="As --redirects, and show it too.")
@_option("--local-ranks-filter", default="", metavar="R,...", help="Show the output of these local ranks only.")
@_option("--duplicate-stdout-filters", default="", metavar="WORD,...", help="Keep lines with a WORD in a file, too.")
@_option("--duplicate-stderr-filters", default="", metavar="WORD,...", help="The same of stderr.")
@_option("--role", default="default", help="ROLE_NAME of the ranks.")
@_option("--virtual-local-rank", is_flag=True, help="LOCAL_RANK=0 in all ranks, each of which sees its own GPU alone.")
@click.option("--numa-binding", "--numa_binding", type=click.Choice(_NUMA_MODES), help="Bind ranks to cores near GPUs.")
@_option("--module", "-m", is_flag=True, help="SCRIPT is a module's name, as in `python -m`.")
@_option("--no-python", is_flag=True, help="SCRIPT is a program of any kind.")
@_option("--run-path", is_flag=True, hidden=True)  # what we do anyway
@_option("--monitor-interval", type=float, hidden=True)  # ends are seen when they happen
@_option("--start-method", type=click.Choice(_START_METHODS), hidden=True)  # ranks are forked warm
@_option("--event-log-handler", default="null", hidden=True)
@click.option("--logs-specs", "--logs_specs", hidden=True)
@click.option("--use-env", "--use_env", is_flag=True, hidden=True)  # scripts are asked what they declare
@click.option(
    "--report",
    "report_path",
    default="",
    metavar="FILE",
    shell_complete=files,
    help="Write the verdict there, as JSON.",
)
@click.option("--hosts", metavar="HOST[:N],...", help="Run on these hosts, over ssh, N ranks on each.")
@click.option(
    "--hostfile",
    metavar="FILE",
    shell_complete=files,
    help="The hosts, one a line, as DeepSpeed and MPI write them.",
)
@click.option("--export", "exports", multiple=True, metavar="NAME[=VALUE]", help="A variable that the hosts get, too.")
@click.option(
    "--python", default="", metavar="PATH", shell_complete=files, help="The hosts' interpreter. [default: this one]"
)
@click.option(
    "--workdir", default="", metavar="DIR", shell_complete=folders, help="The hosts' folder. [default: this one]"
)
@click.argument("script", shell_complete=files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=files)
def run(script: str, args: tuple[str, ...], **given: Any) -> int:
    """Run SCRIPT on N ranks; what stands after SCRIPT belongs to it.

    \b
        paceline run -n 4 train.py --lr 0.1
        paceline run -n gpu -m package.train
        paceline run --hosts a:4,b:4 train.py

    Each rank finds torchrun's environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on. torch is imported
    once for all ranks. OMP_NUM_THREADS, unless you set it, shares the cores out among them.

    When a rank fails the others are stopped; its traceback is printed last, and its exit code is that of the launcher.
    Ctrl-C interrupts all ranks, a second one kills them. SIGTERM, SIGHUP and SIGQUIT stop them, SIGUSR1 and SIGUSR2 are
    passed on; SIGUSR2 also shows where each rank is, and in which collective it waits. Nothing that the ranks started
    in their process groups outlives the launcher.
    """
    from paceline.cli.options import job_of, spec_of
    from paceline.launch.conductor.conductor import conduct
    from paceline.launch.supervisor.supervisor import launch

    job = job_of(script, args, given)
    return launch(spec_of(script, args, given)) if job is None else conduct(job)
